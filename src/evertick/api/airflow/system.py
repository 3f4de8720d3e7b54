"""Airflow's routes about the installation: event logs, health, version, import errors; and those without a counterpart.

A route without a counterpart answers with an empty list or says that it is not supported; it never invents data.
"""

from __future__ import annotations

import json
import zlib
from datetime import datetime
from importlib.metadata import version
from typing import Annotated, Any

import psycopg
from fastapi import APIRouter, Path, Query

from evertick.api.airflow.assets import AssetId, find_asset
from evertick.api.airflow.labels import BUNDLE
from evertick.api.airflow.models import (
    Config,
    ConfigSection,
    EventLogCollectionResponse,
    EventLogResponse,
    HealthInfoResponse,
    ImportErrorCollectionResponse,
    ImportErrorResponse,
    JobCollectionResponse,
    PluginCollectionResponse,
    PluginImportErrorCollectionResponse,
    ProviderCollectionResponse,
    VersionInfo,
)
from evertick.api.airflow.query import (
    USUAL_ITEMS,
    Limit,
    Offset,
    OrderBy,
    Paged,
    Pattern,
    Small,
    begins,
    columns,
    contains,
    fits,
    ordered,
    page_size,
    paged,
)
from evertick.api.airflow.task_instances import MapIndexAsked, T, find_instance
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.db.queries import accounts, dags, shards
from evertick.db.queries.accounts import EventFilter, ListedEvent
from evertick.db.queries.dags import ImportErrorRow
from evertick.db.queries.run_lists import PageRequest, between_instants
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, PostgresUnavailable

event_logs_router = APIRouter(route_class=GuardedRoute, tags=["Event Log"])


ORDER = {
    "id": ["entry_id"],
    "event_log_id": ["entry_id"],
    "dttm": ["occurred_at"],
    "when": ["occurred_at"],
    "dag_id": ["dag"],
    "task_id": ["task"],
    "run_id": ["text_id"],
    "event": ["verb"],
    "logical_date": ["fire_at"],
    "owner": ["actor"],
    "extra": ["detail"],
}


class EventQuery(Paged):
    dag_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    map_index: Small | None = None
    try_number: Small | None = None
    owner: str | None = None
    event: str | None = None
    excluded_events: list[str] | None = None
    included_events: list[str] | None = None
    before: datetime | None = None
    after: datetime | None = None
    dag_id_pattern: Pattern = None
    task_id_pattern: Pattern = None
    run_id_pattern: Pattern = None
    owner_pattern: Pattern = None
    event_pattern: Pattern = None
    dag_id_prefix_pattern: Pattern = None
    task_id_prefix_pattern: Pattern = None
    run_id_prefix_pattern: Pattern = None
    owner_prefix_pattern: Pattern = None
    event_prefix_pattern: Pattern = None


@event_logs_router.get("/eventLogs", response_model=EventLogCollectionResponse)
@requires(Permission.READ_AUDIT)
async def get_event_logs(caller: Who, asked: Annotated[EventQuery, Query()]) -> dict[str, Any]:
    order = columns(asked.order_by, ORDER)
    wanted = EventFilter(
        dag=asked.dag_id,
        task=asked.task_id,
        text_id=asked.run_id,
        map_index=asked.map_index,
        actor=asked.owner,
        verb=asked.event,
        verbs=asked.included_events or None,
        without=asked.excluded_events or None,
        occurred=between_instants(None, asked.after, None, asked.before),
        dag_like=contains(asked.dag_id_pattern),
        dag_heads=begins(asked.dag_id_prefix_pattern),
        task_like=contains(asked.task_id_pattern),
        task_heads=begins(asked.task_id_prefix_pattern),
        run_like=contains(asked.run_id_pattern),
        run_heads=begins(asked.run_id_prefix_pattern),
        actor_like=contains(asked.owner_pattern),
        actor_heads=begins(asked.owner_prefix_pattern),
        verb_like=contains(asked.event_pattern),
        verb_heads=begins(asked.event_prefix_pattern),
    )
    if asked.try_number is not None:
        # Audit entries have no try number.
        return {"event_logs": [], "total_entries": 0}
    async with caller.read() as conn:
        found, total = await accounts.list_events(conn, wanted, paged(asked, order))
    return {"event_logs": [_event_document(row) for row in found], "total_entries": total}


@event_logs_router.get("/eventLogs/{event_log_id}", response_model=EventLogResponse)
@requires(Permission.READ_AUDIT)
async def get_event_log(event_log_id: Annotated[int, Path(ge=0, le=2**63 - 1)], caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        found, _ = await accounts.list_events(conn, EventFilter(entry_id=event_log_id), PageRequest(limit=1))
    if not found:
        raise NotFound(f"The Event Log with id: `{event_log_id}` not found")
    return _event_document(found[0])


def _event_document(row: ListedEvent) -> dict[str, Any]:
    return {
        "event_log_id": row.entry_id,
        "when": row.occurred_at,
        "dag_id": row.dag,
        "dag_display_name": row.dag,
        "task_id": row.task,
        "task_display_name": row.task,
        "run_id": row.text_id,
        "map_index": row.map_index,
        "event": row.verb,
        "logical_date": row.fire_at,
        "owner": row.actor,
        "extra": json.dumps(row.detail),
    }


monitor_router = APIRouter(route_class=GuardedRoute, tags=["Monitor"])


# The Airflow release with this API version; clients compare it.
SPOKEN = "3.3.1"


_KEYS = {
    "id": lambda item: item["import_error_id"],
    "import_error_id": lambda item: item["import_error_id"],
    "filename": lambda item: item["filename"],
    "timestamp": lambda item: item["timestamp"],
    "bundle_name": lambda item: item["bundle_name"],
    "stacktrace": lambda item: item["stack_trace"],
}


@monitor_router.get("/version", response_model=VersionInfo)
@requires(Permission.OPEN)
async def get_version(caller: Who) -> dict[str, Any]:
    return {"version": SPOKEN, "git_version": f"evertick-{version('evertick')}"}


@monitor_router.get("/monitor/health", response_model=HealthInfoResponse)
@requires(Permission.OPEN)
async def get_health(caller: Who) -> dict[str, Any]:
    """Report health. Responds also if a component is unhealthy."""
    database, leader, beat = "unhealthy", "unhealthy", None
    try:
        async with caller.read() as conn:
            found = await shards.leader(conn, shard=0)
        database = "healthy"
        if found is not None and not found.unled:
            leader, beat = "healthy", found.lease_until.isoformat() if found.lease_until else None
    except (psycopg.Error, PostgresUnavailable, OSError):
        pass  # reported as unhealthy
    return {
        "metadatabase": {"status": database},
        "scheduler": {"status": leader, "latest_scheduler_heartbeat": beat},
        "triggerer": {"status": None, "latest_triggerer_heartbeat": None},
        "dag_processor": {"status": None, "latest_dag_processor_heartbeat": None},
    }


@monitor_router.get("/importErrors", response_model=ImportErrorCollectionResponse)
@requires(Permission.READ_IMPORTS)
async def get_import_errors(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    filename_pattern: Pattern = None,
    filename_prefix_pattern: Pattern = None,
    filename: str | None = None,
    bundle_name: str | None = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await dags.import_errors(conn)
    found = [
        _monitor_document(row)
        for row in rows
        if fits(row.file, filename_pattern, filename_prefix_pattern)
        and filename in (None, row.file)
        and bundle_name in (None, BUNDLE)
    ]
    found = ordered(found, order_by, _KEYS)
    return {"import_errors": found[offset : offset + page_size(limit)], "total_entries": len(found)}


@monitor_router.get("/importErrors/{import_error_id}", response_model=ImportErrorResponse)
@requires(Permission.READ_IMPORTS)
async def get_import_error(import_error_id: Annotated[int, Path(ge=0, le=2**63 - 1)], caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await dags.import_errors(conn)
    for row in rows:
        if _number(row.file) == import_error_id:
            return _monitor_document(row)
    raise NotFound(f"The ImportError with import_error_id: `{import_error_id}` was not found")


def _monitor_document(row: ImportErrorRow) -> dict[str, Any]:
    place = f"{row.file}, line {row.line}: " if row.line else f"{row.file}: "
    return {
        "import_error_id": _number(row.file),
        "timestamp": row.occurred_at,
        "filename": row.file,
        "bundle_name": BUNDLE,
        "stack_trace": f"{place}{row.message}\n{row.detail}".strip(),
    }


def _number(file: str) -> int:
    """A numeric id derived from the file name: a file has at most one error."""
    return zlib.crc32(file.encode())


unsupported_router = APIRouter(route_class=GuardedRoute)


UnsupportedQuery = Annotated[Paged, Query()]


@unsupported_router.get("/jobs", response_model=JobCollectionResponse, tags=["Job"])
@requires(Permission.READ_RUNNERS)
async def get_jobs(caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    """Always empty. The native API lists schedulers and runners."""
    return {"jobs": [], "total_entries": 0}


@unsupported_router.get("/plugins", response_model=PluginCollectionResponse, tags=["Plugin"])
@requires(Permission.OWN)
async def get_plugins(caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    return {"plugins": [], "total_entries": 0}


@unsupported_router.get("/plugins/importErrors", response_model=PluginImportErrorCollectionResponse, tags=["Plugin"])
@requires(Permission.OWN)
async def import_errors(caller: Who) -> dict[str, Any]:
    return {"import_errors": [], "total_entries": 0}


@unsupported_router.get("/providers", response_model=ProviderCollectionResponse, tags=["Provider"])
@requires(Permission.OWN)
async def get_providers(caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    return {"providers": [], "total_entries": 0}


@unsupported_router.get("/config", response_model=Config, tags=["Config"])
@requires(Permission.OWN)
async def get_config(caller: Who, section: str | None = None) -> dict[str, Any]:
    """Always empty: settings are not exposed over HTTP."""
    return {"sections": []}


@unsupported_router.get("/config/section/{section}/option/{option}", response_model=ConfigSection, tags=["Config"])
@requires(Permission.OWN)
async def get_config_value(section: str, option: str, caller: Who) -> dict[str, Any]:
    raise NotFound(f"Option [{section}/{option}] not found.")


@unsupported_router.get(f"{T}/state-store", response_model=dict[str, Any], tags=["Task State Store"])
@requires(Permission.READ_RUNS)
async def list_task_state_store(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndexAsked = -1
) -> dict[str, Any]:
    async with caller.read() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    return {"task_state_store": [], "total_entries": 0}


@unsupported_router.get("/assets/{asset_id}/state-store", response_model=dict[str, Any], tags=["Asset State Store"])
@requires(Permission.READ_GATES)
async def list_asset_state_store(asset_id: AssetId, caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    async with caller.read() as conn:
        await find_asset(conn, asset_id)
    return {"asset_state_store": [], "total_entries": 0}
