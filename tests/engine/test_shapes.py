"""Generated DAGs, more than a hundred: the engine does as `domain/dags/run_model.py` says. `make shapes` runs thousands."""

from __future__ import annotations

import ast
import inspect

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.domain.dags import run_model
from tests.engine.shapes import Differs, play_shapes

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.mark.parametrize("seed", range(2))
async def test_the_engine_does_what_the_model_says(database: str, seed: int) -> None:
    assert await play_shapes(database, seed, 60) == 60


def test_the_model_can_be_read_in_one_sitting() -> None:
    """What the engine is held against has at most 150 lines of code: without imports, comments and docstrings."""
    text = inspect.getsource(run_model)
    tree = ast.parse(text)
    others = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others += [node.body[0] for node in ast.walk(tree) if isinstance(node, _DOCUMENTED) and ast.get_docstring(node)]
    aside = {line for node in others for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in aside]
    assert len([line for line in lines if line and not line.startswith("#")]) <= 150


# Faults that the engine could have, each a function of the database with one thing wrong.
PLANTED = {
    "a skip that counts as a failure above": """
        create or replace function state_for_decision(d rule_decision, is_held boolean)
        returns task_state language sql immutable as $$
            select case d when 'run' then case when is_held then 'pending'::task_state else 'available' end
                          when 'skip' then 'upstream_failed' when 'upstream_failed' then 'upstream_failed' else 'waiting' end $$""",
    "a clear that does not count the upstream anew": """
        create or replace function recount_upstream(p_run_id bigint, p_idxs int[]) returns int language sql as $$ select 0 $$""",
    "a group that is heard of before all of it has ended": """
        create or replace function complete_groups(p_ended task_ref[], out heard task_ref[], out again group_ref[])
        language sql as $$
            select p_ended, '{}'::group_ref[] $$""",
    "a group that begins again for ever": """
        create or replace function should_retry_group(p_group group_ref) returns boolean language sql as $$ select true $$""",
    "instances that are not taken back when something above them runs again": """
        create or replace function collapse_unready(p_tasks task_ref[], fx effects) returns move_result language sql
        as $$ select row('{}'::task_ref[], fx)::move_result $$""",
}


@pytest.mark.parametrize("fault", PLANTED)
async def test_a_planted_fault_is_found(conn: AsyncConnection, database: str, fault: str) -> None:
    await conn.execute(PLANTED[fault])
    with pytest.raises((Differs, psycopg.Error)):
        await play_shapes(database, 1, 60)
