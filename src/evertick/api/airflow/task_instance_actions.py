"""Task instance changes: mark, note and clear, in one run or also in past and future runs, each with a dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow import models, query, run_actions
from evertick.api.airflow.resources import BulkBody, Endpoint, Tally, bind
from evertick.api.airflow.runs import R, find_run
from evertick.api.airflow.task_instances import MapIndex, T, find_instance, instance_documents, key_of, missing
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.notify import Channel
from evertick.db.queries import listings
from evertick.db.queries.listings import ListedTask
from evertick.db.queries.run_lists import ListedRun
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine.runs import write_note

router = GuardedRouter(tags=["Task Instance"])

MapIndexAsked = Annotated[int | None, Query(ge=-1, le=2**31 - 1)]
State = Literal["success", "failed", "skipped"]
Chosen = list[tuple[ListedRun, list[ListedTask]]]


class InstancePatch(run_actions.Reach):
    new_state: State | None = None
    note: run_actions.Note = None


class BulkInstance(InstancePatch):
    task_id: Annotated[str, Field(max_length=1000)]
    map_index: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    dag_id: Annotated[str | None, Field(max_length=250)] = None
    dag_run_id: Annotated[str | None, Field(max_length=250)] = None


class ClearBody(run_actions.Reach, run_actions.Clearing):
    start_date: datetime | None = None
    end_date: datetime | None = None
    only_failed: bool = True
    only_running: bool = False
    reset_dag_runs: bool = True
    task_ids: list[str | Annotated[tuple[str, int], Field(min_length=2)]] | None = None
    dag_run_id: Annotated[str | None, Field(max_length=250)] = None
    prevent_running_task: bool = False


def _patch(path: str) -> Callable[[Endpoint], Endpoint]:
    """Add a PATCH of a task instance whose map index is in the query, and one whose map index is in the path."""

    def add(endpoint: Endpoint) -> Endpoint:
        name, mapped = endpoint.__name__, bind(endpoint, map_index=Annotated[MapIndex, Path()])
        route = partial(router.patch, permission=Permission.MARK_TASKS, answer=models.TaskInstanceCollectionResponse)
        route(f"{T}{path}", name=name)(endpoint)
        route(f"{T}/{{map_index}}{path}", name=f"{name}_by_map_index")(mapped)
        return endpoint

    return add


# The dry run first: its path matches a map index, too.
@_patch("/dry_run")
async def patch_task_instance_dry_run(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    body: InstancePatch,
    caller: Who,
    map_index: MapIndexAsked = None,
    update_mask: query.Texts = None,
) -> dict[str, Any]:
    """The task instances that the request would change without `dry_run`."""
    async with caller.read() as conn:
        found = await _meant(caller, conn, (dag_id, dag_run_id, task_id), map_index, body)
        is_marked = "new_state" in query.given_fields(body, update_mask)
        rows = [row for _, rows in found for row in rows if not is_marked or row.phase != body.new_state]
        return await _told(conn, rows)


@_patch("")
async def patch_task_instance(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    body: InstancePatch,
    caller: Who,
    map_index: MapIndexAsked = None,
    update_mask: query.Texts = None,
) -> dict[str, Any]:
    # Select the runs first, on a read connection.
    async with caller.read() as conn:
        found = await _meant(caller, conn, (dag_id, dag_run_id, task_id), map_index, body)
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        return await _carry_out(caller, conn, found, body, update_mask)


@router.delete(T, Permission.MARK_TASKS, status_code=204)
async def delete_task_instance(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndexAsked = None
) -> None:
    """Always refused: the tasks of a run are those of its DAG version."""
    async with caller.read() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), -1 if map_index is None else map_index)
    raise Conflict("A task instance cannot be deleted. Mark it skipped, or delete the run.")


@router.patch(f"{R}/taskInstances", Permission.MARK_TASKS, models.BulkResponse)
async def bulk_task_instances(
    dag_id: str, dag_run_id: str, body: BulkBody[BulkInstance], caller: Who
) -> dict[str, Any]:
    """Bulk updates. Task instances can be neither created nor deleted."""
    tally = Tally()
    for action in body.actions:
        for entity in action.entities:
            wish = entity if isinstance(entity, BulkInstance) else BulkInstance(task_id=entity)
            run_id = wish.dag_run_id if dag_run_id == query.EVERY else dag_run_id
            map_index = -1 if wish.map_index is None else wish.map_index
            async with tally.counting(action, f"{dag_id}.{run_id}.{wish.task_id}[{map_index}]"):
                if action.action != "update":
                    raise UserError(f"Bulk {action.action} is not supported for task instances.")
                if run_id is None:
                    raise UserError("With ~ in the path, each task instance needs a dag_run_id.")
                names = (run_actions.whose_run(dag_id, wish.dag_id), run_id, wish.task_id)
                await patch_task_instance(*names, wish, caller, wish.map_index, action.update_mask)
    return tally.document()


@router.patch(f"{R}/taskGroupInstances/{{group_id}}", Permission.MARK_TASKS, models.TaskInstanceCollectionResponse)
async def patch_task_group_instances(
    dag_id: str, dag_run_id: str, group_id: str, body: InstancePatch, caller: Who, update_mask: query.Texts = None
) -> dict[str, Any]:
    """Update all task instances of a group."""
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        found = await _of_group(caller, conn, (dag_id, dag_run_id), group_id, body)
        return await _carry_out(caller, conn, found, body, update_mask)


@router.patch(
    f"{R}/taskGroupInstances/{{group_id}}/dry_run", Permission.MARK_TASKS, models.TaskInstanceCollectionResponse
)
async def patch_task_group_instances_dry_run(
    dag_id: str, dag_run_id: str, group_id: str, body: InstancePatch, caller: Who
) -> dict[str, Any]:
    async with caller.read() as conn:
        found = await _of_group(caller, conn, (dag_id, dag_run_id), group_id, body)
        return await _told(conn, [row for _, rows in found for row in rows if row.phase != body.new_state])


@router.post("/dags/{dag_id}/clearTaskInstances", Permission.CLEAR_TASKS, models.TaskInstanceCollectionResponse)
async def post_clear_task_instances(dag_id: str, body: ClearBody, caller: Who) -> dict[str, Any]:
    """Clear task instances of one run, also of past and future runs, or of all runs between two dates. Finished runs are
    restarted even without `reset_dag_runs`, because tasks of a finished run cannot run."""
    async with caller.read() as conn:
        runs = await _runs_to_clear(caller, conn, dag_id, body)
        found = [(run, await _to_clear(conn, run, body)) for run in runs]
    if body.prevent_running_task and any(row.phase == "running" for _, rows in found for row in rows):
        raise Conflict("Task instances are running and prevent_running_task is set. Wait until they end, or omit it.")
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        for run, rows in found if not body.dry_run else ():
            await run_actions.clear_chosen(caller, conn, run, rows, body)
        return await _told(conn, [row for _, rows in found for row in rows])


async def _runs_to_clear(caller: ApiCaller, conn: AsyncConnection, dag_id: str, body: ClearBody) -> list[ListedRun]:
    if body.dag_run_id is not None:
        run = await find_run(caller, conn, dag_id, body.dag_run_id)
        return await run_actions.runs_around(conn, run, body)
    row = await caller.dag(conn, dag_id)
    first = None if body.include_past else body.start_date
    last = None if body.include_future else body.end_date
    return await run_actions.runs_between(conn, row.dag_id, first, last)


async def _to_clear(conn: AsyncConnection, run: ListedRun, body: ClearBody) -> list[ListedTask]:
    names = None if body.task_ids is None else [(e, None) if isinstance(e, str) else e for e in body.task_ids]
    found = await run_actions.choose(conn, run, names, body, with_setups=True, is_strict=body.dag_run_id is not None)
    if body.only_running:
        return [row for row in found if row.phase == "running"]
    return [row for row in found if not body.only_failed or row.phase in run_actions.FAILED]


async def _meant(
    caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int | None, body: InstancePatch
) -> Chosen:
    run = await find_run(caller, conn, *names[:2])
    found = await _in_each(conn, run, [(names[2], map_index)], body)
    if not any(rows for each, rows in found if each.run_id == run.run_id):
        raise NotFound(missing(*names, -1 if map_index is None else map_index))
    return found


async def _of_group(
    caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str], group: str, body: InstancePatch
) -> Chosen:
    run = await find_run(caller, conn, *names)
    spec = await run_actions.spec_of_version(conn, run.version_id)
    members = [(task.name, None) for task in spec.tasks if task.name.startswith(f"{group}.")]
    if not members:
        raise NotFound(f"Task group with id {group} was not found in run {names[1]}")
    return await _in_each(conn, run, members, body)


async def _in_each(
    conn: AsyncConnection, run: ListedRun, names: Sequence[tuple[str, int | None]], body: InstancePatch
) -> Chosen:
    runs = await run_actions.runs_around(conn, run, body)
    return [
        (each, await run_actions.choose(conn, each, names, body, is_strict=each.run_id == run.run_id)) for each in runs
    ]


async def _carry_out(
    caller: ApiCaller, conn: AsyncConnection, found: Chosen, body: InstancePatch, update_mask: list[str] | None
) -> dict[str, Any]:
    """Mark and note. Returns the changed task instances with their new states."""
    fields = query.given_fields(body, update_mask)
    rows = [row for _, rows in found for row in rows]
    if "new_state" in fields and body.new_state is not None:
        rows = [row for row in rows if row.phase != body.new_state]
        if not rows:
            raise Conflict(f"The task instance is already {body.new_state}.")
        for row in rows:
            await run_actions.mark_one(caller, conn, row, body.new_state)
    if "note" in fields:
        for row in rows:
            await write_note(conn, key_of(row), content=body.note or None, actor=caller.actor)
    touched = {key_of(row) for row in rows}
    after = [
        row
        for run, before in found
        for row in await listings.tasks_of(conn, run_id=run.run_id, idxs=sorted({each.idx for each in before}))
        if key_of(row) in touched
    ]
    return await _told(conn, after)


async def _told(conn: AsyncConnection, rows: Sequence[ListedTask]) -> dict[str, Any]:
    return {"task_instances": await instance_documents(conn, rows), "total_entries": len(rows)}
