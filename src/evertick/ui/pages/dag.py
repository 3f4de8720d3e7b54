"""One DAG: the grid of its newest runs, its versions with their changes, its code and its details."""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from evertick.api.desk import Who
from evertick.api.discretion import WITHHELD, may_read_code, told_code_changes
from evertick.api.guard import needs
from evertick.api.native.dags import DagName
from evertick.api.paging import LARGEST
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.execution.bundle import contents
from evertick.execution.version_diff import plan_changes
from evertick.store import catalogue, dags
from evertick.store.catalogue import GridRun, NewestRun
from evertick.store.dags import ListedVersion
from evertick.ui.dag_frame import dag_view
from evertick.ui.frame import PageRoute, page
from evertick.ui.grid import lines_of
from evertick.ui.pages.dags import bars_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)

RUNS = 24
# A large DAG shows fewer runs and not all tasks, to keep the page readable.
_MOST_CELLS, _MOST_LINES = 20_000, 400
_MOST_DIFF_LINES = 2000
_MOST_CODE_BYTES = 200_000
_VERSIONS = 50


@router.get("/dags/{dag}")
@needs(Permission.READ_RUNS)
async def show_grid(
    dag: DagName,
    request: Request,
    caller: Who,
    before: Annotated[int, Query(ge=1, le=LARGEST)] = LARGEST,
    task: Annotated[str, Query(max_length=250)] = "",
) -> Response:
    async with caller.reading() as conn:
        view = await dag_view(caller, conn, dag)
        tasks = view.spec.tasks if view.spec else ()
        runs = await catalogue.grid(conn, dag_id=view.row.dag_id, before=before, limit=RUNS + 1)
        shown = _readable(runs)
        run_ids = [each.run_id for each in shown]
        cells = await catalogue.cells(conn, run_ids=run_ids, limit=_MOST_CELLS * 2)
        has_retries = view.spec is not None and bool(view.spec.groups)
        retried = await catalogue.group_retries(conn, run_ids=run_ids) if has_retries else {}
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
@needs(Permission.READ_DAGS)
async def show_versions(
    dag: DagName,
    request: Request,
    caller: Who,
    old: Annotated[int | None, Query(alias="from", ge=1, le=2**31 - 1)] = None,
    new: Annotated[int | None, Query(alias="to", ge=1, le=2**31 - 1)] = None,
) -> Response:
    """List the newest versions and show the changes between two of them, by default the last change."""
    async with caller.reading() as conn:
        view = await dag_view(caller, conn, dag)
        listed = await dags.versions(conn, dag_id=view.row.dag_id, limit=_VERSIONS)
        after = _numbered(listed, new if new is not None else view.row.number, dag)
        before = _numbered(listed, old, dag) if old is not None else _before(listed, after)
        plan = await plan_changes(conn, before, after) if before else []
        code = await told_code_changes(caller, conn, before, after) if before else []
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
@needs(Permission.READ_DAGS)
async def show_code(
    dag: DagName, request: Request, caller: Who, file: Annotated[str, Query(max_length=1000)] = ""
) -> Response:
    async with caller.reading() as conn:
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
@needs(Permission.READ_DAGS)
async def show_details(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.reading() as conn:
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
