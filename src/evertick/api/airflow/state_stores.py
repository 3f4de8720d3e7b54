"""The state of tasks and assets, in Airflow's format. A task's state here is that of one run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Query
from psycopg import AsyncConnection
from pydantic import AwareDatetime

from evertick.api.airflow import query
from evertick.api.airflow.assets import AssetId, find_asset
from evertick.api.airflow.runs import find_run
from evertick.api.airflow.task_instances import MapIndex, T, find_instance, missing
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import state, tasks
from evertick.db.queries.state import StateEntry, StateOwner
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.engine.asks import change_state
from evertick.operations.state import encoded

router = GuardedRouter()

# Airflow's default of `[state_store] default_retention_days`.
DEFAULT_RETENTION = timedelta(days=30)
_TASK, _ASSET = f"{T}/state-store", "/assets/{asset_id}/state-store"
_READ, _CHANGE = Permission.READ_RUNS, Permission.MARK_TASKS
_READ_ASSET, _CHANGE_ASSET = Permission.READ_GATES, Permission.SEND_EVENTS
_TASK_TAG, _ASSET_TAG = "Task State Store", "Asset State Store"


class StateBody(query.Body):
    value: Any


class ExpiringBody(StateBody):
    """`default` is thirty days from now; null never expires."""

    expires_at: AwareDatetime | Literal["default"] | None = "default"


@router.get(_TASK, _READ, dict[str, Any], tags=[_TASK_TAG])
async def list_task_state_store(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    caller: Who,
    asked: Annotated[query.Paged, Query()],
    map_index: MapIndex = -1,
) -> dict[str, Any]:
    async with caller.read() as conn:
        found = await state.entries(conn, await _task(caller, conn, (dag_id, dag_run_id, task_id), map_index))
    return {"task_state_store": [_task_entry(each) for each in _page(found, asked)], "total_entries": len(found)}


@router.get(f"{_TASK}/{{key:path}}", _READ, dict[str, Any], tags=[_TASK_TAG])
async def get_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, key: str, caller: Who, map_index: MapIndex = -1
) -> dict[str, Any]:
    async with caller.read() as conn:
        of = await _task(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        return _task_entry(await _entry(conn, of, key, "Task"))


@router.put(f"{_TASK}/{{key:path}}", _CHANGE, status_code=204, tags=[_TASK_TAG])
async def set_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, key: str, body: ExpiringBody, caller: Who, map_index: MapIndex = -1
) -> None:
    until = datetime.now(UTC) + DEFAULT_RETENTION if body.expires_at == "default" else body.expires_at
    async with caller.write() as conn:
        of = await _task(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        await change_state(conn, of, key=key, value=encoded(body.value), expires_at=until, actor=caller.actor)


@router.patch(f"{_TASK}/{{key:path}}", _CHANGE, tags=[_TASK_TAG])
async def patch_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, key: str, body: StateBody, caller: Who, map_index: MapIndex = -1
) -> None:
    """Replace a value, which expires as before."""
    async with caller.write() as conn:
        of = await _task(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        until = (await _entry(conn, of, key, "Task")).expires_at
        await change_state(conn, of, key=key, value=encoded(body.value), expires_at=until, actor=caller.actor)


@router.delete(f"{_TASK}/{{key:path}}", _CHANGE, status_code=204, tags=[_TASK_TAG])
async def delete_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, key: str, caller: Who, map_index: MapIndex = -1
) -> None:
    async with caller.write() as conn:
        of = await _task(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        await change_state(conn, of, key=key, value=None, actor=caller.actor)


@router.delete(_TASK, _CHANGE, status_code=204, tags=[_TASK_TAG])
async def clear_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndex = -1, all_map_indices: bool = False
) -> None:
    names = (dag_id, dag_run_id, task_id)
    async with caller.write() as conn:
        for index in await _indexes(caller, conn, names) if all_map_indices else [map_index]:
            of = await _task(caller, conn, names, index)
            await change_state(conn, of, key=None, value=None, actor=caller.actor)


@router.get(_ASSET, _READ_ASSET, dict[str, Any], tags=[_ASSET_TAG])
async def list_asset_state_store(
    asset_id: AssetId, caller: Who, asked: Annotated[query.Paged, Query()]
) -> dict[str, Any]:
    async with caller.read() as conn:
        found = await state.entries(conn, await _asset(conn, asset_id))
    return {"asset_state_store": [_asset_entry(each) for each in _page(found, asked)], "total_entries": len(found)}


@router.get(f"{_ASSET}/{{key:path}}", _READ_ASSET, dict[str, Any], tags=[_ASSET_TAG])
async def get_asset_state_store(asset_id: AssetId, key: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return _asset_entry(await _entry(conn, await _asset(conn, asset_id), key, "Asset"))


@router.put(f"{_ASSET}/{{key:path}}", _CHANGE_ASSET, status_code=204, tags=[_ASSET_TAG])
async def set_asset_state_store(asset_id: AssetId, key: str, body: StateBody, caller: Who) -> None:
    async with caller.write() as conn:
        of = await _asset(conn, asset_id)
        await change_state(conn, of, key=key, value=encoded(body.value), actor=caller.actor)


@router.delete(f"{_ASSET}/{{key:path}}", _CHANGE_ASSET, status_code=204, tags=[_ASSET_TAG])
async def delete_asset_state_store(asset_id: AssetId, key: str, caller: Who) -> None:
    async with caller.write() as conn:
        await change_state(conn, await _asset(conn, asset_id), key=key, value=None, actor=caller.actor)


@router.delete(_ASSET, _CHANGE_ASSET, status_code=204, tags=[_ASSET_TAG])
async def clear_asset_state_store(asset_id: AssetId, caller: Who) -> None:
    async with caller.write() as conn:
        await change_state(conn, await _asset(conn, asset_id), key=None, value=None, actor=caller.actor)


async def _task(caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int) -> StateOwner:
    row = await find_instance(caller, conn, names, map_index)
    return StateOwner(dag_id=row.dag_id, owner=row.task, run_id=row.run_id, map_index=row.map_index)


async def _indexes(caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str]) -> list[int]:
    run = await find_run(caller, conn, *names[:2])
    rows = await tasks.by_name(conn, run_id=run.run_id, task=names[2])
    if not rows:
        raise NotFound(missing(*names))
    return [each.map_index for each in rows]


async def _asset(conn: AsyncConnection, asset_id: int) -> StateOwner:
    return StateOwner(dag_id=0, owner=(await find_asset(conn, asset_id))["name"])


async def _entry(conn: AsyncConnection, of: StateOwner, key: str, what: str) -> StateEntry:
    found = await state.entries(conn, of, key=key, limit=1)
    return query.first_of(found, f"{what} state store key {key!r} not found")


def _page(found: list[StateEntry], asked: query.Paged) -> list[StateEntry]:
    return found[asked.offset : asked.offset + asked.limit]


def _task_entry(row: StateEntry) -> dict[str, Any]:
    return {"key": row.key, "value": row.value, "updated_at": row.changed_at, "expires_at": row.expires_at}


def _asset_entry(row: StateEntry) -> dict[str, Any]:
    """An entry that no task has written was written by a user."""
    by: dict[str, Any] = {"kind": "api"}
    if row.writer is not None:
        names = {f"{name}_id": row.writer[name] for name in ("dag", "run", "task")}
        by = {"kind": "task", **names, "map_index": row.writer["map_index"]}
    return {"key": row.key, "value": row.value, "updated_at": row.changed_at, "last_updated_by": by}
