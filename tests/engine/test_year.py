"""A short form of the simulated year; `make year` runs the whole of it."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from tests.engine.year import Mismatch, Year, run_year


@pytest.mark.requirement("I7", "I2", "I1", "R1", "S3", "M2")
async def test_fires_and_skips_of_random_schedules_equal_the_oracle(database: str) -> None:
    did = await run_year(database, seed=1, schedules=40, days=60)
    assert did["runs"] > 100 and did["skip_records"] > 100
    assert min(did[each] for each in ("crash", "edit", "hold", "hold_dag", "remove", "deploy")) > 0


_PLANTS = {
    "a fire that is missing": "delete from run where run_id = (select max(run_id) from run)",
    "a fire that came twice": "insert into run (dag_id, version_id, kind, schedule_id, fire_at, params, triggered_by, created_at)"
    " select dag_id, version_id, kind, schedule_id, fire_at + interval '1 us', params, triggered_by, created_at from run limit 1",
    "a skip that is missing": "delete from skip_record where ctid = (select ctid from skip_record limit 1)",
    "a count that is wrong": "update skip_record set count = count + 1 where ctid = (select ctid from skip_record limit 1)",
    "a reason that is wrong": "update skip_record set reason = 'x' where ctid = (select ctid from skip_record limit 1)",
}


async def test_the_comparison_finds_whatever_is_planted(database: str) -> None:
    """A checker that never failed proves nothing."""
    conns: list[AsyncConnection] = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(2)]
    try:
        year = Year(conns, seed=5, schedules=10, days=20)
        await year.run()
        for plant in _PLANTS.values():
            async with conns[0].transaction(force_rollback=True):
                await conns[0].execute(plant)  # type: ignore[arg-type]
                with pytest.raises(Mismatch):
                    await year.compare()
        await year.compare()
    finally:
        for conn in conns:
            await conn.close()
