"""Several runners on one database: nothing twice, never more than the slots, and wake-ups that only shorten waits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from evertick.db.notify import Channel, notify
from tests.system.processes import Installation
from tests.system.work import Published, most_at_once, publish_work, schedule_now, start_run
from tests.waiting import eventually

# A tick this long cannot be taken for a wake-up, not even on a machine that needs seconds to load the code.
SLOW_TICKS: dict[str, Any] = {
    "tick_seconds": 20.0,
    "leader_lease_seconds": 60.0,
    "heartbeat_seconds": 2.0,
    "lost_after_seconds": 60.0,
}


@pytest.mark.requirement("K1", "K8", "K7", "K11", "I4", "D2")
async def test_four_runners_never_execute_one_attempt_twice_nor_exceed_their_slots(there: Installation) -> None:
    slots = 3
    names = ["r1", "r2", "r3", "r4"]
    for name in names:
        await there.start("runner", runner_id=name, runner_slots=slots)
    runs = [await start_run(there.conn, "many") for _ in range(3)]
    assert [await there.ended(run_id, 60) for run_id in runs] == ["success"] * 3
    found = there.effects()
    assert len([each for each in found if each.what == "begin"]) == 3 * 81
    assert len({(each.run_id, each.task) for each in found}) == 3 * 81
    for name in names:
        assert 0 < most_at_once(each for each in found if each.runner == name) <= slots, name
    assert await there.value("select max(epoch) from task") == 1, "nothing had to be tried again"


async def seconds_to_begin(there: Installation, dag: str, task: str, **wake: bool) -> float:
    """From the trigger, with the wake-up that the command sends, to the first line of the body."""
    started_at = time.monotonic_ns()
    run_id = await start_run(there.conn, dag)
    if wake.get("is_woken", True):
        await notify(there.conn, Channel.TASKS)

    def begin() -> int | None:
        found = [e for e in there.effects() if (e.run_id, e.task, e.what) == (run_id, task, "begin")]
        return found[0].nanoseconds if found else None

    nanoseconds = await eventually(begin, 60)
    return float(nanoseconds - started_at) / 1e9


@pytest.mark.serial
@pytest.mark.requirement("D6")
async def test_a_wake_up_starts_work_long_before_the_next_tick(there: Installation, long: Published) -> None:
    for name in ("r1", "r2"):
        await there.start("runner", runner_id=name, **SLOW_TICKS)
    await there.start("scheduler", **SLOW_TICKS)
    await seconds_to_begin(there, "holding", "hold")  # the code is loaded now, on one of them at least
    measured = [await seconds_to_begin(there, "single", "quick") for _ in range(10)]
    print(f"from trigger to body: best {min(measured) * 1000:.1f} ms, worst {max(measured) * 1000:.1f} ms")
    assert max(measured) < SLOW_TICKS["tick_seconds"] / 2
    # A retry and a fire are waits for a time: the scheduler sleeps until then and wakes the runners.
    run_id = await start_run(there.conn, "again")
    await notify(there.conn, Channel.TASKS)
    first, second = await there.begun("fail_once"), await there.begun("fail_once", epoch=2)
    assert (second.nanoseconds - first.nanoseconds) / 1e9 < 0.2 + SLOW_TICKS["tick_seconds"] / 2
    assert await there.ended(run_id) == "success"


@pytest.mark.requirement("D6")
async def test_with_notify_switched_off_everything_works_at_tick_speed(there: Installation, long: Published) -> None:
    await there.start("runner", runner_id="r1", listen_notify=False)
    await there.start("scheduler", listen_notify=False)
    instants = await schedule_now(there.conn, long, "single", every=0.3, times=3)
    run_id = await start_run(there.conn, "again")
    assert await there.ended(run_id) == "success"
    await eventually(
        lambda: there.value(
            "select count(*) = 3 from run_status s join run using (run_id)"
            " where fire_at is not null and s.state = 'success'"
        )
    )
    assert [
        row[0] for row in await there.rows("select fire_at from run where fire_at is not null order by 1")
    ] == instants
    await publish_work(there.conn, long, only=["single"])
    delays = [await seconds_to_begin(there, "single", "quick", is_woken=False) for _ in range(5)]
    print(f"without wake-ups, from trigger to body: {[f'{each * 1000:.0f} ms' for each in delays]}")
    assert max(delays) < 100 * there.settings().tick_seconds
    listening = "select count(*) from pg_stat_activity where datname = current_database() and query like 'listen %%'"
    assert await there.value(listening) == 0
