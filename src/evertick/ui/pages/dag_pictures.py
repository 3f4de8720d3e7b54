"""Charts of one DAG: its graph, a calendar of its runs and their durations."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.native.dags import DagName
from evertick.domain.access import Permission
from evertick.store import charts, shards
from evertick.ui.calendar import DAYS_SHOWN, durations_of, year_of
from evertick.ui.dag_frame import dag_view
from evertick.ui.frame import PageRoute, page
from evertick.ui.graph import graph_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# Charts cover the newest runs only: older runs of a busy DAG are not counted.
NEWEST_COUNTED, NEWEST_DRAWN = 20_000, 100


@router.get("/dags/{dag}/graph")
@needs(Permission.READ_DAGS)
async def show_graph(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.reading() as conn:
        view = await dag_view(caller, conn, dag)
        version_id = view.row.version_id
        drawn = await graph_of(conn, version_id=version_id) if version_id is not None else None
    return page(request, "dag_graph.html", **view.values("graph"), graph=drawn)


@router.get("/dags/{dag}/calendar")
@needs(Permission.READ_RUNS)
async def show_calendar(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.reading() as conn:
        view = await dag_view(caller, conn, dag)
        zone = view.spec.timezone if view.spec else "UTC"
        now = await shards.read_clock(conn)
        since = now - timedelta(days=DAYS_SHOWN)
        counts = await charts.runs_by_hour(
            conn, dag_id=view.row.dag_id, since=since, timezone=zone, newest=NEWEST_COUNTED
        )
    there = ZoneInfo(zone)
    local = [replace(each, hour=each.hour.astimezone(there)) for each in counts]
    year = year_of(local, today=now.astimezone(there).date())
    is_cut = sum(each.runs for each in counts) >= NEWEST_COUNTED
    return page(
        request,
        "dag_calendar.html",
        **view.values("calendar"),
        year=year,
        zone=zone,
        is_cut=is_cut,
        most=NEWEST_COUNTED,
    )


@router.get("/dags/{dag}/durations")
@needs(Permission.READ_RUNS)
async def show_durations(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.reading() as conn:
        view = await dag_view(caller, conn, dag)
        found = await charts.durations(conn, dag_id=view.row.dag_id, newest=NEWEST_DRAWN)
        now = await shards.read_clock(conn)
    return page(request, "dag_durations.html", **view.values("durations"), chart=durations_of(found, now=now))
