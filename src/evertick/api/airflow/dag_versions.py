"""Further DAG endpoints: tags, versions, sources, run counts by state, warnings, favorites."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Path, Query
from fastapi.responses import PlainTextResponse, Response
from psycopg import AsyncConnection

from evertick.api.airflow import models, query
from evertick.api.airflow.dags import seen_tags
from evertick.api.airflow.labels import BUNDLE, RUN_STATES, version_of
from evertick.api.auth import GuardedRouter
from evertick.api.context import Who
from evertick.bundles.bundle import contents
from evertick.db.queries import dags, listings
from evertick.db.queries.dags import DagRow, ListedVersion
from evertick.db.queries.run_lists import MOST_COUNTED, PageRequest
from evertick.domain.access import Permission
from evertick.operations.dags import refuse_unless_code_is_visible

router = GuardedRouter(tags=["DAG"])

Number = Annotated[int, Path(ge=0, le=2**31 - 1)]


class VersionQuery(query.Paged):
    version_number: query.Smalls = None
    bundle_name: str | None = None
    bundle_version: str | None = None


@router.get("/dagTags", Permission.READ_DAGS, models.DAGTagCollectionResponse)
async def get_dag_tags(
    caller: Who,
    limit: query.Limit = query.USUAL_ITEMS,
    offset: query.Offset = 0,
    order_by: query.OrderBy = None,
    tag_name_pattern: query.Pattern = None,
    tag_name_prefix_pattern: query.Pattern = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        tags = await listings.tags(conn, seen_tags=seen_tags(caller))
    found = [tag for tag in tags if query.fits(tag, tag_name_pattern, tag_name_prefix_pattern)]
    part = query.ordered([{"name": tag} for tag in found], order_by, {"name": "name"})[
        offset : offset + query.page_size(limit)
    ]
    return {"tags": [each["name"] for each in part], "total_entries": len(found)}


@router.get(
    "/dags/{dag_id}/dagVersions", Permission.READ_DAGS, models.DAGVersionCollectionResponse, tags=["DagVersion"]
)
async def get_dag_versions(dag_id: str, caller: Who, asked: Annotated[VersionQuery, Query()]) -> dict[str, Any]:
    """List the versions of one DAG, or of all with `~`."""
    async with caller.read() as conn:
        dag_ids = (
            await caller.visible_dag_ids(conn) if dag_id == query.EVERY else [(await caller.dag(conn, dag_id)).dag_id]
        )
        rows = await dags.versions_of(conn, dag_ids)
    found = [row for row in rows if not asked.version_number or row.number in asked.version_number]
    if asked.bundle_name not in (None, BUNDLE) or asked.bundle_version is not None:
        found = []
    keys = {"id": "version_id", "version_number": "number", "bundle_name": None, "bundle_version": None}
    part = query.ordered(found, asked.order_by, keys)[asked.offset : asked.offset + query.page_size(asked.limit)]
    documents = [version_of(row.dag, row.version_id, row.number, row.created_at) for row in part]
    return {"dag_versions": documents, "total_entries": len(found)}


@router.get(
    "/dags/{dag_id}/dagVersions/{version_number}", Permission.READ_DAGS, models.DagVersionResponse, tags=["DagVersion"]
)
async def get_dag_version(dag_id: str, version_number: Number, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await caller.dag(conn, dag_id)
        version = await _find_version(conn, row, version_number)
    return version_of(row.name, version.version_id, version.number, version.created_at)


@router.get(
    "/dagSources/{dag_id}",
    Permission.READ_DAGS,
    models.DAGSourceResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    tags=["DagSource"],
)
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


@router.get("/dagStats", Permission.READ_RUNS, models.DagStatsCollectionResponse, tags=["DagStats"])
async def get_dag_stats(caller: Who, dag_ids: query.Texts = None) -> dict[str, Any]:
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


@router.get("/dagWarnings", Permission.READ_DAGS, models.DAGWarningCollectionResponse, tags=["DagWarning"])
async def list_dag_warnings(
    caller: Who, limit: query.Limit = query.USUAL_ITEMS, offset: query.Offset = 0
) -> dict[str, Any]:
    """Always empty: problems that are warnings in Airflow prevent a DAG from being published."""
    return {"dag_warnings": [], "total_entries": 0}


@router.post("/dags/{dag_id}/unfavorite", Permission.READ_DAGS, status_code=204, name="unfavorite_dag")
@router.post("/dags/{dag_id}/favorite", Permission.READ_DAGS, status_code=204)
async def favorite_dag(dag_id: str, caller: Who) -> None:
    """Does nothing: Evertick has no favorites."""
    async with caller.read() as conn:
        await caller.dag(conn, dag_id)


async def _find_version(conn: AsyncConnection, row: DagRow, number: int) -> ListedVersion:
    found = await dags.versions(conn, dag_id=row.dag_id, limit=1, before=min(number + 1, 2**31 - 1))
    missing = f"The DagVersion with dag_id: `{row.name}` and version_number: `{number}` was not found"
    return query.first_of((each for each in found if each.number == number), missing)
