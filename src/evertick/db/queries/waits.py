"""Tasks that wait without a slot: due waits and the runs that they start, events, and approvals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.db.queries.listings import ListedTask
from evertick.db.queries.run_lists import PageRequest, read_page
from evertick.db.statements import query, sql, sql_function
from evertick.domain.attempt import TaskKey


@dataclass(frozen=True, slots=True)
class ChildDue:
    """A task that is about to start a run. `depth`: the length of the chain of runs that triggered each other, it included.
    `given`: params to take from its `own` run's params, or from `results` of upstream tasks."""

    run_id: int
    idx: int
    map_index: int
    task_epoch: int
    dag: str
    params: dict[str, object]
    depth: int
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


@sql_function(retries=False)
async def child_runs_due(conn: AsyncConnection, *, shard: int, limit: int) -> list[ChildDue]: ...


@sql_function(retries=False)
async def clock_waits_due(conn: AsyncConnection, *, shard: int, limit: int) -> list[ClockDue]: ...


@dataclass(frozen=True, slots=True)
class EventRow:
    """`is_delivered`: it was delivered to the tasks that waited when it arrived."""

    event_id: int
    name: str
    key: str | None
    payload: object
    sent_at: datetime
    sent_by: str
    is_delivered: bool


@query
async def list_events(conn: AsyncConnection, *, name: str | None = None, before: int, limit: int) -> list[EventRow]: ...


_OF_TASK = len(fields(ListedTask))


@dataclass(frozen=True, slots=True)
class ApprovalRow:
    """`wait` has the form and the required role, from its DAG's version, or the options and users of an
    attempt's question. `is_open`: the task still waits for this answer."""

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
    chosen: list[str] | None
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
    chosen: list[str] | None
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
    body_like: list[str] | None = None
    asked: Range[datetime] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)


_BEFORE_ALL = TaskKey(0, -1, -2)


@query
async def list_approvals(
    conn: AsyncConnection,
    *,
    dag_ids: list[int] | None = None,
    limit: int = 100,
    after_asked: str = "-infinity",
    after_task: TaskKey = _BEFORE_ALL,
) -> list[ApprovalRow]:
    """The approvals that are open now."""


@query
async def of_task(
    conn: AsyncConnection, *, run_id: int, task: str, map_index: int = -1, limit: int = 1
) -> list[ApprovalRow]:
    """The approvals of one instance of a task, the newest first."""


async def list_questions(
    conn: AsyncConnection, wanted: QuestionFilter, asked: PageRequest
) -> tuple[list[Question], int]:
    """One page, and the total."""
    params = {**asdict(wanted), "names": Jsonb(wanted.names), "kinds": Jsonb(wanted.kinds)}
    return await read_page(conn, sql("waits", "questions"), params, asked, _question)


def _question(*values: Any) -> Question:
    return Question(ListedTask(*values[:_OF_TASK]), *values[_OF_TASK:])
