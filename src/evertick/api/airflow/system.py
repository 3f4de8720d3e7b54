"""Airflow's routes about the installation: event logs, health, version, import errors; and those without a counterpart.

A route without a counterpart answers with an empty list or says that it is not supported; it never invents data.
"""

from __future__ import annotations

import json
import zlib
from datetime import datetime
from typing import Annotated, Any

import psycopg
from fastapi import Path, Query

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import BUNDLE
from evertick.api.auth import GuardedRouter
from evertick.api.context import Who
from evertick.db.queries import accounts, dags, shards
from evertick.db.queries.accounts import EventFilter, ListedEvent
from evertick.db.queries.dags import ImportErrorRow
from evertick.db.queries.run_lists import PageRequest, between_instants
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, PostgresUnavailable
from evertick.release import release

event_logs_router = GuardedRouter(tags=["Event Log"])


ORDER = {
    "id": ["entry_id"],
    "event_log_id": ["entry_id"],
    "dttm": ["occurred_at"],
    "when": ["occurred_at"],
    "dag_id": ["dag"],
    "task_id": ["task"],
    "run_id": ["text_id"],
    "event": ["event"],
    "logical_date": ["fire_at"],
    "owner": ["actor"],
    "extra": ["detail"],
}


# Airflow names an event after the operation that caused it. Evertick's other verbs have no counterpart there.
_EVENTS = {
    "pause": "patch_dag",
    "unpause": "patch_dag",
    "delete": "delete_dag",
    "trigger": "trigger_dag_run",
    "cancel": "patch_dag_run",
    "note run": "patch_dag_run",
    "delete_run": "delete_dag_run",
    "clear": "post_clear_task_instances",
    "mark": "patch_task_instance",
    "note": "patch_task_instance",
    "approve": "update_hitl_detail",
    "reject": "update_hitl_detail",
    "put_output new": "create_xcom_entry",
    "put_output": "update_xcom_entry",
    "put_output gone": "delete_xcom_entry",
    "put_value variable new": "post_variable",
    "put_value variable": "patch_variable",
    "delete_value variable": "delete_variable",
    "put_value connection new": "post_connection",
    "put_value connection": "patch_connection",
    "delete_value connection": "delete_connection",
    "set_pool new": "post_pool",
    "set_pool": "patch_pool",
    "delete_pool": "delete_pool",
    "update_asset": "create_asset_event",
    "unhear": "delete_asset_queued_events",
    "backfill": "create_backfill",
    "pause backfill": "pause_backfill",
    "unpause backfill": "unpause_backfill",
    "cancel backfill": "cancel_backfill",
}


class EventLogQuery(query.Paged):
    dag_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    map_index: query.Small | None = None
    try_number: query.Small | None = None
    owner: str | None = None
    event: str | None = None
    excluded_events: list[str] | None = None
    included_events: list[str] | None = None
    before: datetime | None = None
    after: datetime | None = None
    dag_id_pattern: query.Pattern = None
    task_id_pattern: query.Pattern = None
    run_id_pattern: query.Pattern = None
    owner_pattern: query.Pattern = None
    event_pattern: query.Pattern = None
    dag_id_prefix_pattern: query.Pattern = None
    task_id_prefix_pattern: query.Pattern = None
    run_id_prefix_pattern: query.Pattern = None
    owner_prefix_pattern: query.Pattern = None
    event_prefix_pattern: query.Pattern = None


@event_logs_router.get("/eventLogs", Permission.READ_AUDIT, models.EventLogCollectionResponse)
async def get_event_logs(caller: Who, asked: Annotated[EventLogQuery, Query()]) -> dict[str, Any]:
    order = query.columns(asked.order_by, ORDER)
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
        **query.patterns(asked, dag="dag_id", task="task_id", run="run_id", actor="owner", verb="event"),
        names=_EVENTS,
    )
    if asked.try_number is not None:
        # Audit entries have no try number.
        return {"event_logs": [], "total_entries": 0}
    async with caller.read() as conn:
        found, total = await accounts.list_events(conn, wanted, query.paged(asked, order))
    return {"event_logs": [_event_document(row) for row in found], "total_entries": total}


@event_logs_router.get("/eventLogs/{event_log_id}", Permission.READ_AUDIT, models.EventLogResponse)
async def get_event_log(event_log_id: Annotated[int, Path(ge=0, le=2**63 - 1)], caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        found, _ = await accounts.list_events(
            conn, EventFilter(entry_id=event_log_id, names=_EVENTS), PageRequest(limit=1)
        )
    return _event_document(query.first_of(found, f"The Event Log with id: `{event_log_id}` not found"))


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


monitor_router = GuardedRouter(tags=["Monitor"])


# The Airflow release with this API version; clients compare it.
SPOKEN = "3.3.1"


_KEYS = {
    **{name: name for name in ("import_error_id", "filename", "timestamp", "bundle_name")},
    "id": "import_error_id",
    "stacktrace": "stack_trace",
}


@monitor_router.get("/version", Permission.OPEN, models.VersionInfo)
async def get_version(caller: Who) -> dict[str, Any]:
    return {"version": SPOKEN, "git_version": f"evertick-{release()}"}


@monitor_router.get("/monitor/health", Permission.OPEN, models.HealthInfoResponse)
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


@monitor_router.get("/importErrors", Permission.READ_IMPORTS, models.ImportErrorCollectionResponse)
async def get_import_errors(
    caller: Who,
    limit: query.Limit = query.USUAL_ITEMS,
    offset: query.Offset = 0,
    order_by: query.OrderBy = None,
    filename_pattern: query.Pattern = None,
    filename_prefix_pattern: query.Pattern = None,
    filename: str | None = None,
    bundle_name: str | None = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await dags.import_errors(conn)
    found = [
        _monitor_document(row)
        for row in rows
        if query.fits(row.file, filename_pattern, filename_prefix_pattern)
        and filename in (None, row.file)
        and bundle_name in (None, BUNDLE)
    ]
    part = query.ordered(found, order_by, _KEYS)[offset : offset + query.page_size(limit)]
    return {"import_errors": part, "total_entries": len(found)}


@monitor_router.get("/importErrors/{import_error_id}", Permission.READ_IMPORTS, models.ImportErrorResponse)
async def get_import_error(import_error_id: Annotated[int, Path(ge=0, le=2**63 - 1)], caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await dags.import_errors(conn)
    missing = f"The ImportError with import_error_id: `{import_error_id}` was not found"
    return _monitor_document(query.first_of((row for row in rows if _number(row) == import_error_id), missing))


def _monitor_document(row: ImportErrorRow) -> dict[str, Any]:
    place = f"{row.file}, line {row.line}: " if row.line else f"{row.file}: "
    return {
        "import_error_id": _number(row),
        "timestamp": row.occurred_at,
        "filename": row.file,
        "bundle_name": BUNDLE,
        "stack_trace": f"{place}{row.message}\n{row.detail}".strip(),
    }


def _number(row: ImportErrorRow) -> int:
    """A numeric id derived from the name: a file of a deployment has at most one error."""
    return zlib.crc32(f"{row.deployment}/{row.file}".encode())


unsupported_router = GuardedRouter()


UnsupportedQuery = Annotated[query.Paged, Query()]


@unsupported_router.get("/jobs", Permission.READ_RUNNERS, models.JobCollectionResponse, tags=["Job"])
async def get_jobs(caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    """Always empty. The native API lists schedulers and runners."""
    return {"jobs": [], "total_entries": 0}


@unsupported_router.get("/plugins", Permission.OWN, models.PluginCollectionResponse, tags=["Plugin"])
async def get_plugins(caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    return {"plugins": [], "total_entries": 0}


@unsupported_router.get(
    "/plugins/importErrors", Permission.OWN, models.PluginImportErrorCollectionResponse, tags=["Plugin"]
)
async def import_errors(caller: Who) -> dict[str, Any]:
    return {"import_errors": [], "total_entries": 0}


@unsupported_router.get("/providers", Permission.OWN, models.ProviderCollectionResponse, tags=["Provider"])
async def get_providers(caller: Who, asked: UnsupportedQuery) -> dict[str, Any]:
    return {"providers": [], "total_entries": 0}


@unsupported_router.get("/config", Permission.OWN, models.Config, tags=["Config"])
async def get_config(caller: Who, section: str | None = None) -> dict[str, Any]:
    """Always empty: settings are not exposed over HTTP."""
    return {"sections": []}


@unsupported_router.get(
    "/config/section/{section}/option/{option}", Permission.OWN, models.ConfigSection, tags=["Config"]
)
async def get_config_value(section: str, option: str, caller: Who) -> dict[str, Any]:
    raise NotFound(f"Option [{section}/{option}] not found.")
