"""DAG run changes: trigger, set state, note, clear, delete; and the selection of tasks for a change of runs or tasks."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import RUN_STATES, broken_files, run_document
from evertick.api.airflow.resources import BulkBody, Tally
from evertick.api.airflow.runs import R, find_run
from evertick.api.airflow.task_instances import instance_documents, key_of
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.notify import Channel
from evertick.db.queries import dags, listings, run_lists, tasks
from evertick.db.queries.dags import DagRow
from evertick.db.queries.listings import ListedTask
from evertick.db.queries.run_lists import ListedRun, PageRequest, RunFilter, between_instants
from evertick.domain.access import Permission
from evertick.domain.dags.graph import cleared_with, leaves
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.schedules.time_zones import with_zone
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES
from evertick.engine.runs import Particulars, cancel, clear_run_partitions, delete_run, of_run, trigger, write_note
from evertick.engine.tasks import clear, mark, newest_version

router = GuardedRouter(tags=["DagRun"])

# The maximum number of runs that one request may change.
MOST_RUNS = 1000
FAILED = ("failed", "canceled", "upstream_failed")
NOT_BEGUN = ("waiting", "pending", "retrying", "available")
Note = Annotated[str | None, Field(max_length=1000)]
State = Literal["queued", "success", "failed"]
# The range of dates that the database and all clients can represent.
EARLIEST, LATEST = datetime(1900, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class Reach(query.Body):
    """Which tasks a change reaches next to the named ones: of the same run, and of other runs of the DAG."""

    include_upstream: bool = False
    include_downstream: bool = False
    include_future: bool = False
    include_past: bool = False


class MaterializeBody(query.Body):
    dag_run_id: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    logical_date: datetime | None = None
    data_interval_start: datetime | None = None
    data_interval_end: datetime | None = None
    run_after: datetime | None = None
    conf: dict[str, Any] | None = None
    note: Note = None
    partition_key: Annotated[str, Field(min_length=1, max_length=250)] | None = None


class TriggerBody(MaterializeBody):
    logical_date: datetime | None = Field(default=...)


class RunPatch(query.Body):
    state: State | None = None
    note: Note = None


class Clearing(query.Body):
    """What else a clear does: move the run to the newest version of its DAG, add a note."""

    dry_run: bool = True
    run_on_latest_version: bool | None = None
    note: Note = None


class RunClear(Clearing):
    only_failed: bool = False
    only_new: bool = False


class BulkRun(RunPatch):
    dag_run_id: Annotated[str, Field(max_length=250)]
    dag_id: Annotated[str | None, Field(max_length=250)] = None


class OfPartitions(query.Body):
    """The runs of a partition, or of those with dates in a range."""

    partition_key: Annotated[str, Field(max_length=250)] | None = None
    partition_date_start: datetime | None = None
    partition_date_end: datetime | None = None


class RunsClear(RunClear, OfPartitions):
    dag_runs: Annotated[list[BulkRun], Field(max_length=MOST_RUNS)] | None = None


class PartitionsClear(OfPartitions):
    """Which runs stop being for a partition; with `clear_task_instances` their tasks run again."""

    run_id: Annotated[str, Field(max_length=250)] | None = None
    clear_task_instances: bool = False
    dry_run: bool = True


@router.post("/dags/{dag_id}/dagRuns", Permission.TRIGGER_RUNS, models.DAGRunResponse)
async def trigger_dag_run(dag_id: str, body: TriggerBody, caller: Who) -> dict[str, Any]:
    """Trigger a run. A second run with the same `logical_date` or the same id is refused."""
    for name in ("data_interval_start", "data_interval_end"):
        if getattr(body, name) is not None:
            raise UserError(f"{name} must be null: a run has only a logical_date.")
    at = _instant(body.logical_date)
    async with caller.write(Channel.TASKS) as conn:
        row = await caller.dag(conn, dag_id)
        if (row.deployment, row.file) in broken_files(await dags.import_errors(conn)):
            raise UserError(f"DAG with dag_id: '{dag_id}' has import errors and cannot be triggered")
        exists = f"A DAGRun of '{dag_id}' with ID '{body.dag_run_id}' or with that logical date already exists"
        return await trigger_run(caller, conn, row, body, fire_at=at, exists=exists)


async def trigger_run(
    caller: ApiCaller,
    conn: AsyncConnection,
    dag: DagRow,
    body: MaterializeBody,
    *,
    fire_at: datetime | None = None,
    exists: str,
) -> dict[str, Any]:
    about = Particulars(
        key=body.dag_run_id,
        fire_at=fire_at,
        note=body.note or None,
        start_at=_instant(body.run_after),
        partition=body.partition_key,
    )
    # As in Airflow, a conf may have keys that the DAG does not declare.
    params = body.conf or {}
    made = await trigger(conn, dag=dag.name, params=params, actor=caller.actor, about=about, accepts_unknown=True)
    if made.defers:
        caller.also.add(Channel.SCHEDULE)
    if not made.is_new:
        raise Conflict(exists)
    run = await listings.run_by_number(conn, dag_id=dag.dag_id, run_id=made.run_id)
    if run is None:
        raise NotFound("The run was deleted immediately after it was created.")
    return run_document(run)


@router.patch(R, Permission.MARK_TASKS, models.DAGRunResponse)
async def patch_dag_run(
    dag_id: str, dag_run_id: str, body: RunPatch, caller: Who, update_mask: query.Texts = None
) -> dict[str, Any]:
    """Set the state: success and failed end open tasks; queued runs all tasks again."""
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        await _change(caller, conn, run, body, update_mask)
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.delete(R, Permission.DELETE_RUNS, status_code=204)
async def delete_dag_run(dag_id: str, dag_run_id: str, caller: Who) -> None:
    """Delete a run. A running run is refused; a queued run is canceled first."""
    async with caller.write() as conn:
        await _delete(caller, conn, await find_run(caller, conn, dag_id, dag_run_id))


@router.post(f"{R}/clear", Permission.CLEAR_TASKS, models.DAGRunResponse | models.ClearTaskInstanceCollectionResponse)
async def clear_dag_run(dag_id: str, dag_run_id: str, body: RunClear, caller: Who) -> dict[str, Any]:
    refuse_only_new(body.only_new)
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        chosen = await _chosen(conn, run, body)
        if body.dry_run:
            return {"task_instances": await instance_documents(conn, chosen), "total_entries": len(chosen)}
        await clear_chosen(caller, conn, run, chosen, body)
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.post(
    "/dags/{dag_id}/clearDagRuns",
    Permission.CLEAR_TASKS,
    models.DAGRunCollectionResponse | models.ClearTaskInstanceCollectionResponse,
)
async def clear_dag_runs(dag_id: str, body: RunsClear, caller: Who) -> dict[str, Any]:
    refuse_only_new(body.only_new)
    documents: list[dict[str, Any]] = []
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        runs = [
            await find_run(caller, conn, whose_run(dag_id, each.dag_id), each.dag_run_id)
            for each in body.dag_runs or []
        ]
        if body.partition_key or body.partition_date_start or body.partition_date_end:
            if body.dag_runs:
                raise UserError("Name the runs in dag_runs, or select them by their partition: not both.")
            runs = await runs_of_partitions(conn, (await caller.dag(conn, dag_id)).dag_id, body)
        for run in runs:
            chosen = await _chosen(conn, run, body)
            if body.dry_run:
                documents += await instance_documents(conn, chosen)
                continue
            await clear_chosen(caller, conn, run, chosen, body)
            documents.append(run_document(await find_run(caller, conn, run.dag, run.text_id)))
    return {"task_instances" if body.dry_run else "dag_runs": documents, "total_entries": len(documents)}


@router.patch("/dags/{dag_id}/dagRuns", Permission.MARK_TASKS, models.BulkResponse)
async def bulk_dag_runs(dag_id: str, body: BulkBody[BulkRun], caller: Who) -> dict[str, Any]:
    """Bulk updates and deletions. Runs are created by triggering them."""
    tally = Tally()
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        for action in body.actions:
            for entity in action.entities:
                wish = entity if isinstance(entity, BulkRun) else BulkRun(dag_run_id=entity)
                async with tally.counting(action, f"{wish.dag_id or dag_id}.{wish.dag_run_id}"):
                    if action.action == "create":
                        raise UserError("Bulk create is not supported for Dag Runs. Trigger them instead.")
                    run = await find_run(caller, conn, whose_run(dag_id, wish.dag_id), wish.dag_run_id)
                    if action.action == "delete":
                        caller.require(Permission.DELETE_RUNS)
                        await _delete(caller, conn, run)
                    else:
                        await _change(caller, conn, run, wish, action.update_mask)
    return tally.document()


@router.post("/dags/{dag_id}/clearPartitions", Permission.CLEAR_TASKS, models.ClearPartitionsResponse)
async def clear_dag_run_partitions(dag_id: str, body: PartitionsClear, caller: Who) -> dict[str, Any]:
    """Make runs be for no partition any more, so that other runs can be for theirs."""
    has_dates = body.partition_date_start is not None or body.partition_date_end is not None
    if sum((body.run_id is not None, body.partition_key is not None, has_dates)) != 1:
        raise UserError("Select runs by exactly one of run_id, partition_key, and a range of partition dates.")
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        row = await caller.dag(conn, dag_id)
        runs = (
            await runs_of_partitions(conn, row.dag_id, body)
            if body.run_id is None
            else [await find_run(caller, conn, dag_id, body.run_id)]
        )
        chosen = [await choose(conn, run) for run in runs] if body.clear_task_instances else []
        if not body.dry_run:
            await clear_run_partitions(conn, run_ids=[run.run_id for run in runs], actor=caller.actor)
            for run, tasks_of_run in zip(runs, chosen, strict=False):
                await clear_chosen(caller, conn, run, tasks_of_run)
    return {
        "dag_runs_cleared": sum(run.partition_key is not None for run in runs),
        "task_instances_cleared": sum(map(len, chosen)),
        "dry_run": body.dry_run,
    }


async def runs_of_partitions(conn: AsyncConnection, dag_id: int, of: OfPartitions) -> list[ListedRun]:
    wanted = RunFilter(
        dag_id=dag_id,
        keys=None if of.partition_key is None else [of.partition_key],
        partition=between_instants(of.partition_date_start, None, of.partition_date_end, None),
        names=RUN_STATES,
    )
    found, _ = await run_lists.list_runs(conn, wanted, PageRequest(limit=MOST_RUNS + 1, is_counted=False))
    if len(found) > MOST_RUNS:
        raise UserError(f"The request selects more than {MOST_RUNS} runs. Narrow the range of partition dates.")
    return found


def whose_run(path: str, named: str | None) -> str:
    """The DAG of an entity: its `dag_id` if the path has `~`, otherwise the DAG of the path."""
    if path != query.EVERY and named not in (None, path, query.EVERY):
        raise UserError(f"The path names DAG {path!r}, but an entity names DAG {named!r}.")
    if path == query.EVERY and named in (None, query.EVERY):
        raise UserError("With ~ in the path, each run needs a dag_id.")
    return path if path != query.EVERY else str(named)


def refuse_only_new(only_new: bool) -> None:
    if only_new:
        raise UserError("only_new must be false: a run keeps the tasks it started with.")


async def clear_chosen(
    caller: ApiCaller, conn: AsyncConnection, run: ListedRun, chosen: list[ListedTask], body: Clearing | None = None
) -> None:
    """Clear the selected tasks that have started or ended; the others will run anyway."""
    note, affected = (
        body.note if body else None,
        [row for row in chosen if row.phase not in (*NOT_BEGUN, "deferred", "polling")],
    )
    if affected:
        version_id = (
            (await newest_version(conn, run.run_id)).version_id if body and body.run_on_latest_version else None
        )
        await clear(conn, run_id=run.run_id, chosen=affected, actor=caller.actor, version_id=version_id)
    if note is not None:
        for row in chosen:
            await write_note(conn, key_of(row), content=note or None, actor=caller.actor)


async def _chosen(conn: AsyncConnection, run: ListedRun, body: RunClear) -> list[ListedTask]:
    return [row for row in await choose(conn, run) if not body.only_failed or row.phase in FAILED]


async def _change(
    caller: ApiCaller, conn: AsyncConnection, run: ListedRun, patch: RunPatch, update_mask: list[str] | None
) -> None:
    fields = query.given_fields(patch, update_mask)
    if "state" in fields and patch.state is not None:
        await _set_state(caller, conn, run, patch.state)
    if "note" in fields:
        await write_note(conn, of_run(run.run_id), content=patch.note or None, actor=caller.actor)


async def _delete(caller: ApiCaller, conn: AsyncConnection, run: ListedRun) -> None:
    if run.state == "queued":
        await cancel(conn, run_id=run.run_id, actor=caller.actor, reason="deleted")
    await delete_run(conn, run_id=run.run_id, actor=caller.actor)


async def _set_state(caller: ApiCaller, conn: AsyncConnection, run: ListedRun, state: State) -> None:
    rows = await choose(conn, run)
    if state == "queued":
        await clear_chosen(caller, conn, run, rows)
        return
    if run.state in TERMINAL_RUN_STATES:
        await _judge_anew(caller, conn, run, rows, state)
        return
    for row in rows:
        if row.phase not in TERMINAL_TASK_STATES:
            # Tasks that never started are skipped; running tasks end with the state of the run.
            wanted = state if row.phase in ("running", "queued") or state == "failed" else "skipped"
            await mark_one(caller, conn, row, wanted, unless_ended=True)


async def _judge_anew(
    caller: ApiCaller, conn: AsyncConnection, run: ListedRun, rows: list[ListedTask], state: State
) -> None:
    """Change the state of a finished run by marking the tasks that contradict it."""
    if state == "success":
        wrong = [row for row in rows if row.phase in FAILED]
    elif any(row.phase in FAILED for row in rows) and run.state != "success":
        wrong = []
    else:
        last = leaves(await spec_of_version(conn, run.version_id))
        wrong = [row for row in rows if row.idx in last]
    for row in wrong:
        await mark_one(caller, conn, row, state)


async def mark_one(
    caller: ApiCaller, conn: AsyncConnection, row: ListedTask, state: str, *, unless_ended: bool = False
) -> None:
    """Mark one task. Marking may change other tasks, so read their states again."""
    current = await tasks.find(conn, key_of(row))
    if current is None or current.state == state or (unless_ended and current.state in TERMINAL_TASK_STATES):
        return
    await mark(conn, key_of(row), state=state, actor=caller.actor)


def _instant(given: datetime | None) -> datetime | None:
    if given is None:
        return None
    at = with_zone(given)
    if not EARLIEST <= at <= LATEST:
        raise UserError(f"logical_date must be between {EARLIEST:%Y} and {LATEST:%Y}.")
    return at


async def spec_of_version(conn: AsyncConnection, version_id: int) -> DagSpec:
    version = await dags.version(conn, version_id)
    if version is None:
        raise NotFound("This version of the DAG was pruned.")
    return from_json(json.dumps(version.spec))


async def choose(
    conn: AsyncConnection,
    run: ListedRun,
    names: Sequence[tuple[str, int | None]] | None = None,
    reach: Reach | None = None,
    *,
    with_setups: bool = False,
    is_strict: bool = True,
) -> list[ListedTask]:
    """The selected tasks of one run: all of them without `names`. A name with a map index selects that instance only. With
    `is_strict`, a task that the run does not have is an error."""
    spec = await spec_of_version(conn, run.version_id)
    place = {task.name: idx for idx, task in enumerate(spec.tasks)}
    if names is None:
        return await listings.tasks_of(conn, run_id=run.run_id, idxs=list(range(len(spec.tasks))))
    for name, _ in names:
        if name not in place and is_strict:
            raise NotFound(f"Task with id {name} was not found in run {run.text_id}")
    named = {place[name] for name, _ in names if name in place}
    wider = related(spec, named, up=reach.include_upstream, down=reach.include_downstream) if reach else set()
    if with_setups:
        wider |= cleared_with(spec, named | wider)
    whole = {place[name] for name, at in names if at is None and name in place} | wider
    single = {(place[name], at) for name, at in names if at is not None and name in place}
    rows = await listings.tasks_of(conn, run_id=run.run_id, idxs=sorted(named | whole))
    return [row for row in rows if row.idx in whole or (row.idx, row.map_index) in single]


def related(spec: DagSpec, idxs: Collection[int], *, up: bool, down: bool) -> set[int]:
    """The upstream (`up`) and downstream (`down`) tasks of these tasks, without the tasks themselves."""
    found: set[int] = set()
    if down:
        found |= _reached(idxs, [(first, second) for first, second in sorted(spec.edges)])
    if up:
        found |= _reached(idxs, [(second, first) for first, second in sorted(spec.edges, key=lambda e: -e[1])])
    return found - set(idxs)


def _reached(idxs: Collection[int], edges: Sequence[tuple[int, int]]) -> set[int]:
    """The tasks reachable along the edges. Tasks are in topological order, so one pass over the edges is enough."""
    found = set(idxs)
    for source, target in edges:
        if source in found:
            found.add(target)
    return found


async def runs_between(
    conn: AsyncConnection, dag_id: int, first: datetime | None, last: datetime | None
) -> list[ListedRun]:
    """The runs of a DAG with a logical date in the range; a missing end is unbounded."""
    wanted = RunFilter(dag_id=dag_id, fire=between_instants(first, None, last, None), names=RUN_STATES)
    found, _ = await run_lists.list_runs(conn, wanted, PageRequest(limit=MOST_RUNS + 1, is_counted=False))
    if len(found) > MOST_RUNS:
        raise UserError(f"The request selects more than {MOST_RUNS} runs. Narrow it with start_date and end_date.")
    return found


async def runs_around(conn: AsyncConnection, run: ListedRun, reach: Reach) -> list[ListedRun]:
    """The run, and the runs of its DAG with earlier or later logical dates."""
    past, future = reach.include_past, reach.include_future
    if not past and not future:
        return [run]
    if run.fire_at is None:
        raise UserError("Cannot use include_past or include_future with a run that has no logical_date.")
    return await runs_between(conn, run.dag_id, None if past else run.fire_at, None if future else run.fire_at)
