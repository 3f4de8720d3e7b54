"""Versions of a DAG: which there are, what changed between two of them, and back to an earlier one."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.discretion import visible_code_changes
from evertick.api.native.dags import DagName
from evertick.api.paging import USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.db.queries.dags import ListedVersion
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.engine.publish import RolledBack, find_version, roll_back
from evertick.operations.version_diff import plan_changes
from evertick.publisher.routing_file import load_routing

router = APIRouter(route_class=GuardedRoute, tags=["versions"])

_NEWEST_VERSION = 2**31 - 1
Number = Annotated[int | None, Query(ge=1, le=_NEWEST_VERSION)]


class Version(BaseModel):
    number: int
    hash: str
    bundle: str
    task_count: int
    created_at: datetime
    is_current: bool


class VersionPage(BaseModel):
    number: int
    spec: dict[str, Any]


class VersionDiff(BaseModel):
    """Lines of a unified diff. `plan` has the tasks by their names, `code` the files of the bundle."""

    old: Version
    new: Version
    plan: list[str]
    code: list[str]


class RollBack(BaseModel):
    """`number`: a version's; the one before the current if left out."""

    model_config = ConfigDict(extra="forbid")
    number: Annotated[int, Field(ge=1, le=_NEWEST_VERSION)] | None = None


@router.get("/dags/{dag}/versions")
@requires(Permission.READ_DAGS)
async def list_versions(
    dag: DagName, caller: Who, limit: Limit = USUAL_ITEMS, cursor_text: Cursor = None
) -> Page[Version]:
    """Newest first."""
    (before,) = read_cursor(cursor_text, _NEWEST_VERSION)
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag)
        found = await dags.versions(conn, dag_id=row.dag_id, before=min(before, _NEWEST_VERSION), limit=limit)
    next_cursor = cursor(found[-1].number) if len(found) == limit else None
    return Page(items=[_version(each) for each in found], next_cursor=next_cursor)


@router.get("/dags/{dag}/versions/{number}")
@requires(Permission.READ_DAGS)
async def show_version(dag: DagName, number: Annotated[int, Path(ge=1, le=2**31 - 1)], caller: Who) -> VersionPage:
    """What was published, as it was."""
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag)
        spec = await dags.version_number(conn, dag_id=row.dag_id, number=number)
    if spec is None:
        raise NotFound(f"DAG {dag} has no version {number}.")
    return VersionPage(number=number, spec=spec)


@router.get("/dags/{dag}/diff")
@requires(Permission.READ_DAGS)
async def diff_versions(dag: DagName, caller: Who, old: Number = None, new: Number = None) -> VersionDiff:
    """What changed from `old` (the one before the current) to `new` (the current)."""
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag)
        before = await find_version(conn, dag, old)
        after = await find_version(conn, dag, new if new is not None else row.number)
        plan = await plan_changes(conn, before, after)
        code = await visible_code_changes(caller, conn, before, after)
    return VersionDiff(old=_version(before), new=_version(after), plan=plan, code=code)


@router.post("/dags/{dag}/rollback")
@requires(Permission.ROLL_BACK_DAGS)
async def roll_back_dag(dag: DagName, caller: Who, wanted: RollBack | None = None) -> RolledBack:
    """Make an earlier version the current one again: plan, code and schedules. Open runs keep theirs."""
    number = wanted.number if wanted else None
    routing = load_routing(caller.desk.settings.routing_file)
    async with caller.changing(Channel.PLAN, Channel.READY) as conn:
        await caller.dag(conn, dag)
        return await roll_back(conn, dag=dag, number=number, actor=caller.actor, routing=routing)


def _version(row: ListedVersion) -> Version:
    return Version(
        number=row.number,
        hash=row.hash,
        bundle=row.bundle_hash,
        task_count=row.task_count,
        created_at=row.created_at,
        is_current=row.is_current,
    )
