"""Further DAG endpoints: tags, versions, sources, run counts by state, warnings, favorites."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from fastapi.responses import PlainTextResponse, Response
from psycopg import AsyncConnection

from evertick.api.airflow.dags import seen_tags
from evertick.api.airflow.labels import BUNDLE, RUN_STATES, version_of
from evertick.api.airflow.models import (
    DAGSourceResponse,
    DagStatsCollectionResponse,
    DAGTagCollectionResponse,
    DAGVersionCollectionResponse,
    DagVersionResponse,
    DAGWarningCollectionResponse,
)
from evertick.api.airflow.query import (
    EVERY,
    USUAL_ITEMS,
    Limit,
    Offset,
    OrderBy,
    Paged,
    Pattern,
    Smalls,
    Texts,
    fits,
    ordered,
    page_size,
)
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.bundles.bundle import contents
from evertick.db.queries import dags, listings
from evertick.db.queries.dags import DagRow, ListedVersion
from evertick.db.queries.run_lists import MOST_COUNTED, PageRequest
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.operations.dags import refuse_unless_code_is_visible

router = APIRouter(route_class=GuardedRoute, tags=["DAG"])

Number = Annotated[int, Path(ge=0, le=2**31 - 1)]


class VersionQuery(Paged):
    version_number: Smalls = None
    bundle_name: str | None = None
    bundle_version: str | None = None


@router.get("/dagTags", response_model=DAGTagCollectionResponse)
@requires(Permission.READ_DAGS)
async def get_dag_tags(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    tag_name_pattern: Pattern = None,
    tag_name_prefix_pattern: Pattern = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        tags = await listings.tags(conn, seen_tags=seen_tags(caller))
    found = [tag for tag in tags if fits(tag, tag_name_pattern, tag_name_prefix_pattern)]
    found = ordered(found, order_by, {"name": lambda tag: tag})
    return {"tags": found[offset : offset + page_size(limit)], "total_entries": len(found)}


@router.get("/dags/{dag_id}/dagVersions", response_model=DAGVersionCollectionResponse, tags=["DagVersion"])
@requires(Permission.READ_DAGS)
async def get_dag_versions(dag_id: str, caller: Who, asked: Annotated[VersionQuery, Query()]) -> dict[str, Any]:
    """List the versions of one DAG, or of all with `~`."""
    async with caller.read() as conn:
        dag_ids = await caller.visible_dag_ids(conn) if dag_id == EVERY else [(await caller.dag(conn, dag_id)).dag_id]
        rows = await dags.versions_of(conn, dag_ids)
    found = [row for row in rows if not asked.version_number or row.number in asked.version_number]
    if asked.bundle_name not in (None, BUNDLE) or asked.bundle_version is not None:
        found = []
    keys = {
        "id": lambda row: row.version_id,
        "version_number": lambda row: row.number,
        "bundle_name": lambda row: BUNDLE,
        "bundle_version": lambda row: None,
    }
    found = ordered(found, asked.order_by, keys)
    part = found[asked.offset : asked.offset + page_size(asked.limit)]
    documents = [version_of(row.dag, row.version_id, row.number, row.created_at) for row in part]
    return {"dag_versions": documents, "total_entries": len(found)}


@router.get("/dags/{dag_id}/dagVersions/{version_number}", response_model=DagVersionResponse, tags=["DagVersion"])
@requires(Permission.READ_DAGS)
async def get_dag_version(dag_id: str, version_number: Number, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await caller.dag(conn, dag_id)
        version = await _find_version(conn, row, version_number)
    return version_of(row.name, version.version_id, version.number, version.created_at)


@router.get(
    "/dagSources/{dag_id}",
    response_model=DAGSourceResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    tags=["DagSource"],
)
@requires(Permission.READ_DAGS)
async def get_dag_source(
    dag_id: str,
    caller: Who,
    version_number: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    accept: Annotated[str, Header()] = "application/json",
) -> Response | dict[str, Any]:
    """The DAG's file as published with the version."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag_id)
        number = row.number if version_number is None else version_number
        version = await _find_version(conn, row, number or 0)
        await refuse_unless_code_is_visible(caller, conn, version.bundle_hash)
        bundle = await dags.bundle(conn, version.bundle_hash)
    text = None
    if bundle is not None:
        text = contents(bundle.archive, version.bundle_hash).get(bundle.file, b"").decode(errors="replace")
    if "text/plain" in accept:
        return PlainTextResponse(text or "")
    return {"content": text, "dag_id": row.name, "dag_display_name": row.name, "version_number": number}


@router.get("/dagStats", response_model=DagStatsCollectionResponse, tags=["DagStats"])
@requires(Permission.READ_RUNS)
async def get_dag_stats(caller: Who, dag_ids: Texts = None) -> dict[str, Any]:
    """The number of runs of each DAG per state."""
    async with caller.read() as conn:
        names, _ = await listings.list_dags(
            conn, listings.ListedDagFilter(seen_tags=seen_tags(caller)), PageRequest(limit=MOST_COUNTED)
        )
        wanted = [name for name in names if not dag_ids or name in dag_ids]
        counts = await listings.count_runs(conn, dags=wanted)
    documents = []
    for name in wanted:
        stats = dict.fromkeys(("queued", "running", "success", "failed"), 0)
        for state, count in counts.get(name, {}).items():
            stats[str(RUN_STATES[state])] += count
        listed = [{"state": state, "count": count} for state, count in stats.items()]
        documents.append({"dag_id": name, "dag_display_name": name, "stats": listed})
    return {"dags": documents, "total_entries": len(documents)}


@router.get("/dagWarnings", response_model=DAGWarningCollectionResponse, tags=["DagWarning"])
@requires(Permission.READ_DAGS)
async def list_dag_warnings(caller: Who, limit: Limit = USUAL_ITEMS, offset: Offset = 0) -> dict[str, Any]:
    """Always empty: problems that are warnings in Airflow prevent a DAG from being published."""
    return {"dag_warnings": [], "total_entries": 0}


@router.post("/dags/{dag_id}/favorite", status_code=204)
@requires(Permission.READ_DAGS)
async def favorite_dag(dag_id: str, caller: Who) -> None:
    """Does nothing: Evertick has no favorites."""
    async with caller.read() as conn:
        await caller.dag(conn, dag_id)


@router.post("/dags/{dag_id}/unfavorite", status_code=204)
@requires(Permission.READ_DAGS)
async def unfavorite_dag(dag_id: str, caller: Who) -> None:
    async with caller.read() as conn:
        await caller.dag(conn, dag_id)


async def _find_version(conn: AsyncConnection, row: DagRow, number: int) -> ListedVersion:
    for each in await dags.versions(conn, dag_id=row.dag_id, limit=1, before=min(number + 1, 2**31 - 1)):
        if each.number == number:
            return each
    raise NotFound(f"The DagVersion with dag_id: `{row.name}` and version_number: `{number}` was not found")
