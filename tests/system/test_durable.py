"""Steps and state in real processes: kill -9 at every boundary, warm processes, coroutines. `make durable` kills 1,000 times."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from tests.engine.world import value
from tests.system.durable import BOUNDARIES, play, stale_writes


@pytest.mark.long
async def test_no_finished_step_runs_again_wherever_its_process_is_killed(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    done = await play(conn, database, tmp_path, cases=2)
    assert (done.kills, done.again, done.lost) == (2 * len(BOUNDARIES), [], 0)
    assert len(done.step_seconds) == 20
    kept = "select jsonb_object_agg(key, value) from state_entry where owner = 'concurrent'"
    assert await value(conn, kept) == {"case 1": 2, "case 2": 3, "case 3": 4}
    assert await value(conn, "select count(*) from state_entry where owner = 'orders' and dag_id = 0") == 3


async def test_no_write_of_an_attempt_that_runs_elsewhere_by_now_is_accepted(conn: AsyncConnection) -> None:
    assert await stale_writes(conn, 60) == (60, 0)
