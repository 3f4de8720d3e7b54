"""Pages of lists: a statement says only what is asked, and means the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import run_lists
from evertick.db.queries.run_lists import PageRequest, RunFilter, only_asked
from evertick.db.statements import all_rows, sql, statements
from tests.engine.world import make_dag, put, start

NONE: frozenset[str] = frozenset()
STATEMENT = """select 1 from t where (%(a)s::int is null or a = %(a)s) and (%(b)s::text[] is null
   or b = any(%(b)s) or (c is null or c = lower('x'))) and (%(d)s::boolean is not true or d) and (e is null or e > 0)"""


WHOLE = "select 1 from t where true and true and true and (e is null or e > 0)"


@pytest.mark.parametrize(
    ("unasked", "untrue", "left"),
    [
        ("abd", "", WHOLE),
        ("ab", "d", WHOLE),
        (
            "b",
            "",
            "select 1 from t where (%(a)s::int is null or a = %(a)s) and true and (%(d)s::boolean is not true or d)",
        ),
        # False is an answer where null is asked for.
        ("", "a", "select 1 from t where (%(a)s::int is null or a = %(a)s) and (%(b)s"),
        ("", "", STATEMENT),
        ("ec", "", STATEMENT),
    ],
)
def test_what_is_not_asked_is_left_out_and_nothing_else(unasked: str, untrue: str, left: str) -> None:
    assert only_asked(STATEMENT, frozenset(unasked), frozenset(untrue)).startswith(left)


def test_within_what_is_left_out_nothing_is_looked_for() -> None:
    nested = "x where (%(a)s::int is null or (%(b)s::int is null or b = %(b)s)) and (%(b)s::int is null or b = %(b)s)"
    assert only_asked(nested, frozenset("ab"), NONE) == "x where true and true"
    assert only_asked(nested, frozenset("b"), NONE) == "x where (%(a)s::int is null or true) and true"


@pytest.mark.parametrize("name", ["runs", "tasks", "dags"])
def test_each_condition_of_a_list_can_be_left_out(name: str) -> None:
    statement = sql("listings", name)
    asked = set(re.findall(r"%\((\w+)\)s::[\w\[\]]+ is (?:null|not true)", statement))
    left = only_asked(statement, frozenset(asked), NONE)
    assert len(asked) > 10 and not set(re.findall(r"%\((\w+)\)s::[\w\[\]]+ is (?:null|not true)", left))
    assert left.count("(") == left.count(")") and name in statements("listings")


@pytest.mark.parametrize("deletions", [1, 2])
async def test_a_run_that_is_deleted_while_its_page_is_read_makes_no_page_shorter(
    conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch, deletions: int
) -> None:
    await put(conn, make_dag("d", {"t": []}))
    run_ids = [await start(conn, "d") for _ in range(6)]
    gone = run_ids[:deletions]
    left = list(gone)

    async def fetch(reader: AsyncConnection, *arguments: Any) -> list[Any]:
        if left:
            await conn.execute(
                "with r as (delete from run where run_id = %(id)s) delete from run_status where run_id = %(id)s",
                {"id": left.pop(0)},
            )
        return await all_rows(reader, *arguments)

    monkeypatch.setattr(run_lists, "all_rows", fetch)
    found, total = await run_lists.list_runs(conn, RunFilter(), PageRequest(limit=3))
    assert [run.run_id for run in found] == run_ids[deletions : deletions + 3] and total == 6 - deletions
