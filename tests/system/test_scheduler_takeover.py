"""Schedulers that die, freeze, lose their session or stop: another leads soon, and the old one can change nothing.

Times are compared with the lease, which these tests make long or short: what comes long before its end is no lease's doing.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.system.processes import Installation, Service
from tests.system.work import Published, schedule_now
from tests.waiting import eventually

LONG_LEASE = {"tick_seconds": 0.2, "leader_lease_seconds": 90.0}
# Neither a tick nor a lease helps within these tests.
LONG_TICKS = {"tick_seconds": 60.0, "leader_lease_seconds": 180.0, "lost_after_seconds": 270.0}
# A third of the long lease: time for a machine that does ten other things.
SOON = 30.0

SESSIONS = (
    "select count(pg_terminate_backend(a.pid)) from pg_stat_activity a join pg_locks l on l.pid = a.pid"
    " where l.locktype = 'advisory' and l.classid = 4712 and a.datname = current_database()"
)


async def all_fired(there: Installation, instants: list[object]) -> None:
    await eventually(lambda: there.value("select count(*) >= %s from run", len(instants)), 60)
    rows = await there.rows("select fire_at from run order by 1")
    assert [row[0] for row in rows] == instants


async def stand_by(there: Installation, schedulers: int) -> None:
    """Wait until all of them have asked once, and all but one found that somebody else leads."""
    listening = (
        "select count(*) >= %s from pg_stat_activity where query like 'listen%%' and datname = current_database()"
    )
    await eventually(lambda: there.value(listening, schedulers), 60)


async def led(service: Service) -> float:
    """Wait until it leads; returns how long that took."""
    began = time.monotonic()
    await service.saw("leadership_acquired", within_seconds=60)
    return time.monotonic() - began


@pytest.mark.requirement("N01", "A10", "H3")
async def test_a_killed_leader_is_replaced_long_before_its_lease_ends(there: Installation, long: Published) -> None:
    first = await there.start("scheduler", **LONG_LEASE)
    standby = [there.launch("scheduler", **LONG_LEASE) for _ in range(2)]
    await stand_by(there, 3)
    instants = await schedule_now(there.conn, long, "single", every=0.1, times=30)
    await first.saw("schedules_fired")
    await first.kill()
    began = time.monotonic()
    second = await eventually(lambda: next((each for each in standby if each.events("leadership_acquired")), None), 60)
    assert time.monotonic() - began < SOON
    assert second.events("leadership_acquired")[0]["is_watched"]
    await all_fired(there, list(instants))
    assert await there.value("select epoch from shard") == 2


@pytest.mark.requirement("N02", "A10", "A4", "I3")
async def test_a_leader_that_freezes_between_begin_and_commit_keeps_nobody_waiting(
    there: Installation, long: Published
) -> None:
    """It holds the fence and the schedules that it was about to move. When it wakes up, its transaction is gone."""
    frozen = there.launch("scheduler", freeze_in="fire_schedules")
    await frozen.saw("leadership_acquired")
    standby = there.launch("scheduler")
    instants = await schedule_now(there.conn, long, "single", every=0.1, times=30)
    await eventually(lambda: there.value("select count(*) = 1 from shard where lease_until < clock()"))
    assert await led(standby) < SOON
    await standby.saw("schedules_fired")
    frozen.signal(signal.SIGCONT)
    await eventually(lambda: frozen.events("database_unreachable") or frozen.events("leadership_lost"))
    await all_fired(there, list(instants))
    assert not frozen.events("schedules_fired")
    assert frozen.is_alive


@pytest.mark.requirement("N04", "A10", "A4")
async def test_a_leader_whose_session_is_terminated_costs_a_moment_and_no_fire(
    there: Installation, long: Published
) -> None:
    schedulers = [await there.start("scheduler", **LONG_LEASE), there.launch("scheduler", **LONG_LEASE)]
    instants = await schedule_now(there.conn, long, "single", every=0.1, times=40)
    for number in range(3):
        await eventually(lambda number=number: there.value("select count(*) > %s from run", 8 * (number + 1)))
        await eventually(lambda: there.value(SESSIONS))
    await all_fired(there, list(instants))
    assert all(each.is_alive for each in schedulers)
    # Whoever leads goes on, or the other does: in both cases there is one.
    assert await there.value("select count(*) = 1 from shard where lease_until > clock()")


@pytest.mark.requirement("A10")
async def test_a_leader_that_stops_hands_over_at_once(there: Installation) -> None:
    first = await there.start("scheduler", **LONG_TICKS)
    second = there.launch("scheduler", **LONG_TICKS)
    await stand_by(there, 2)
    await first.terminate()
    assert await led(second) < SOON


@pytest.mark.requirement("N02", "A4")
async def test_a_leader_that_wakes_up_from_a_long_freeze_stands_by(there: Installation, long: Published) -> None:
    first, second = await there.start("scheduler"), there.launch("scheduler")
    first.signal(signal.SIGSTOP)
    await led(second)
    first.signal(signal.SIGCONT)
    await first.saw("leadership_lost")
    instants = await schedule_now(there.conn, long, "single", every=0.1, times=10)
    await all_fired(there, list(instants))
    assert not first.events("schedules_fired")
    # As soon as the session of the one that was frozen is gone, its successor can be watched, too.
    await eventually(lambda: there.value("select has_session_lock from shard"))
    await second.kill()
    assert await led_again(first) < SOON


async def led_again(service: Service) -> float:
    began = time.monotonic()
    await eventually(lambda: len(service.events("leadership_acquired")) == 2, 60)
    return time.monotonic() - began


# What it costs --------------------------------------------------------------------------------------------------------

# What others of the house do beside planning, in their own time.
BESIDE = (
    *("failover.", "function_sets.", "runners.peers", "runners.depths", "runners.names", "runners.published"),
    *("retention.", "server.", "changes."),
)
IDLE = {"tick_seconds": 0.05, "leader_lease_seconds": 5.0, "reconcile_seconds": 60.0, "orphan_after_seconds": 300.0}


def counted(record: Path) -> Counter[str]:
    names = record.read_text().split() if record.exists() else []
    return Counter(name for name in names if not name.startswith(BESIDE))


async def test_an_idle_leader_asks_one_thing_per_tick_and_so_does_a_standby(
    there: Installation, tmp_path: Path
) -> None:
    leading, standing = tmp_path / "leader", tmp_path / "standby"
    await there.start("scheduler", record=leading, **IDLE)
    there.launch("scheduler", record=standing, **IDLE)
    await eventually(lambda: counted(leading)["poll_work"] > 40 and counted(standing)["try_acquire_shard"] > 40, 60)
    asked, stood = counted(leading), counted(standing)
    others = {name: count for name, count in asked.items() if name != "poll_work"}
    # Its timeouts on three connections, the lead, one round over the open runs, what is due; and, where forty ticks of a slow
    # machine are many seconds, what comes once in a while. Nothing is asked with every third tick.
    assert sum(others.values()) < asked["poll_work"] / 3, others
    assert set(stood) <= {"try_acquire_shard", "shards.bound_session"}
