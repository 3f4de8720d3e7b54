"""Roll a DAG back to an earlier version, with a preview of the changes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.desk import Who
from evertick.api.discretion import told_code_changes
from evertick.api.guard import needs
from evertick.api.native.dags import DagName
from evertick.domain.access import Permission
from evertick.engine.roll_back import find_version, roll_back
from evertick.execution.version_diff import plan_changes
from evertick.services.publisher import DEPLOYED
from evertick.services.rules import load_routing
from evertick.store.wake import Channel
from evertick.ui.frame import PageRoute, done, page, segment

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
_MOST_LINES = 300


@router.get("/dags/{dag}/versions/{number}/rollback")
@needs(Permission.ROLL_BACK_DAGS)
async def preview_rollback(dag: DagName, number: Number, request: Request, caller: Who) -> Response:
    """Preview the changes as a fragment of the dialog."""
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag)
        wanted = await find_version(conn, dag, number)
        current = await find_version(conn, dag, row.number)
        plan = await plan_changes(conn, current, wanted)
        code = await told_code_changes(caller, conn, current, wanted)
    return page(
        request,
        "rollback_preview.html",
        wanted=wanted,
        current=current,
        plan=plan[:_MOST_LINES],
        code=code[:_MOST_LINES],
        is_cut=max(len(plan), len(code)) > _MOST_LINES,
        # The publisher republishes a file of a watched folder when it changes.
        file=None if row.file.startswith(DEPLOYED) else row.file,
    )


@router.post("/dags/{dag}/versions/{number}/rollback")
@needs(Permission.ROLL_BACK_DAGS)
async def roll_back_dag(dag: DagName, number: Number, caller: Who) -> Response:
    routing = load_routing(caller.desk.settings.routing_file)
    async with caller.changing(Channel.PLAN, Channel.READY) as conn:
        await caller.dag(conn, dag)
        back = await roll_back(conn, dag=dag, number=number, actor=caller.actor, routing=routing)
    return done(
        f"{dag} rolled back from version {back.before} to version {back.now}.", go=f"/dags/{segment(dag)}/versions"
    )
