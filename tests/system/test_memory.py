"""A runner that has run for long is no larger than one that has run for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.processes import Installation
from tests.waiting import eventually

FIRST, LAST = 200, 1000
MOST_GROWTH_BYTES = 5 * 1024 * 1024


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Rss line")


async def run_many(there: Installation, dag: str, until: int) -> None:
    """Trigger single-task runs until so many were made and are over."""
    made = int(await there.value("select count(*) from run"))
    query = (
        "select count(*) from dag d, generate_series(%s::int, %s::int) as number,"
        " trigger_run(d.dag_id, '{}', 'number ' || number, ('test', null, null)) where d.name = %s"
    )
    assert await there.value(query, made + 1, until, dag) == until - made
    over = "select count(*) = %s from run_status where state = 'success'"
    await eventually(lambda: there.value(over, until), 120, pause_seconds=0.1)


@pytest.mark.parametrize("dag", ["warm", "alone"])
async def test_a_runner_does_not_grow_with_the_runs_it_has_made(there: Installation, dag: str) -> None:
    """Attempts in reused processes and in single-use ones."""
    runner = await there.start("runner", runner_id="r1", runner_slots=8)
    await run_many(there, dag, FIRST)
    before = resident_bytes(runner.pid)
    await run_many(there, dag, LAST)
    after = resident_bytes(runner.pid)
    print(f"{dag}: {before / 1e6:.3f} MB after {FIRST} runs, {after / 1e6:.3f} MB after {LAST}")
    assert after - before <= MOST_GROWTH_BYTES
