"""Runs: triggering, canceling, reading, and the reconciliation of state that an interrupted step left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.statements import all_rows, one_row, one_value, sql

JsonObject = dict[str, object]
# The same order as in `page_of_all`.
LONGEST_PAGE = 200


@dataclass(frozen=True, slots=True)
class Triggered:
    """`defers`: some of its first tasks wait for something outside, and the leader has to check them."""

    run_id: int
    is_new: bool
    defers: bool = False


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
    failed_leaves: int
    cancel_requested: bool
    started_at: datetime | None
    finished_at: datetime | None
    reason: str | None
    task_count: int
    retried: int


@dataclass(frozen=True, slots=True)
class Reconciled:
    last_dag_id: int | None
    last_run_id: int | None
    repaired: list[str]
    refused: int

    @property
    def last(self) -> tuple[int, int]:
        """Where the next batch starts."""
        return (self.last_dag_id or 0, self.last_run_id or 0)


@dataclass(frozen=True, slots=True)
class _Skipped:
    skipped_dag_id: int | None
    skipped_run_id: int | None


@dataclass(frozen=True, slots=True)
class Admitted:
    """How many queued runs started, and how many DAGs were quarantined because their runs could not."""

    admitted: int
    refused: int


@dataclass(frozen=True, slots=True)
class JournalEntry:
    occurred_at: datetime
    verb: str
    actor: str
    idx: int | None
    map_index: int | None
    detail: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Particulars:
    """The properties of a run besides its parameters. `key`: an idempotency key, the same key is the same run; `fire_at`: the
    logical date, of which a DAG has one run."""

    key: str | None = None
    fire_at: datetime | None = None
    note: str | None = None


async def trigger(
    conn: AsyncConnection,
    *,
    dag_id: int,
    params: Mapping[str, object],
    actor: str,
    key: str | None = None,
    about: Particulars | None = None,
) -> Triggered | None:
    values = {"dag_id": dag_id, "params": Jsonb(dict(params)), "actor": actor, **asdict(about or Particulars(key=key))}
    return await one_row(conn, sql("runs", "trigger"), values, Triggered)


async def delete(conn: AsyncConnection, *, run_id: int, actor: str) -> str | None:
    """'deleted', 'open', or None: there is no such run."""
    return cast("str | None", await one_value(conn, sql("runs", "delete"), {"run_id": run_id, "actor": actor}))


async def cancel(conn: AsyncConnection, *, run_id: int, actor: str, reason: str) -> int | None:
    """The number of tasks with a stop request, or None if the run is not open."""
    values = {"run_id": run_id, "actor": actor, "reason": reason}
    return cast("int | None", await one_value(conn, sql("runs", "cancel"), values))


async def find(conn: AsyncConnection, run_id: int) -> RunRow | None:
    return await one_row(conn, sql("runs", "find"), {"run_id": run_id}, RunRow)


async def list_newest(
    conn: AsyncConnection, *, dag_id: int | None = None, state: str | None = None, limit: int = 50
) -> list[RunRow]:
    values = {"dag_id": dag_id, "state": state, "limit": limit}
    return await all_rows(conn, sql("runs", "list" if dag_id is None else "list_of_dag"), values, RunRow)


async def existing(conn: AsyncConnection, run_ids: list[int]) -> set[int]:
    cursor = await conn.execute(sql("runs", "existing"), {"run_ids": run_ids})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def newest_of_each_dag(
    conn: AsyncConnection, *, dag_ids: list[int] | None = None, after: str = "", limit: int = 1000
) -> list[RunRow]:
    """In the order of the DAGs' names, after one name."""
    params = {"dag_ids": dag_ids, "after": after, "limit": limit}
    return await all_rows(conn, sql("runs", "newest_of_each_dag"), params, RunRow)


async def reconcile(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    after: tuple[int, int],
    batch: int,
    elapsed: float,
    counts_line: bool,
) -> Reconciled:
    values = {
        "shard": shard,
        "epoch": epoch,
        "after_dag": after[0],
        "after_run": after[1],
        "batch": batch,
        "elapsed": elapsed,
        "counts_line": counts_line,
    }
    row = await one_row(conn, sql("runs", "reconcile"), values, Reconciled)
    assert row is not None
    return row


async def skip_one(conn: AsyncConnection, *, shard: int, epoch: int, after: tuple[int, int]) -> tuple[int, int]:
    """Where to continue after the quarantined run."""
    values = {"shard": shard, "epoch": epoch, "after_dag": after[0], "after_run": after[1]}
    row = await one_row(conn, sql("runs", "skip_one"), values, _Skipped)
    assert row is not None
    return (row.skipped_dag_id or 0, row.skipped_run_id or 0)


async def admit(conn: AsyncConnection, *, shard: int, epoch: int) -> Admitted:
    row = await one_row(conn, sql("runs", "admit"), {"shard": shard, "epoch": epoch}, Admitted)
    assert row is not None
    return row


async def time_out(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int) -> int | None:
    values = {"shard": shard, "epoch": epoch, "run_id": run_id}
    return cast("int | None", await one_value(conn, sql("runs", "time_out"), values))


async def orphans(conn: AsyncConnection, *, shard: int, orphan_after: float) -> list[int]:
    cursor = await conn.execute(sql("runs", "orphans"), {"shard": shard, "orphan_after": orphan_after})
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def reap_orphan(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int, orphan_after: float) -> str:
    values = {"shard": shard, "epoch": epoch, "run_id": run_id, "orphan_after": orphan_after}
    return cast(str, await one_value(conn, sql("runs", "reap_orphan"), values))


async def journal(conn: AsyncConnection, *, run_id: int, limit: int = 200) -> list[JournalEntry]:
    return await all_rows(conn, sql("runs", "journal"), {"run_id": run_id, "limit": limit}, JournalEntry)


async def page(
    conn: AsyncConnection, *, before: int, dag_ids: list[int] | None, state: str | None, limit: int, window: int
) -> tuple[list[RunRow], int | None]:
    """Newest first, and the run before which to continue; None at the end."""
    if dag_ids is None and state is None and limit <= LONGEST_PAGE:
        newest = await all_rows(conn, sql("runs", "page_of_all"), {"before": before, "limit": limit}, RunRow)
        return newest, newest[-1].run_id if len(newest) == limit else None
    values = {"before": before, "dag_ids": dag_ids, "state": state, "limit": limit, "window": window}
    is_one = dag_ids is not None and len(dag_ids) == 1
    found = await all_rows(conn, sql("runs", "page_of_dag" if is_one else "page"), values, RunRow)
    if len(found) == limit:
        return found, found[-1].run_id
    # The window was exhausted: whether older runs exist decides whether there is a next page.
    rest = {**values, "dag_ids": dag_ids if is_one else None}
    end = await one_value(conn, sql("runs", "end_of_window"), rest)
    if end is None:
        return found, None
    more = await one_value(conn, sql("runs", "end_of_window"), {**rest, "before": end, "window": 1})
    return found, None if more is None else cast(int, end)
