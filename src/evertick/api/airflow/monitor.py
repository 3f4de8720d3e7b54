"""Version, health and import errors."""

from __future__ import annotations

import zlib
from importlib.metadata import version
from typing import Annotated, Any

import psycopg
from fastapi import APIRouter, Path

from evertick.api.airflow.asking import USUAL_ITEMS, Limit, Offset, OrderBy, Pattern, fits, ordered, page_size
from evertick.api.airflow.models import (
    HealthInfoResponse,
    ImportErrorCollectionResponse,
    ImportErrorResponse,
    VersionInfo,
)
from evertick.api.airflow.words import BUNDLE
from evertick.api.desk import Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, PostgresUnavailable
from evertick.store import dags, shards
from evertick.store.dags import ImportErrorRow

router = APIRouter(route_class=GuardedRoute, tags=["Monitor"])

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


@router.get("/version", response_model=VersionInfo)
@needs(Permission.OPEN)
async def get_version(caller: Who) -> dict[str, Any]:
    return {"version": SPOKEN, "git_version": f"evertick-{version('evertick')}"}


@router.get("/monitor/health", response_model=HealthInfoResponse)
@needs(Permission.OPEN)
async def get_health(caller: Who) -> dict[str, Any]:
    """Report health. Responds also if a component is unhealthy."""
    database, leader, beat = "unhealthy", "unhealthy", None
    try:
        async with caller.reading() as conn:
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


@router.get("/importErrors", response_model=ImportErrorCollectionResponse)
@needs(Permission.READ_IMPORTS)
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
    async with caller.reading() as conn:
        rows = await dags.import_errors(conn)
    found = [
        _document(row)
        for row in rows
        if fits(row.file, filename_pattern, filename_prefix_pattern)
        and filename in (None, row.file)
        and bundle_name in (None, BUNDLE)
    ]
    found = ordered(found, order_by, _KEYS)
    return {"import_errors": found[offset : offset + page_size(limit)], "total_entries": len(found)}


@router.get("/importErrors/{import_error_id}", response_model=ImportErrorResponse)
@needs(Permission.READ_IMPORTS)
async def get_import_error(import_error_id: Annotated[int, Path(ge=0, le=2**63 - 1)], caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        rows = await dags.import_errors(conn)
    for row in rows:
        if _number(row.file) == import_error_id:
            return _document(row)
    raise NotFound(f"The ImportError with import_error_id: `{import_error_id}` was not found")


def _document(row: ImportErrorRow) -> dict[str, Any]:
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
