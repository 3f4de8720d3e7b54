"""Generated DAGs, some hundreds: the engine does as `domain/shape.py` says. `make shapes` runs thousands."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import AsyncConnection

from tests.engine.shapes import Differs, play_shapes


@pytest.mark.parametrize("seed", range(4))
async def test_the_engine_does_what_the_model_says(database: str, seed: int) -> None:
    assert await play_shapes(database, seed, 60) == 60


# Faults that the engine could have, each a function of the database with one thing wrong.
PLANTED = {
    "a skip that counts as a failure above": """
        create or replace function state_after(d decision, is_held boolean) returns task_state language sql immutable as $$
            select case d when 'run' then case when is_held then 'pending'::task_state else 'available' end
                          when 'skip' then 'upstream_failed' when 'upstream_failed' then 'upstream_failed' else 'waiting' end $$""",
    "a clear that does not count the upstream anew": """
        create or replace function recount_upstream(p_run_id bigint, p_idxs int[]) returns int language sql as $$ select 0 $$""",
    "instances that are not taken back when something above them runs again": """
        create or replace function fold_unready(p_tasks ended[]) returns ended[] language sql as $$ select '{}'::ended[] $$""",
}


@pytest.mark.parametrize("fault", PLANTED)
async def test_a_planted_fault_is_found(conn: AsyncConnection, database: str, fault: str) -> None:
    await conn.execute(PLANTED[fault])
    with pytest.raises((Differs, psycopg.Error)):
        await play_shapes(database, 1, 60)
