"""Backfills by real schedulers and runners: killed in the middle, followed by another, finished all the same."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from evertick.db.queries import backfills, shards
from evertick.domain.access import Actor
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.backfills import BackfillRequest, create
from tests.system.processes import Installation
from tests.waiting import eventually

COUNT = 600


async def make(there: Installation, *, count: int, **fields: Any) -> int:
    """Of the last so many seconds; the newest is a moment ago."""
    now = (await shards.read_clock(there.conn)).replace(microsecond=0)
    first, last = now - timedelta(seconds=count), now - timedelta(seconds=1)
    wish = BackfillRequest(dag="single", first=first, last=last, spec=parse_schedule("@every 1s"), **fields)
    made, outlook = await create(there.conn, wish, request="r", actor=Actor("test"))
    assert outlook.total == count
    return made.id


async def instants(there: Installation) -> list[datetime]:
    return [row[0] for row in await there.rows("select fire_at from run where kind = 'backfill' order by run_id")]


@pytest.mark.requirement("S3", "I3", "M2", "V9")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_scheduler_that_is_killed_in_the_middle_of_it_leaves_nothing_out_and_nothing_double(
    there: Installation, when: str
) -> None:
    """Killed at its second step, before it is sent or when it is committed and nobody knows. There is no runner: all stay open."""
    await make(there, count=COUNT, parallel=1000)
    first = there.launch("scheduler", failpoint=f"advance_backfill:{when}:2")
    assert await first.ended() == -9
    made = len(await instants(there))
    assert 0 < made < COUNT
    await there.start("scheduler")
    await eventually(lambda: there.value("select is_planned from backfill"))
    found = await instants(there)
    assert len(found) == COUNT and found == sorted(set(found))
    row = await backfills.find(there.conn, 1)
    assert row is not None and (row.made, row.open_runs, row.left_alone) == (COUNT, COUNT, 0)


@pytest.mark.requirement("S3")
async def test_it_runs_to_its_end_a_few_at_a_time(there: Installation) -> None:
    await there.start("scheduler")
    await there.start("runner")
    await make(there, count=12, parallel=2, newest_first=True)
    await eventually(lambda: there.value("select state = 'done' from backfill"), 60)
    found = await instants(there)
    assert len(found) == 12 and found == sorted(found, reverse=True)
    row = await backfills.find(there.conn, 1)
    assert row is not None and (row.succeeded, row.made) == (12, 12)
    most = """select max(n) from (
        select (select count(*) from run_status o join run r using (run_id)
                where r.kind = 'backfill' and o.started_at <= s.started_at and o.finished_at > s.started_at) as n
        from run_status s) x"""
    assert await there.value(most) <= 2
