"""Tasks of a run: list, show, explain, and mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import tasks
from evertick.db.queries.runs import RunRow
from evertick.db.queries.tasks import AttemptRow, TaskRow
from evertick.domain.attempt import RESULT_TAG, TaskKey
from evertick.domain.errors import NotFound
from evertick.domain.explain import Explained, Reason, describe
from evertick.domain.states import TaskState
from evertick.engine.tasks import explain_row, full_name, mark
from evertick.operations.caller import LONGEST_SHOWN_NAME, Caller, redact, similar
from evertick.operations.paging import USUAL_ITEMS, Cursor, Limit, Page, RequestBody, page_of, read_cursor, record_of
from evertick.operations.runs import RunId, find_run

TaskName = Annotated[str, MaxLen(1000), Doc("The task's name.")]
MapIndex = Annotated[
    int, Ge(-1), Le(2**31 - 1), Doc("The index of an instance of a mapped task; -1 for a task that is not mapped.")
]

# The number of tasks of a run that a mistyped name is compared with.
_MOST_COMPARED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDetails:
    """A task with all attempts, what it returned, and the results that it named with `push`."""

    task: TaskRow
    attempts: list[AttemptRow]
    result: Any
    outputs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExplanation:
    """`reasons` has the most binding one first. `upstream` is the task that this one waits for, with its own reasons.

    A reason has its `kind`, a sentence (`text`), and details. A `deferred` task has the kind of its wait as `wait`.
    """

    run_id: int
    task: str
    state: str
    reasons: list[dict[str, Any]]
    upstream: TaskExplanation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRequest(RequestBody):
    state: TaskState
    map_index: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkResult:
    """`marked`, or `asked`: the task is running, and its state changes when it has stopped."""

    outcome: str


async def list_tasks(
    caller: Caller,
    *,
    run_id: RunId,
    task: Annotated[str | None, MaxLen(1000), Doc("Only the task with this name, or all instances of it.")] = None,
    state: TaskState | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[TaskRow]:
    """List the tasks of a run in the order in which they can run."""
    idx, map_index = read_cursor(cursor, -1, -1)
    after = (small(idx), small(map_index))
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        # The instances of a mapped task are next to each other in this order.
        only = (await _first_of(conn, run, task)).idx if task is not None else None
        after = after if only is None else max(after, (only, -2))
        found = await tasks.page_of_run(conn, run_id=run_id, idx=after[0], map_index=after[1], state=state, limit=limit)
    found = [row for row in found if only in (None, row.idx)]
    return page_of(found, limit, lambda row: (row.idx, row.map_index), lambda row: row)


async def show_task(caller: Caller, *, run_id: RunId, task: TaskName, map_index: MapIndex = -1) -> TaskDetails:
    """Show one task with all attempts and what it returned."""
    async with caller.read() as conn:
        row, key = await find_task(caller, conn, run_id, task, map_index)
        value, named = returned_and_named(await tasks.result(conn, key))
        return TaskDetails(task=row, attempts=await tasks.attempts(conn, key), result=value, outputs=named)


def returned_and_named(stored: Any) -> tuple[Any, dict[str, Any]]:
    """What a task returned, and its named results, of the stored result."""
    if isinstance(stored, dict) and stored.get(RESULT_TAG) == "outputs":
        return stored["value"], stored["named"]
    return stored, {}


async def why_task(
    caller: Caller,
    *,
    run_id: RunId,
    task: TaskName,
    map_index: Annotated[
        int | None, Ge(-1), Le(2**31 - 1), Doc("The index of an instance of a mapped task. Default: the first one.")
    ] = None,
) -> TaskExplanation:
    """Explain why a task is not running."""
    async with caller.read() as conn:
        row, _ = await find_task(caller, conn, run_id, task, map_index)
        return _why(await redact(caller, conn, await explain_row(conn, row, run_id=run_id)))


async def mark_task(caller: Caller, *, run_id: RunId, task: TaskName, body: MarkRequest) -> MarkResult:
    """Decide how a task ended: success, failed or skipped. A running task is stopped first."""
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        _, key = await find_task(caller, conn, run_id, task, body.map_index)
        return MarkResult(outcome=await mark(conn, key, state=body.state, actor=caller.actor))


async def find_task(
    caller: Caller, conn: AsyncConnection, run_id: int, task: str, map_index: int | None
) -> tuple[TaskRow, TaskKey]:
    """A task of a run that the caller may see. Without a map index, the first instance."""
    run = await find_run(caller, conn, run_id)
    first = await _first_of(conn, run, task)
    row = first if map_index in (None, first.map_index) else None
    if row is None and map_index is not None:
        row = await tasks.find(conn, TaskKey(run_id, first.idx, map_index))
    if row is None:
        known = await tasks.by_name(conn, run_id=run_id, task=task, limit=_MOST_COMPARED)
        raise await _no_task(conn, run, task if map_index in (None, -1) else f"{task}[{map_index}]", known)
    return row, TaskKey(run_id, row.idx, row.map_index)


async def _first_of(conn: AsyncConnection, run: RunRow, task: str) -> TaskRow:
    """The task, or the first instance of a mapped task."""
    rows = await tasks.by_name(conn, run_id=run.run_id, task=task, limit=1)
    if not rows:
        raise await _no_task(conn, run, task, rows)
    return rows[0]


async def _no_task(conn: AsyncConnection, run: RunRow, name: str, instances: Sequence[TaskRow]) -> NotFound:
    text = f"Run {run.run_id} of {run.dag} has no task {name[:LONGEST_SHOWN_NAME]!r}."
    known: set[str] = set()
    if len(name) <= LONGEST_SHOWN_NAME:
        rows = instances or await tasks.list_of_run(conn, run_id=run.run_id, limit=_MOST_COMPARED)
        known = {each for row in rows for each in (row.task, full_name(row))}
    advice = similar(name, sorted(known), f"List its tasks with `evertick tasks list {run.run_id}`.")
    return NotFound(f"{text} {advice}")


def _why(found: Explained) -> TaskExplanation:
    reasons = [_document_of(each) for each in found.reasons]
    return record_of(TaskExplanation, found, reasons=reasons, upstream=_why(found.upstream) if found.upstream else None)


def _document_of(reason: Reason) -> dict[str, Any]:
    detail = dict(reason.detail)
    # The kind of a wait is not the kind of the reason.
    if "kind" in detail:
        detail["wait"] = detail.pop("kind")
    return {"kind": reason.kind, "text": describe(reason), **detail}


def reason_of(document: Mapping[str, Any]) -> Reason:
    """The reason in a record of `why_task`."""
    return Reason(document["kind"], {**document, "kind": document.get("wait")})


def small(number: int) -> int:
    """Within the range of an integer column."""
    return max(-(2**31), min(number, 2**31 - 1))
