"""Runs: triggering, canceling, reading, and the reconciliation of state that an interrupted step left behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, query, sql

JsonObject = dict[str, object]
# The same order as in `page_of_all`.
LONGEST_PAGE = 200


@dataclass(frozen=True, slots=True)
class RunRow:
    run_id: int
    dag: str
    version_id: int
    version: int
    kind: str
    key: str | None
    fire_at: datetime | None
    params: JsonObject
    triggered_by: str
    created_at: datetime
    state: str
    open_tasks: int
    cancel_requested: bool
    started_at: datetime | None
    finished_at: datetime | None
    reason: str | None
    task_count: int
    retried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSearch:
    """A filter that is None does not apply. `since` and `until` bound the instant that a run is for: its fire time, or its
    creation. `like`: a LIKE pattern for the DAG's name, the key or the parameters."""

    dag_ids: list[int] | None = None
    state: str | None = None
    kind: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    like: str | None = None


@dataclass(frozen=True, slots=True)
class JournalEntry:
    occurred_at: datetime
    verb: str
    actor: str
    task_index: int | None
    map_index: int | None
    detail: JsonObject


@query
async def find(conn: AsyncConnection, run_id: int) -> RunRow | None: ...


async def list_newest(
    conn: AsyncConnection, *, dag_id: int | None = None, state: str | None = None, limit: int = 50
) -> list[RunRow]:
    values = {"dag_id": dag_id, "state": state, "limit": limit}
    return await all_rows(conn, sql("runs", "list" if dag_id is None else "list_of_dag"), values, RunRow)


@query
async def existing(conn: AsyncConnection, run_ids: list[int]) -> set[int]: ...


@query
async def has_failed(conn: AsyncConnection, *, dag: str, most: int) -> bool: ...


@query
async def newest_of_each_dag(
    conn: AsyncConnection, *, dag_ids: list[int] | None = None, after: str = "", limit: int = 1000
) -> list[RunRow]:
    """In the order of the DAGs' names, after one name."""


@query
async def orphans(conn: AsyncConnection, *, shard: int, orphan_after: float) -> list[int]: ...


@query
async def journal(conn: AsyncConnection, *, run_id: int, limit: int = 200) -> list[JournalEntry]: ...


@query
async def page_of_all(conn: AsyncConnection, *, before: int, limit: int) -> list[RunRow]: ...


@query
async def end_of_window(
    conn: AsyncConnection, *, before: int, dag_ids: list[int] | None, window: int
) -> int | None: ...


async def page(
    conn: AsyncConnection, wanted: RunSearch, *, before: int, limit: int, window: int
) -> tuple[list[RunRow], int | None]:
    """Newest first, and the run before which to continue; None at the end."""
    if wanted == RunSearch() and limit <= LONGEST_PAGE:
        newest = await page_of_all(conn, before=before, limit=limit)
        return newest, newest[-1].run_id if len(newest) == limit else None
    values = {**asdict(wanted), "before": before, "limit": limit, "window": window}
    is_one = wanted.dag_ids is not None and len(wanted.dag_ids) == 1
    found = await all_rows(conn, sql("runs", "page_of_dag" if is_one else "page"), values, RunRow)
    if len(found) == limit:
        return found, found[-1].run_id
    # The window was exhausted: whether older runs exist decides whether there is a next page.
    within = wanted.dag_ids if is_one else None
    end = await end_of_window(conn, before=before, dag_ids=within, window=window)
    if end is None or await end_of_window(conn, before=end, dag_ids=within, window=1) is None:
        return found, None
    return found, end
