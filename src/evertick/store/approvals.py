"""Approvals: questions to people, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class ApprovalRow:
    """`wait` is what its DAG's version says: the form and who may decide. `is_open`: its task still waits for this answer."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    dag: str
    task: str
    dag_id: int
    title: str
    asked_at: datetime
    deadline: datetime | None
    decided_at: datetime | None
    decided_by: str | None
    is_approved: bool | None
    note: str | None
    fields: dict[str, Any] | None
    wait: dict[str, Any]
    is_open: bool | None


async def list_approvals(
    conn: AsyncConnection, *, dag_ids: list[int] | None = None, limit: int = 100
) -> list[ApprovalRow]:
    """What people are asked now."""
    given = {"dag_ids": dag_ids, "limit": limit}
    return await all_rows(conn, sql("approvals", "list_approvals"), given, ApprovalRow)


async def of_task(conn: AsyncConnection, *, run_id: int, task: str, limit: int = 1) -> list[ApprovalRow]:
    given = {"run_id": run_id, "task": task, "limit": limit}
    return await all_rows(conn, sql("approvals", "of_task"), given, ApprovalRow)


async def decide(
    conn: AsyncConnection,
    row: ApprovalRow,
    *,
    is_approved: bool,
    actor: str,
    note: str | None,
    fields: Mapping[str, object],
) -> bool:
    """Whether this was the decision; False when the task does not wait for one any more."""
    given = {
        "run_id": row.run_id,
        "idx": row.idx,
        "map_index": row.map_index,
        "epoch": row.epoch,
        "is_approved": is_approved,
        "actor": actor,
        "note": note,
        "fields": Json(dict(fields)),
    }
    return cast(bool, await one_value(conn, sql("approvals", "decide"), given))
