"""Approvals: the questions that tasks ask people, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, cast

from psycopg import AsyncConnection
from psycopg.types.json import Json, Jsonb
from psycopg.types.range import Range

from evertick.store.listing import ListedTask
from evertick.store.pages import Asked, read_page
from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql

_OF_TASK = len(fields(ListedTask))


@dataclass(frozen=True, slots=True)
class ApprovalRow:
    """`wait` is from its DAG's version: the form and the required role. `is_open`: the task still waits for this answer."""

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


@dataclass(frozen=True, slots=True)
class Question:
    """A task's newest approval, with the task as listed."""

    task: ListedTask
    title: str
    asked_at: datetime
    decided_at: datetime | None
    decided_by: str | None
    is_approved: bool | None
    fields: dict[str, Any] | None
    wait: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFilter:
    """A filter that is None does not apply. `answerers`: names of the accounts that decided."""

    run_id: int | None = None
    dag_id: int | None = None
    dag_ids: list[int] | None = None
    dag_like: list[str] | None = None
    dag_heads: list[str] | None = None
    task: str | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    map_index: int | None = None
    states: list[str] | None = None
    is_answered: bool | None = None
    answerers: list[str] | None = None
    title_like: list[str] | None = None
    asked: Range[datetime] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)


async def list_approvals(
    conn: AsyncConnection, *, dag_ids: list[int] | None = None, limit: int = 100
) -> list[ApprovalRow]:
    """The approvals that are open now."""
    given = {"dag_ids": dag_ids, "limit": limit}
    return await all_rows(conn, sql("approvals", "list_approvals"), given, ApprovalRow)


async def of_task(
    conn: AsyncConnection, *, run_id: int, task: str, map_index: int = -1, limit: int = 1
) -> list[ApprovalRow]:
    """The approvals of one instance of a task, the newest first."""
    given = {"run_id": run_id, "task": task, "map_index": map_index, "limit": limit}
    return await all_rows(conn, sql("approvals", "of_task"), given, ApprovalRow)


async def list_questions(conn: AsyncConnection, wanted: QuestionFilter, asked: Asked) -> tuple[list[Question], int]:
    """One page, and the total."""
    params = {**asdict(wanted), "names": Jsonb(wanted.names), "kinds": Jsonb(wanted.kinds)}
    return await read_page(conn, sql("approvals", "questions"), params, asked, _question)


def _question(*values: Any) -> Question:
    return Question(ListedTask(*values[:_OF_TASK]), *values[_OF_TASK:])


async def decide(
    conn: AsyncConnection,
    row: ApprovalRow,
    *,
    is_approved: bool,
    actor: str,
    note: str | None,
    fields: Mapping[str, object],
) -> bool:
    """Whether this call decided it; False when the task no longer waits for a decision."""
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
