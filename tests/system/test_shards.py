"""Four shards and three schedulers that die and freeze: each shard has one leader at a time, and every fire exactly one run."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile

import pytest

from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.publish import publish
from evertick.engine.shards import set_shards
from tests.system.processes import Installation, Service
from tests.system.work import Published, start_with
from tests.waiting import eventually

SHARDS = 4


async def schedule_several(there: Installation, work: Published, *, dags: int, times: int) -> list[datetime]:
    """So many DAGs that each shard has some, each firing ten times per second; returns their instants."""
    first = await shards.read_clock(there.conn) + timedelta(seconds=0.3)
    instants = [first + timedelta(seconds=0.1 * number) for number in range(times)]
    every = parse_schedule(timedelta(seconds=0.1), start_at=first, anchor_at=first, end_at=instants[-1])
    spec = next(each for each in work.specs if each.name == "single")
    for number in range(dags):
        name = f"single{number}"
        made = replace(spec, name=name, schedules=(NamedSchedule(name="s", spec=every),), misfire=MisfirePolicy.ALL)
        async with there.conn.transaction():
            await publish(there.conn, spec=made, file=work.file, bundle_hash=work.bundle.hash, actor=Actor("test"))
            await start_with(there.conn, name, first)
    return instants


async def led_by(there: Installation) -> dict[int, str]:
    rows = await there.rows("select shard, leader from shard where lease_until > clock() and leader is not null")
    return {int(shard): str(owner) for shard, owner in rows}


async def is_shared(there: Installation, schedulers: list[Service]) -> bool:
    led = Counter((await led_by(there)).values())
    counts = [led[f"scheduler-{each.pid}"] for each in schedulers]
    return sum(counts) == SHARDS and max(counts) - min(counts) <= 1


async def all_fired_once(there: Installation, instants: list[datetime], dags: int) -> None:
    await eventually(lambda: there.value("select count(*) >= %s from run", dags * len(instants)), 60)
    counts = await there.rows("select schedule_id, count(*), count(distinct fire_at) from run group by 1")
    assert {row[1:] for row in counts} == {(len(instants), len(instants))}
    assert len(counts) == dags


@pytest.mark.requirement("N01", "N02", "I3", "A10", "V1", "B11")
async def test_schedulers_that_are_killed_and_frozen_leave_no_shard_without_a_leader(
    there: Installation, long: Published
) -> None:
    await set_shards(there.conn, shards=SHARDS, actor=Actor("test"))
    schedulers = [there.launch("scheduler") for _ in range(3)]
    await eventually(lambda: is_shared(there, schedulers), 60)
    instants = await schedule_several(there, long, dags=12, times=40)
    await eventually(lambda: there.value("select count(distinct d.shard) = 4 from run join dag d using (dag_id)"))
    killed = schedulers.pop()
    await killed.kill()
    await eventually(lambda: is_shared(there, schedulers), 60)
    frozen, alone = schedulers
    frozen.signal(signal.SIGSTOP)
    await eventually(lambda: is_shared(there, [alone]), 60)
    told = len(frozen.events())
    frozen.signal(signal.SIGCONT)
    await frozen.saw("leadership_lost")
    await eventually(lambda: is_shared(there, schedulers), 60)
    for shard in range(SHARDS):
        said = [str(each["event"]) for each in frozen.events()[told:] if each.get("shard") == shard]
        until_led = [
            each
            for each in takewhile(lambda each: each != "leadership_acquired", said)
            if each in ("schedules_fired", "leadership_lost")
        ]
        # What it had committed when it froze it may still tell of. After that it leads again before it fires again.
        assert until_led in ([], ["leadership_lost"], ["schedules_fired", "leadership_lost"]), (shard, said)
    await all_fired_once(there, instants, 12)


@pytest.mark.requirement("A10")
async def test_a_scheduler_that_stops_hands_all_its_shards_over(there: Installation) -> None:
    await set_shards(there.conn, shards=SHARDS, actor=Actor("test"))
    # A share of the lease is what a statement may wait for a lock: with a short one a busy machine says "not_resigned".
    schedulers = [there.launch("scheduler", leader_lease_seconds=30.0) for _ in range(2)]
    await eventually(lambda: is_shared(there, schedulers), 60)
    leaving, staying = schedulers
    assert await leaving.terminate() == 0
    await eventually(lambda: is_shared(there, [staying]), 60)
    assert not leaving.events("leadership_release_failed")
    await eventually(lambda: {event["shard"] for event in staying.events("leadership_acquired")} == set(range(SHARDS)))
