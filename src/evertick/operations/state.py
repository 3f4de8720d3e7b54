"""State that tasks and assets keep: list, show, set, delete."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen
from psycopg import AsyncConnection

from evertick.db.queries import state, tasks
from evertick.db.queries.state import StateEntry, StateOwner
from evertick.domain.errors import NotFound, UserError
from evertick.domain.state import LONGEST_KEY, MOST_KEYS
from evertick.engine.asks import change_state
from evertick.engine.waits import find_asset
from evertick.operations.caller import Caller
from evertick.operations.dags import DagName
from evertick.operations.paging import (
    LARGEST,
    USUAL_ITEMS,
    Cursor,
    Limit,
    Page,
    RequestBody,
    page_of,
    read_cursor,
    record_of,
)
from evertick.operations.runs import find_run
from evertick.operations.tasks import MapIndex, TaskName
from evertick.operations.waits import AssetName

StateKey = Annotated[str, MinLen(1), MaxLen(LONGEST_KEY), Doc("The key.")]
OfRun = Annotated[
    int | None, Ge(1), Le(LARGEST), Doc("The state of the task in this run only, which Airflow's task state store is.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValue:
    """`changed_by` names the run or the user that changed it last."""

    key: str
    value: Any
    expires_at: datetime | None
    changed_at: datetime
    changed_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequest(RequestBody):
    value: Any


async def list_task_state(
    caller: Caller,
    *,
    dag: DagName,
    task: TaskName,
    run_id: OfRun = None,
    map_index: MapIndex = -1,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[StateValue]:
    """List the state that a task keeps between attempts and runs, by key."""
    async with caller.read() as conn:
        return await _page(conn, await _of_task(caller, conn, dag, task, run_id, map_index), limit, cursor)


async def show_task_state(
    caller: Caller, *, dag: DagName, task: TaskName, key: StateKey, run_id: OfRun = None, map_index: MapIndex = -1
) -> StateValue:
    """Show one value of a task's state."""
    async with caller.read() as conn:
        return await _one(conn, await _of_task(caller, conn, dag, task, run_id, map_index), key)


async def put_task_state(
    caller: Caller,
    *,
    dag: DagName,
    task: TaskName,
    key: StateKey,
    body: StateRequest,
    run_id: OfRun = None,
    map_index: MapIndex = -1,
) -> StateValue:
    """Set one value of a task's state."""
    async with caller.write() as conn:
        of = await _of_task(caller, conn, dag, task, run_id, map_index)
        return await _put(caller, conn, of, key, body.value)


async def delete_task_state(
    caller: Caller, *, dag: DagName, task: TaskName, key: StateKey, run_id: OfRun = None, map_index: MapIndex = -1
) -> None:
    """Delete one value of a task's state."""
    async with caller.write() as conn:
        await _delete(caller, conn, await _of_task(caller, conn, dag, task, run_id, map_index), key)


async def list_asset_state(
    caller: Caller, *, name: AssetName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[StateValue]:
    """List the state that tasks keep of an asset, by key."""
    async with caller.read() as conn:
        return await _page(conn, await _of_asset(conn, name), limit, cursor)


async def show_asset_state(caller: Caller, *, name: AssetName, key: StateKey) -> StateValue:
    """Show one value of an asset's state."""
    async with caller.read() as conn:
        return await _one(conn, await _of_asset(conn, name), key)


async def put_asset_state(caller: Caller, *, name: AssetName, key: StateKey, body: StateRequest) -> StateValue:
    """Set one value of an asset's state."""
    async with caller.write() as conn:
        return await _put(caller, conn, await _of_asset(conn, name), key, body.value)


async def delete_asset_state(caller: Caller, *, name: AssetName, key: StateKey) -> None:
    """Delete one value of an asset's state."""
    async with caller.write() as conn:
        await _delete(caller, conn, await _of_asset(conn, name), key)


def encoded(value: object) -> str:
    """A value of state as JSON. Null is no value: its key is deleted instead."""
    if value is None:
        raise UserError("null cannot be the value of a key. Delete the key instead.")
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise UserError("the value has a number that JSON cannot express: NaN or an infinity.") from None


async def _of_task(
    caller: Caller, conn: AsyncConnection, dag: str, task: str, run_id: int | None, map_index: int
) -> StateOwner:
    row = await caller.known_dag(conn, dag)
    if run_id is None:
        return StateOwner(dag_id=row.dag_id, owner=task)
    run = await find_run(caller, conn, run_id)
    if run.dag != dag or not await tasks.by_name(conn, run_id=run_id, task=task, limit=1):
        raise NotFound(
            f"Run {run_id} is not one of DAG {dag!r} with a task {task!r}. List runs with `evertick runs list`."
        )
    return StateOwner(dag_id=row.dag_id, owner=task, run_id=run_id, map_index=map_index)


async def _of_asset(conn: AsyncConnection, name: str) -> StateOwner:
    await find_asset(conn, name)
    return StateOwner(dag_id=0, owner=name)


async def _page(conn: AsyncConnection, of: StateOwner, limit: int, cursor: str | None) -> Page[StateValue]:
    (after,) = read_cursor(cursor, "")
    found = await state.entries(conn, of, after=after, limit=min(limit, MOST_KEYS))
    return page_of(found, limit, lambda row: (row.key,), _value)


async def _one(conn: AsyncConnection, of: StateOwner, key: str) -> StateValue:
    found = await state.entries(conn, of, key=key, limit=1)
    if not found:
        raise NotFound(
            f"There is no state under the key {key!r} of {of.owner!r}. List keys with `evertick state list`."
        )
    return _value(found[0])


async def _put(caller: Caller, conn: AsyncConnection, of: StateOwner, key: str, value: object) -> StateValue:
    await change_state(conn, of, key=key, value=encoded(value), actor=caller.actor)
    return await _one(conn, of, key)


async def _delete(caller: Caller, conn: AsyncConnection, of: StateOwner, key: str) -> None:
    if not await change_state(conn, of, key=key, value=None, actor=caller.actor):
        raise NotFound(
            f"There is no state under the key {key!r} of {of.owner!r}. List keys with `evertick state list`."
        )


def _value(row: StateEntry) -> StateValue:
    return record_of(StateValue, row)
