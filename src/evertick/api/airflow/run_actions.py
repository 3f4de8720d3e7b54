"""DAG run changes: trigger, set state, note, clear, delete."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.bulk import BulkBody, Tally
from evertick.api.airflow.labels import run_document
from evertick.api.airflow.models import (
    BulkResponse,
    ClearTaskInstanceCollectionResponse,
    DAGRunCollectionResponse,
    DAGRunResponse,
)
from evertick.api.airflow.query import EVERY, Body, Texts
from evertick.api.airflow.runs import R, find_run
from evertick.api.airflow.selection import MOST_RUNS, Choice, choose, spec_of_version
from evertick.api.airflow.task_instances import instance_documents
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import ApiCaller, Who
from evertick.db.notify import Channel
from evertick.db.queries import dags, listings, tasks
from evertick.db.queries.listings import ListedTask
from evertick.db.queries.run_lists import ListedRun
from evertick.db.queries.runs import Particulars
from evertick.db.queries.shards import read_clock
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.graph import leaves
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.schedules.time_zones import with_zone
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES
from evertick.engine.runs import cancel, delete_run, of_run, trigger, write_note
from evertick.engine.tasks import clear, mark, newest_version

router = APIRouter(route_class=GuardedRoute, tags=["DagRun"])

FAILED = ("failed", "canceled", "upstream_failed")
NOT_BEGUN = ("waiting", "pending", "retrying", "available")
Note = Annotated[str | None, Field(max_length=1000)]
State = Literal["queued", "success", "failed"]
# The range of dates that the database and all clients can represent.
EARLIEST, LATEST = datetime(1900, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class TriggerBody(Body):
    dag_run_id: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    logical_date: datetime | None = Field(default=...)
    data_interval_start: datetime | None = None
    data_interval_end: datetime | None = None
    run_after: datetime | None = None
    conf: dict[str, Any] | None = None
    note: Note = None
    partition_key: str | None = None


class RunPatch(Body):
    state: State | None = None
    note: Note = None


class RunClear(Body):
    dry_run: bool = True
    only_failed: bool = False
    only_new: bool = False
    run_on_latest_version: bool | None = None
    note: Note = None


class BulkRun(Body):
    dag_run_id: Annotated[str, Field(max_length=250)]
    dag_id: Annotated[str | None, Field(max_length=250)] = None
    state: State | None = None
    note: Note = None


class RunsClear(RunClear):
    dag_runs: Annotated[list[BulkRun], Field(max_length=MOST_RUNS)] | None = None
    partition_key: str | None = None
    partition_date_start: datetime | None = None
    partition_date_end: datetime | None = None


@router.post("/dags/{dag_id}/dagRuns", response_model=DAGRunResponse)
@requires(Permission.TRIGGER_RUNS)
async def trigger_dag_run(dag_id: str, body: TriggerBody, caller: Who) -> dict[str, Any]:
    """Trigger a run. A second run with the same `logical_date` or the same id is refused."""
    for name in ("data_interval_start", "data_interval_end", "partition_key"):
        if getattr(body, name) is not None:
            raise UserError(f"{name} must be null: a run has only a logical_date.")
    at = _instant(body.logical_date)
    async with caller.write(Channel.TASKS) as conn:
        row = await caller.dag(conn, dag_id)
        if any(error.file == row.file for error in await dags.import_errors(conn)):
            raise UserError(f"DAG with dag_id: '{dag_id}' has import errors and cannot be triggered")
        if body.run_after is not None and with_zone(body.run_after) > await read_clock(conn):
            raise UserError("run_after must be null or in the past: a triggered run starts immediately.")
        about = Particulars(key=body.dag_run_id, fire_at=at, note=body.note or None)
        made = await trigger(conn, dag=dag_id, params=body.conf or {}, actor=caller.actor, about=about)
        if made.defers:
            caller.also.add(Channel.SCHEDULE)
        if not made.is_new:
            raise Conflict(
                f"A DAGRun of '{dag_id}' with ID '{body.dag_run_id}' or with that logical date already exists"
            )
        return run_document(await _numbered(conn, row.dag_id, made.run_id))


@router.patch(R, response_model=DAGRunResponse)
@requires(Permission.MARK_TASKS)
async def patch_dag_run(
    dag_id: str, dag_run_id: str, body: RunPatch, caller: Who, update_mask: Texts = None
) -> dict[str, Any]:
    """Set the state: success and failed end open tasks; queued runs all tasks again."""
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        await _change(caller, conn, run, body, update_mask)
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.delete(R, status_code=204)
@requires(Permission.DELETE_RUNS)
async def delete_dag_run(dag_id: str, dag_run_id: str, caller: Who) -> None:
    """Delete a run. A running run is refused; a queued run is canceled first."""
    async with caller.write() as conn:
        await _delete(caller, conn, await find_run(caller, conn, dag_id, dag_run_id))


@router.post(f"{R}/clear", response_model=DAGRunResponse | ClearTaskInstanceCollectionResponse)
@requires(Permission.CLEAR_TASKS)
async def clear_dag_run(dag_id: str, dag_run_id: str, body: RunClear, caller: Who) -> dict[str, Any]:
    refuse_only_new(body.only_new)
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        chosen = await _chosen(conn, run, only_failed=body.only_failed)
        if body.dry_run:
            return {"task_instances": await instance_documents(conn, chosen), "total_entries": len(chosen)}
        await clear_chosen(caller, conn, run, chosen, How(body.run_on_latest_version, body.note))
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.post(
    "/dags/{dag_id}/clearDagRuns", response_model=DAGRunCollectionResponse | ClearTaskInstanceCollectionResponse
)
@requires(Permission.CLEAR_TASKS)
async def clear_dag_runs(dag_id: str, body: RunsClear, caller: Who) -> dict[str, Any]:
    refuse_only_new(body.only_new)
    if body.partition_key or body.partition_date_start or body.partition_date_end:
        raise UserError("Evertick has no partitions. Name the runs in dag_runs.")
    documents: list[dict[str, Any]] = []
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        for each in body.dag_runs or []:
            run = await find_run(caller, conn, whose_run(dag_id, each.dag_id), each.dag_run_id)
            chosen = await _chosen(conn, run, only_failed=body.only_failed)
            if body.dry_run:
                documents += await instance_documents(conn, chosen)
                continue
            await clear_chosen(caller, conn, run, chosen, How(body.run_on_latest_version, body.note))
            documents.append(run_document(await find_run(caller, conn, run.dag, run.text_id)))
    return {"task_instances" if body.dry_run else "dag_runs": documents, "total_entries": len(documents)}


@router.patch("/dags/{dag_id}/dagRuns", response_model=BulkResponse)
@requires(Permission.MARK_TASKS)
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
                        patch = RunPatch.model_validate(
                            wish.model_dump(include=wish.model_fields_set & {"state", "note"})
                        )
                        await _change(caller, conn, run, patch, action.update_mask)
    return tally.document()


def whose_run(path: str, named: str | None) -> str:
    """The DAG of an entity: its `dag_id` if the path has `~`, otherwise the DAG of the path."""
    if path != EVERY and named not in (None, path, EVERY):
        raise UserError(f"The path names DAG {path!r}, but an entity names DAG {named!r}.")
    if path == EVERY and named in (None, EVERY):
        raise UserError("With ~ in the path, each run needs a dag_id.")
    return path if path != EVERY else str(named)


def refuse_only_new(only_new: bool) -> None:
    if only_new:
        raise UserError("only_new must be false: a run keeps the tasks it started with.")


@dataclass(frozen=True, slots=True)
class How:
    """Further effects of a clear: move the run to the newest DAG version, add a note."""

    on_newest: bool | None = None
    note: str | None = None


async def clear_chosen(
    caller: ApiCaller, conn: AsyncConnection, run: ListedRun, chosen: list[ListedTask], how: How
) -> None:
    """Clear the selected tasks that have started or ended; the others will run anyway."""
    note, affected = how.note, [row for row in chosen if row.phase not in (*NOT_BEGUN, "deferred", "polling")]
    if affected:
        version_id = (await newest_version(conn, run.run_id)).version_id if how.on_newest else None
        await clear(conn, run_id=run.run_id, chosen=affected, actor=caller.actor, version_id=version_id)
    if note is not None:
        for row in chosen:
            key = TaskKey(run.run_id, row.idx, row.map_index)
            await write_note(conn, key, content=note or None, actor=caller.actor)


async def _chosen(conn: AsyncConnection, run: ListedRun, *, only_failed: bool) -> list[ListedTask]:
    found = await choose(conn, run, Choice())
    return [row for row in found if not only_failed or row.phase in FAILED]


async def _change(
    caller: ApiCaller, conn: AsyncConnection, run: ListedRun, patch: RunPatch, update_mask: list[str] | None
) -> None:
    fields = patch.model_fields_set if not update_mask else patch.model_fields_set.intersection(update_mask)
    if "state" in fields and patch.state is not None:
        await _set_state(caller, conn, run, patch.state)
    if "note" in fields:
        await write_note(conn, of_run(run.run_id), content=patch.note or None, actor=caller.actor)


async def _delete(caller: ApiCaller, conn: AsyncConnection, run: ListedRun) -> None:
    if run.state == "queued":
        await cancel(conn, run_id=run.run_id, actor=caller.actor, reason="deleted")
    await delete_run(conn, run_id=run.run_id, actor=caller.actor)


async def _set_state(caller: ApiCaller, conn: AsyncConnection, run: ListedRun, state: State) -> None:
    rows = await choose(conn, run, Choice())
    if state == "queued":
        await clear_chosen(caller, conn, run, rows, How())
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
    key = TaskKey(row.run_id, row.idx, row.map_index)
    current = await tasks.find(conn, key)
    if current is None or current.state == state or (unless_ended and current.state in TERMINAL_TASK_STATES):
        return
    await mark(conn, key, state=state, actor=caller.actor)


async def _numbered(conn: AsyncConnection, dag_id: int, run_id: int) -> ListedRun:
    found = await listings.run_by_number(conn, dag_id=dag_id, run_id=run_id)
    if found is None:
        raise NotFound("The run was deleted a moment after it was made.")
    return found


def _instant(given: datetime | None) -> datetime | None:
    if given is None:
        return None
    at = with_zone(given)
    if not EARLIEST <= at <= LATEST:
        raise UserError(f"logical_date must be between {EARLIEST:%Y} and {LATEST:%Y}.")
    return at
