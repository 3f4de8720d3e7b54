"""Airflow resources without an Evertick equivalent: empty lists or "not found", so that clients that read everything work."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from evertick.api.airflow.asking import Paged
from evertick.api.airflow.assets import AssetId, find_asset
from evertick.api.airflow.instances import MapIndexAsked, T, find_instance
from evertick.api.airflow.models import (
    Config,
    ConfigSection,
    JobCollectionResponse,
    PluginCollectionResponse,
    PluginImportErrorCollectionResponse,
    ProviderCollectionResponse,
)
from evertick.api.desk import Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound

router = APIRouter(route_class=GuardedRoute)

Asked = Annotated[Paged, Query()]


@router.get("/jobs", response_model=JobCollectionResponse, tags=["Job"])
@needs(Permission.READ_RUNNERS)
async def get_jobs(caller: Who, asked: Asked) -> dict[str, Any]:
    """Always empty. The native API lists schedulers and runners."""
    return {"jobs": [], "total_entries": 0}


@router.get("/plugins", response_model=PluginCollectionResponse, tags=["Plugin"])
@needs(Permission.OWN)
async def get_plugins(caller: Who, asked: Asked) -> dict[str, Any]:
    return {"plugins": [], "total_entries": 0}


@router.get("/plugins/importErrors", response_model=PluginImportErrorCollectionResponse, tags=["Plugin"])
@needs(Permission.OWN)
async def import_errors(caller: Who) -> dict[str, Any]:
    return {"import_errors": [], "total_entries": 0}


@router.get("/providers", response_model=ProviderCollectionResponse, tags=["Provider"])
@needs(Permission.OWN)
async def get_providers(caller: Who, asked: Asked) -> dict[str, Any]:
    return {"providers": [], "total_entries": 0}


@router.get("/config", response_model=Config, tags=["Config"])
@needs(Permission.OWN)
async def get_config(caller: Who, section: str | None = None) -> dict[str, Any]:
    """Always empty: settings are not exposed over HTTP."""
    return {"sections": []}


@router.get("/config/section/{section}/option/{option}", response_model=ConfigSection, tags=["Config"])
@needs(Permission.OWN)
async def get_config_value(section: str, option: str, caller: Who) -> dict[str, Any]:
    raise NotFound(f"Option [{section}/{option}] not found.")


@router.get(f"{T}/state-store", response_model=dict[str, Any], tags=["Task State Store"])
@needs(Permission.READ_RUNS)
async def list_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndexAsked = -1
) -> dict[str, Any]:
    async with caller.reading() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    return {"task_state_store": [], "total_entries": 0}


@router.get("/assets/{asset_id}/state-store", response_model=dict[str, Any], tags=["Asset State Store"])
@needs(Permission.READ_GATES)
async def list_asset_state_store(asset_id: AssetId, caller: Who, asked: Asked) -> dict[str, Any]:
    async with caller.reading() as conn:
        await find_asset(conn, asset_id)
    return {"asset_state_store": [], "total_entries": 0}
