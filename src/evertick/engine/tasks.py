"""Tasks of a run: clear them, mark them, and explain why one does not run.

A running task only receives a stop request: its owner confirms its end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import dags, gates, tasks
from evertick.db.queries.tasks import TaskRow
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.graph import cleared_with, map_heads
from evertick.domain.dags.spec import from_json
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.explain import Explained, Reason
from evertick.domain.states import TaskState
from evertick.engine.runs import find_dag_row, find_run
from evertick.engine.verbs import did_you_mean

MOST_TASKS = 100_000


CANNOT_MOVE = "EV003"


class Placed(Protocol):
    """A task's position in its run."""

    @property
    def idx(self) -> int: ...

    @property
    def map_index(self) -> int: ...


async def select_tasks(
    conn: AsyncConnection,
    *,
    run_id: int,
    names: Collection[str] = (),
    only_failed: bool = False,
    with_downstream: bool = False,
) -> list[TaskRow]:
    """The tasks that a clear would reset: all of the run, or the named ones, with their downstream tasks on request; and the setups
    that these tasks depend on, with their teardowns.

    A mapped task is named as a whole (`train`) or by one of its instances (`train[3]`).
    """
    run = await find_run(conn, run_id)
    rows = await tasks.list_of_run(conn, run_id=run_id, limit=MOST_TASKS)
    known = {name for row in rows for name in (row.task, full_name(row))}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, sorted(known), f"List them with `evertick tasks list {run_id}`.")
            raise NotFound(f"Run {run_id} of {run.dag} has no task {name!r}. {hint}")
    chosen = [row for row in rows if not names or row.task in names or full_name(row) in names]
    if only_failed:
        chosen = [row for row in chosen if row.state in ("failed", "canceled", "upstream_failed")]
    if with_downstream or only_failed:
        below = set(await tasks.downstream(conn, version_id=run.version_id, idxs=sorted({row.idx for row in chosen})))
        chosen = _among(rows, below, chosen)
    version = await dags.version(conn, run.version_id)
    if version is None or not chosen:
        return chosen
    return _among(rows, cleared_with(from_json(json.dumps(version.spec)), {row.idx for row in chosen}), chosen)


def _among(rows: Sequence[TaskRow], idxs: Collection[int], chosen: Sequence[TaskRow]) -> list[TaskRow]:
    keys = {(row.idx, row.map_index) for row in chosen}
    return [row for row in rows if row.idx in idxs or (row.idx, row.map_index) in keys]


def full_name(row: TaskRow) -> str:
    """The name shown to users: an instance of a mapped task includes its number."""
    return row.task if row.map_index < 0 else f"{row.task}[{row.map_index}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest version of a run's DAG; None if the run already has it."""

    version_id: int | None
    number: int
    run_number: int


async def newest_version(conn: AsyncConnection, run_id: int) -> Newest:
    """The version that a clear with the latest version would move the run to. Refused if its tasks differ."""
    run = await find_run(conn, run_id)
    row = await find_dag_row(conn, run.dag)
    then, number = await dags.version(conn, run.version_id), row.number or 0
    if then is None or row.version_id == run.version_id:
        return Newest(version_id=None, number=number, run_number=run.version)
    new, old = _tasks_of(row.spec), _tasks_of(then.spec)
    if new != old:
        added, gone = sorted(set(new) - set(old)), sorted(set(old) - set(new))
        what = [*(f"{name} is new" for name, *_ in added), *(f"{name} is missing" for name, *_ in gone)][:5]
        raise Conflict(
            f"Version {number} of {run.dag} has other tasks than run {run_id} began with"
            f" ({', '.join(what) or 'their order differs'}): start a new run of it, with"
            f" `evertick dags trigger {run.dag}`."
        )
    return Newest(version_id=row.version_id, number=number, run_number=run.version)


def _tasks_of(raw: object) -> list[tuple[str, bool, int | None]]:
    spec = from_json(json.dumps(raw))
    heads = map_heads(spec)
    return [(task.name, task.mapping is not None, heads[idx]) for idx, task in enumerate(spec.tasks)]


@dataclass(frozen=True, slots=True)
class ClearedTasks:
    """`reopened` is None if there is no such run."""

    reopened: int
    asked: int


@sql_function
async def clear_tasks(
    conn: AsyncConnection,
    *,
    run_id: int,
    idxs: list[int],
    instances: list[tuple[int, int]],
    actor: Actor,
    version_id: int | None,
) -> ClearedTasks:
    """`idxs` as a whole, and these `instances` (idx, map_index) of mapped tasks."""


async def clear(
    conn: AsyncConnection, *, run_id: int, chosen: Collection[Placed], actor: Actor, version_id: int | None = None
) -> ClearedTasks:
    """Run these tasks again, on that version if one is given (see `newest_version`). A mapped task whose instances are all chosen
    is cleared as a whole, and expands again."""
    rows = await tasks.list_of_run(conn, run_id=run_id, limit=MOST_TASKS)
    there, wanted = Counter(row.idx for row in rows), Counter(row.idx for row in chosen)
    single = [(row.idx, row.map_index) for row in chosen if row.map_index >= 0 and wanted[row.idx] < there[row.idx]]
    idxs = sorted({row.idx for row in chosen} - {idx for idx, _ in single})
    try:
        cleared = await clear_tasks(
            conn, run_id=run_id, idxs=idxs, instances=single, actor=actor, version_id=version_id
        )
    except psycopg.Error as error:
        if error.sqlstate == CANNOT_MOVE:
            raise Conflict(str(error.diag.message_primary)) from None
        raise
    if cleared.reopened is None:
        raise NotFound(f"Run {run_id} no longer exists: it was pruned. List runs with `evertick runs list`.")
    return cleared


MARKABLE = (TaskState.SUCCESS, TaskState.FAILED, TaskState.SKIPPED)


@sql_function
async def mark_task(conn: AsyncConnection, key: TaskKey, *, state: str, actor: Actor) -> str | None: ...


async def mark(conn: AsyncConnection, key: TaskKey, *, state: str, actor: Actor) -> str:
    """'marked', or 'asked' if the task is running and is marked once it has stopped."""
    wanted = markable(state)
    answer = await mark_task(conn, key, state=wanted, actor=actor)
    if answer is None:
        raise Conflict(f"Task {key.idx} of run {key.run_id} is already {state}, or the run has no such task.")
    return answer


def markable(state: str) -> TaskState:
    """The state with this name, if a task can be marked with it."""
    if state not in MARKABLE:
        raise UserError(f"A task cannot be marked {state!r}; it can be marked {', '.join(MARKABLE)}.")
    return TaskState(state)


# Longer chains are cut: they are not readable, and the last task shown says what it waits for.
LONGEST_CHAIN = 50


async def explain_row(conn: AsyncConnection, row: tasks.TaskRow, *, run_id: int) -> Explained:
    """Why this task is not running."""
    chain: list[tuple[tasks.TaskRow, list[Reason]]] = []
    while len(chain) < LONGEST_CHAIN:
        reasons = await gates.explain_task(conn, TaskKey(run_id, row.idx, row.map_index))
        chain.append((row, reasons))
        above = next((reason for reason in reasons if reason.kind == "upstream"), None)
        found = await tasks.find(conn, TaskKey(run_id, above.detail["idx"], -1)) if above else None
        if found is None:
            break
        row = found
    explained: Explained | None = None
    for each, reasons in reversed(chain):
        explained = Explained(run_id=run_id, task=each.task, state=each.state, reasons=reasons, upstream=explained)
    assert explained is not None
    return explained
