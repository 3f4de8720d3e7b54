"""One DAG: the grid of its newest runs, graph, calendar, durations, versions, code, and roll back."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Path, Query, Request, Response
from psycopg import AsyncConnection

from evertick.api.auth import requires
from evertick.api.context import ApiCaller, Who
from evertick.bundles.bundle import contents
from evertick.db.notify import Channel
from evertick.db.queries import dags, overview, shards
from evertick.db.queries.dags import DagRow, GridRun, ListedVersion, NewestRun
from evertick.domain.access import Permission
from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import InvalidDag, NotFound
from evertick.engine.publish import find_version, roll_back
from evertick.operations.dags import WITHHELD, DagName, may_read_code, spec_of, visible_code_changes
from evertick.operations.paging import LARGEST
from evertick.operations.version_diff import plan_changes
from evertick.publisher.publisher import DEPLOYED
from evertick.publisher.routing_file import load_routing
from evertick.ui.charts.calendar import DAYS_SHOWN, durations_of, year_of
from evertick.ui.charts.graph import graph_of
from evertick.ui.charts.grid import lines_of
from evertick.ui.layout import PageRoute, done, page, schedule_words, segment
from evertick.ui.pages.dags import bars_of

# Key, label and path below the DAG's address of each view, in display order.
TABS = (
    ("grid", "Grid", ""),
    ("graph", "Graph", "/graph"),
    ("calendar", "Calendar", "/calendar"),
    ("durations", "Durations", "/durations"),
    ("schedules", "Schedules", "/schedules"),
    ("versions", "Versions", "/versions"),
    ("code", "Code", "/code"),
    ("details", "Details", "/details"),
)


class DagView:
    """A DAG that the caller may see. `spec` is None if the published document cannot be read."""

    def __init__(self, row: DagRow, spec: DagSpec | None, head: dict[str, Any]) -> None:
        self.row, self.spec, self._head = row, spec, head

    def values(self, tab: str) -> dict[str, Any]:
        """The template values of dag_base.html for one view."""
        path = f"/dags/{segment(self.row.name)}"
        tabs = [(key, label, path + rest) for key, label, rest in TABS]
        return {**self._head, "here": "dags", "dag": self.row, "spec": self.spec, "tabs": tabs, "tab": tab}


async def dag_view(caller: ApiCaller, conn: AsyncConnection, name: str) -> DagView:
    row = await caller.dag(conn, name)
    (fire, *_) = [*await dags.next_fires(conn, dag_ids=[row.dag_id]), None]
    try:
        spec = spec_of(row)
    except InvalidDag:
        spec = None
    head = {
        "dag_path": f"/dags/{segment(row.name)}",
        "next_fire": fire,
        "next_words": schedule_words(fire.spec) if fire else None,
        "may_trigger": caller.principal.may(Permission.TRIGGER_RUNS),
        "may_pause": caller.principal.may(Permission.PAUSE_DAGS),
    }
    return DagView(row, spec, head)


router = APIRouter(route_class=PageRoute, include_in_schema=False)


RUNS = 24


# A large DAG shows fewer runs and not all tasks, to keep the page readable.
_MOST_CELLS, _MOST_LINES = 20_000, 400


_MOST_DIFF_LINES = 2000


_MOST_CODE_BYTES = 200_000


_VERSIONS = 50


@router.get("/dags/{dag}")
@requires(Permission.READ_RUNS)
async def show_grid(
    dag: DagName,
    request: Request,
    caller: Who,
    before: Annotated[int, Query(ge=1, le=LARGEST)] = LARGEST,
    task: Annotated[str, Query(max_length=250)] = "",
) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        tasks = view.spec.tasks if view.spec else ()
        runs = await dags.grid(conn, dag_id=view.row.dag_id, before=before, limit=RUNS + 1)
        shown = _readable(runs)
        run_ids = [each.run_id for each in shown]
        cells = await dags.cells(conn, run_ids=run_ids, limit=_MOST_CELLS * 2)
        has_retries = view.spec is not None and bool(view.spec.groups)
        retried = await dags.group_retries(conn, run_ids=run_ids) if has_retries else {}
    found = [each for each in tasks if task.lower() in each.name.lower()]
    if task or len(found) > _MOST_LINES:
        # If all tasks are shown, include tasks that only older versions have.
        names = {each.name for each in found[:_MOST_LINES]}
        cells = [each for each in cells if each.task in names]
    shown.reverse()
    lines = lines_of(found[:_MOST_LINES], shown, cells, retried)
    bars = bars_of(
        [NewestRun(0, r.run_id, r.state, r.created_at, r.fire_at, r.started_at, r.finished_at) for r in shown]
    )
    return page(
        request,
        "dag_grid.html",
        **view.values("grid"),
        bars=list(zip(shown, bars, strict=True)),
        lines=lines,
        task=task,
        hidden=max(len(found) - _MOST_LINES, 0),
        has_groups=any(line.is_group for line in lines),
        has_retries=bool(retried),
        older=shown[0].run_id if len(runs) > len(shown) else None,
        is_newest=before == LARGEST,
        task_count=len(tasks),
    )


@router.get("/dags/{dag}/versions")
@requires(Permission.READ_DAGS)
async def show_versions(
    dag: DagName,
    request: Request,
    caller: Who,
    old: Annotated[int | None, Query(alias="from", ge=1, le=2**31 - 1)] = None,
    new: Annotated[int | None, Query(alias="to", ge=1, le=2**31 - 1)] = None,
) -> Response:
    """List the newest versions and show the changes between two of them, by default the last change."""
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        listed = await dags.versions(conn, dag_id=view.row.dag_id, limit=_VERSIONS)
        after = _numbered(listed, new if new is not None else view.row.number, dag)
        before = _numbered(listed, old, dag) if old is not None else _before(listed, after)
        plan = await plan_changes(conn, before, after) if before else []
        code = await visible_code_changes(caller, conn, before, after) if before else []
    return page(
        request,
        "dag_versions.html",
        **view.values("versions"),
        versions=listed,
        before=before,
        after=after,
        plan=plan[:_MOST_DIFF_LINES],
        code=code[:_MOST_DIFF_LINES],
        is_cut=max(len(plan), len(code)) > _MOST_DIFF_LINES,
    )


@router.get("/dags/{dag}/code")
@requires(Permission.READ_DAGS)
async def show_code(
    dag: DagName, request: Request, caller: Who, file: Annotated[str, Query(max_length=1000)] = ""
) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        version = await dags.version(conn, view.row.version_id) if view.row.version_id else None
        is_withheld = version is not None and not await may_read_code(caller, conn, version.bundle_hash)
        bundle = await dags.bundle(conn, version.bundle_hash) if version and not is_withheld else None
    files = contents(bundle.archive, version.bundle_hash) if bundle and bundle.archive and version else {}
    chosen = file or (version.file if version else "")
    if file and file not in files:
        raise NotFound(f"The code of DAG {dag} has no file {file[:200]!r}.")
    raw = files.get(chosen, b"")
    is_text = b"\0" not in raw[:_MOST_CODE_BYTES]
    return page(
        request,
        "dag_code.html",
        **view.values("code"),
        files=sorted(files),
        file=chosen,
        text=raw[:_MOST_CODE_BYTES].decode(errors="replace") if is_text else None,
        size=len(raw),
        is_cut=len(raw) > _MOST_CODE_BYTES,
        absence=WITHHELD if is_withheld else "The code of this version is not stored.",
    )


@router.get("/dags/{dag}/details")
@requires(Permission.READ_DAGS)
async def show_details(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        queues = await dags.queues(conn, view.row.version_id)
    tasks = view.spec.tasks[:_MOST_LINES] if view.spec else ()
    routed = [(task, queues[place] if place < len(queues) else "") for place, task in enumerate(tasks)]
    return page(request, "dag_details.html", **view.values("details"), tasks=routed)


def _readable(runs: list[GridRun]) -> list[GridRun]:
    """The newest runs, as many as fit the limit on tasks and instances; at least one."""
    totals = accumulate(run.task_count for run in runs[:RUNS])
    count = sum(total <= _MOST_CELLS for total in totals)
    return runs[: max(count, 1)]


def _numbered(listed: list[ListedVersion], number: int | None, dag: str) -> ListedVersion:
    for each in listed:
        if each.number == number:
            return each
    raise NotFound(f"DAG {dag} has no version {number} among its newest {_VERSIONS}.")


def _before(listed: list[ListedVersion], after: ListedVersion) -> ListedVersion | None:
    return next((each for each in listed if each.number < after.number), None)


# Charts cover the newest runs only: older runs of a busy DAG are not counted.
NEWEST_COUNTED, NEWEST_DRAWN = 20_000, 100


@router.get("/dags/{dag}/graph")
@requires(Permission.READ_DAGS)
async def show_graph(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        version_id = view.row.version_id
        drawn = await graph_of(conn, version_id=version_id) if version_id is not None else None
    return page(request, "dag_graph.html", **view.values("graph"), graph=drawn)


@router.get("/dags/{dag}/calendar")
@requires(Permission.READ_RUNS)
async def show_calendar(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        zone = view.spec.timezone if view.spec else "UTC"
        now = await shards.read_clock(conn)
        since = now - timedelta(days=DAYS_SHOWN)
        counts = await overview.runs_by_hour(
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
@requires(Permission.READ_RUNS)
async def show_durations(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        found = await overview.durations(conn, dag_id=view.row.dag_id, newest=NEWEST_DRAWN)
        now = await shards.read_clock(conn)
    return page(request, "dag_durations.html", **view.values("durations"), chart=durations_of(found, now=now))


Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


_MOST_ROLLBACK_LINES = 300


@router.get("/dags/{dag}/versions/{number}/rollback")
@requires(Permission.ROLL_BACK_DAGS)
async def preview_rollback(dag: DagName, number: Number, request: Request, caller: Who) -> Response:
    """Preview the changes as a fragment of the dialog."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        wanted = await find_version(conn, dag, number)
        current = await find_version(conn, dag, row.number)
        plan = await plan_changes(conn, current, wanted)
        code = await visible_code_changes(caller, conn, current, wanted)
    return page(
        request,
        "rollback_preview.html",
        wanted=wanted,
        current=current,
        plan=plan[:_MOST_ROLLBACK_LINES],
        code=code[:_MOST_ROLLBACK_LINES],
        is_cut=max(len(plan), len(code)) > _MOST_ROLLBACK_LINES,
        # The publisher republishes a file of a watched folder when it changes.
        file=None if row.file.startswith(DEPLOYED) else row.file,
    )


@router.post("/dags/{dag}/versions/{number}/rollback")
@requires(Permission.ROLL_BACK_DAGS)
async def roll_back_dag(dag: DagName, number: Number, caller: Who) -> Response:
    routing = load_routing(caller.desk.settings.routing_file)
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        await caller.dag(conn, dag)
        back = await roll_back(conn, dag=dag, number=number, actor=caller.actor, routing=routing)
    return done(
        f"{dag} rolled back from version {back.before} to version {back.now}.", go=f"/dags/{segment(dag)}/versions"
    )
