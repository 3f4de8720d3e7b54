"""Tasks that wait without a slot: due waits and the runs that they start, events, and approvals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, cast

from psycopg import AsyncConnection
from psycopg.types.json import Json, Jsonb
from psycopg.types.range import Range

from evertick.db.queries.listings import ListedTask
from evertick.db.queries.run_lists import PageRequest, read_page
from evertick.db.statements import all_rows, one_row, one_value, sql
from evertick.domain.dags.params import JsonValue


@dataclass(frozen=True, slots=True)
class ChildDue:
    """A task that is about to start a run. `depth`: the length of the chain of runs that triggered each other above it. `given`:
    params to take from its `own` run's params, or from `results` of upstream tasks."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    dag: str
    params: dict[str, object]
    depth: int
    parent_dag: str
    given: dict[str, object]
    own: dict[str, object]
    results: dict[str, object]


@dataclass(frozen=True, slots=True)
class ClockDue:
    """A task that waits for a time of day. `since`: the logical date of its run."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    at: str
    timezone: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Woken:
    """How many waits were checked, how many of them were quarantined, and when the next is due."""

    looked_at: int
    refused: int
    next_wake: datetime | None


async def children_due(conn: AsyncConnection, *, shard: int, batch: int) -> list[ChildDue]:
    return await all_rows(conn, sql("waits", "children_due"), {"shard": shard, "batch": batch}, ChildDue)


async def start_child(
    conn: AsyncConnection,
    due: ChildDue,
    *,
    shard: int,
    epoch: int,
    dag_id: int | None,
    params: Mapping[str, object],
    reason: str | None,
) -> int | None:
    """The run; None when the task no longer waits, or fails for `reason`."""
    given = {
        "shard": shard,
        "epoch": epoch,
        "run_id": due.run_id,
        "idx": due.idx,
        "map_index": due.map_index,
        "task_epoch": due.epoch,
        "dag_id": dag_id,
        "params": Json(dict(params)),
        "depth": due.depth + 1,
        "reason": reason,
    }
    return cast("int | None", await one_value(conn, sql("waits", "start_child"), given))


async def clocks_due(conn: AsyncConnection, *, shard: int, batch: int) -> list[ClockDue]:
    return await all_rows(conn, sql("waits", "clocks_due"), {"shard": shard, "batch": batch}, ClockDue)


async def set_clocks(
    conn: AsyncConnection, instants: Sequence[tuple[ClockDue, datetime | str]], *, shard: int, epoch: int
) -> None:
    """The instant of each, or the reason why it has none."""
    rows = [
        {
            "run_id": due.run_id,
            "idx": due.idx,
            "map_index": due.map_index,
            "epoch": due.epoch,
            "wake_at": None if isinstance(at, str) else at.isoformat(),
            "reason": at if isinstance(at, str) else None,
        }
        for due, at in instants
    ]
    await conn.execute(sql("waits", "set_clocks"), {"shard": shard, "epoch": epoch, "instants": Json(rows)})


async def wake_waits(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Woken:
    given = {"shard": shard, "epoch": epoch, "batch": batch}
    done = await one_row(conn, sql("waits", "wake_waits"), given, Woken)
    assert done is not None
    return done


@dataclass(frozen=True, slots=True)
class Sent:
    """`is_new`: False for a key that was sent before; the record then describes the earlier event."""

    event_id: int
    is_new: bool
    sent_at: datetime
    sent_by: str


@dataclass(frozen=True, slots=True)
class EventRow:
    """`is_heard`: it was delivered to the tasks that waited when it arrived."""

    event_id: int
    name: str
    key: str | None
    payload: object
    sent_at: datetime
    sent_by: str
    is_heard: bool


async def send(conn: AsyncConnection, *, name: str, key: str | None, payload: JsonValue, actor: str) -> Sent | None:
    given = {"name": name, "key": key, "payload": Json(payload), "actor": actor}
    return await one_row(conn, sql("waits", "send"), given, Sent)


async def list_events(conn: AsyncConnection, *, name: str | None = None, before: int, limit: int) -> list[EventRow]:
    params = {"name": name, "before": before, "limit": limit}
    return await all_rows(conn, sql("waits", "list_events"), params, EventRow)


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
    return await all_rows(conn, sql("waits", "list_approvals"), given, ApprovalRow)


async def of_task(
    conn: AsyncConnection, *, run_id: int, task: str, map_index: int = -1, limit: int = 1
) -> list[ApprovalRow]:
    """The approvals of one instance of a task, the newest first."""
    given = {"run_id": run_id, "task": task, "map_index": map_index, "limit": limit}
    return await all_rows(conn, sql("waits", "of_task"), given, ApprovalRow)


async def list_questions(
    conn: AsyncConnection, wanted: QuestionFilter, asked: PageRequest
) -> tuple[list[Question], int]:
    """One page, and the total."""
    params = {**asdict(wanted), "names": Jsonb(wanted.names), "kinds": Jsonb(wanted.kinds)}
    return await read_page(conn, sql("waits", "questions"), params, asked, _question)


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
    return cast(bool, await one_value(conn, sql("waits", "decide"), given))
