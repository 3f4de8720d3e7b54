"""One DAG: the grid of its newest runs, graph, calendar, durations, versions, code, roll back, and trigger.

The form to trigger a run has one field per parameter, with errors next to the fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from fastapi import Path, Query, Request, Response
from psycopg import AsyncConnection

from evertick.api.context import ApiCaller, Who
from evertick.bundles.bundle import contents
from evertick.db.queries import dags, overview, schedules, shards
from evertick.db.queries.dags import DagRow, GridRun, ListedVersion
from evertick.domain.access import Permission
from evertick.domain.dags.params import JsonValue, ParamSpec, ParamType, check_params, parse_param
from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import InvalidDag, InvalidParams, NotFound, UserError
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.engine.publish import find_version
from evertick.operations import dags as operations
from evertick.operations.monitoring import figures
from evertick.operations.paging import LARGEST, MOST_ITEMS
from evertick.operations.runs import find_run
from evertick.ui.charts.calendar import DAYS_SHOWN, durations_of, year_of
from evertick.ui.charts.graph import graph_of
from evertick.ui.charts.grid import axis_of, lines_of
from evertick.ui.layout import Form, code_lines, done, page, page_router, read_moment, schedule_words, segment, zone_of
from evertick.ui.pages.dags import bars_of

# The views, in display order. Each is at its name below the DAG's address, the first one at that address.
TABS = ("grid", "graph", "calendar", "durations", "schedules", "versions", "code", "details")


class DagView:
    """A DAG that the caller may see. `spec` is None if the published document cannot be read."""

    def __init__(self, row: DagRow, spec: DagSpec | None, head: dict[str, Any]) -> None:
        self.row, self.spec, self._head = row, spec, head

    def values(self, tab: str) -> dict[str, Any]:
        """The template values of dag_base.html for one view."""
        path = f"/dags/{segment(self.row.name)}"
        tabs = [(key, key.capitalize(), f"{path}/{key}" if key != TABS[0] else path) for key in TABS]
        return {**self._head, "here": "dags", "dag": self.row, "spec": self.spec, "tabs": tabs, "tab": tab}


async def dag_view(caller: ApiCaller, conn: AsyncConnection, name: str) -> DagView:
    row = await caller.dag(conn, name)
    (fire, *_) = [*await dags.next_fires(conn, dag_ids=[row.dag_id]), None]
    try:
        spec = operations.spec_of(row)
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


router = page_router()


RUNS = 36


# A large DAG shows fewer runs and not all tasks, to keep the page readable.
_MOST_CELLS, _MOST_LINES = 20_000, 400


_MOST_DIFF_LINES = 2000


_MOST_CODE_BYTES = 200_000


_VERSIONS, _MOST_SCHEDULES = 50, 200


@router.get("/dags/{dag}", Permission.READ_RUNS)
async def show_grid(
    dag: operations.DagName,
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
    return page(
        request,
        "dag_grid.html",
        **view.values("grid"),
        bars=list(zip(shown, bars_of(shown), strict=True)),
        axis=axis_of([each.fire_at or each.created_at for each in shown], zone_of(request)),
        lines=lines,
        task=task,
        hidden=max(len(found) - _MOST_LINES, 0),
        has_groups=any(line.is_group for line in lines),
        has_retries=bool(retried),
        older=shown[0].run_id if len(runs) > len(shown) else None,
        is_newest=before == LARGEST,
        task_count=len(tasks),
    )


@router.get("/dags/{dag}/versions", Permission.READ_DAGS)
async def show_versions(
    dag: operations.DagName,
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
        changes = await _changes(caller, conn, before, after, most=_MOST_DIFF_LINES)
    return page(
        request, "dag_versions.html", **view.values("versions"), versions=listed, before=before, after=after, **changes
    )


@router.get("/dags/{dag}/code", Permission.READ_DAGS)
async def show_code(
    dag: operations.DagName, request: Request, caller: Who, file: Annotated[str, Query(max_length=1000)] = ""
) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        version = await dags.version(conn, view.row.version_id) if view.row.version_id else None
        is_withheld = version is not None and not await operations.may_read_code(caller, conn, version.bundle_hash)
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
        lines=code_lines(chosen, raw[:_MOST_CODE_BYTES].decode(errors="replace")) if is_text else None,
        size=len(raw),
        is_cut=len(raw) > _MOST_CODE_BYTES,
        absence=operations.WITHHELD if is_withheld else "The code of this version is not stored.",
    )


@router.get("/dags/{dag}/details", Permission.READ_DAGS)
async def show_details(dag: operations.DagName, request: Request, caller: Who) -> Response:
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


async def _changes(
    caller: ApiCaller, conn: AsyncConnection, before: ListedVersion | None, after: ListedVersion, *, most: int
) -> dict[str, Any]:
    """The changes of the plan and of the code as template values: none without a version before."""
    plan = await operations.plan_changes(conn, before, after) if before else []
    code = await operations.visible_code_changes(caller, conn, before, after) if before else []
    return {"plan": plan[:most], "code": code[:most], "is_cut": max(len(plan), len(code)) > most}


def _numbered(listed: list[ListedVersion], number: int | None, dag: str) -> ListedVersion:
    for each in listed:
        if each.number == number:
            return each
    raise NotFound(f"DAG {dag} has no version {number} among its newest {_VERSIONS}.")


def _before(listed: list[ListedVersion], after: ListedVersion) -> ListedVersion | None:
    return next((each for each in listed if each.number < after.number), None)


# Charts cover the newest runs only: older runs of a busy DAG are not counted.
NEWEST_COUNTED, NEWEST_DRAWN = 20_000, 100


@router.get("/dags/{dag}/graph", Permission.READ_DAGS)
async def show_graph(dag: operations.DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        version_id = view.row.version_id
        drawn = await graph_of(conn, version_id=version_id) if version_id is not None else None
    return page(request, "dag_graph.html", **view.values("graph"), graph=drawn)


@router.get("/dags/{dag}/calendar", Permission.READ_RUNS)
async def show_calendar(dag: operations.DagName, request: Request, caller: Who) -> Response:
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


@router.get("/dags/{dag}/durations", Permission.READ_RUNS)
async def show_durations(
    dag: operations.DagName, request: Request, caller: Who, task: Annotated[str, Query(max_length=1000)] = ""
) -> Response:
    """The durations of the newest runs, or of one task in them."""
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        dag_id, newest = view.row.dag_id, NEWEST_DRAWN
        if task:
            found = await overview.task_durations(conn, dag_id=dag_id, task=task.replace("\x00", ""), newest=newest)
        else:
            found = await overview.durations(conn, dag_id=dag_id, newest=newest)
        now = await shards.read_clock(conn)
    counted = await figures.show_figures(caller, dag=dag, limit=MOST_ITEMS)
    chart = durations_of(found, now=now)
    axis = axis_of([each.run.due_at for each in chart.columns], zone_of(request), every=len(chart.columns) // 8 + 3)
    return page(
        request,
        "dag_durations.html",
        **view.values("durations"),
        chart=chart,
        axis=axis,
        task=task,
        figures=counted.items,
    )


Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


_MOST_ROLLBACK_LINES = 300


@router.get("/dags/{dag}/versions/{number}/rollback", Permission.ROLL_BACK_DAGS)
async def preview_rollback(dag: operations.DagName, number: Number, request: Request, caller: Who) -> Response:
    """Preview the changes as a fragment of the dialog."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        wanted = await find_version(conn, dag, number)
        current = await find_version(conn, dag, row.number)
        changes = await _changes(caller, conn, current, wanted, most=_MOST_ROLLBACK_LINES)
    return page(
        request,
        "rollback_preview.html",
        wanted=wanted,
        current=current,
        **changes,
        # Its deployment publishes it again when the file changes.
        file=row.file,
        deployment=row.deployment,
    )


@router.post("/dags/{dag}/versions/{number}/rollback", Permission.ROLL_BACK_DAGS)
async def roll_back_dag(dag: operations.DagName, number: Number, caller: Who) -> Response:
    back = await operations.roll_back_dag(caller, dag=dag, body=operations.RollbackRequest(number=number))
    return done(
        f"{dag} rolled back from version {back.before} to version {back.now}.", go=f"/dags/{segment(dag)}/versions"
    )


# The prefix keeps parameter names apart from other fields of the form.
PREFIX = "p."


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter as a form field: `text` is its content, `options` are its choices (JSON value and label)."""

    spec: ParamSpec
    text: str
    options: list[tuple[str, str]]
    error: str | None = None

    @property
    def kind(self) -> str:
        if self.options:
            return "choice"
        if self.spec.type is ParamType.BOOLEAN:
            return "check"
        if self.spec.type in (ParamType.INTEGER, ParamType.NUMBER):
            return "number"
        return "text" if self.spec.type is ParamType.STRING else "json"


@router.get("/dags/{dag}/trigger", Permission.TRIGGER_RUNS)
async def show_form(
    dag: operations.DagName, request: Request, caller: Who, like: Annotated[int | None, Query(ge=1, le=LARGEST)] = None
) -> Response:
    """The form has the defaults, or the parameters of the run `like`."""
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        run = await find_run(caller, conn, like) if like is not None else None
        zone = only_zone(await zones_of(conn, dag))
    params = view.spec.params if view.spec else ()
    given = run.params if run is not None and run.dag == dag else {}
    fields = empty_fields(params, given)
    return page(request, "trigger.html", **view.values("trigger"), fields=fields, zone=zone, date="", error=None)


@router.post("/dags/{dag}/trigger", Permission.TRIGGER_RUNS)
async def start_run(dag: operations.DagName, request: Request, form: Form, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        zone = only_zone(await zones_of(conn, dag))
    fields, params = read_fields(view.spec.params if view.spec else (), form)
    date, error = form.get("date", "").strip(), None
    if not any(field.error for field in fields):
        try:
            fire_at = read_moment(date, "Date of the run", zone) if date else None
            wanted = operations.TriggerRequest(params=params, fire_at=fire_at)
            made = await operations.trigger_run(caller, dag=dag, body=wanted)
            return done(f"Run {made.run_id} of {dag} created.", go=f"/runs/{made.run_id}")
        except UserError as refused:
            error = str(refused)
    known = {"fields": fields, "zone": zone, "date": date, "error": error}
    return page(request, "trigger.html", status=422, **view.values("trigger"), **known)


async def zones_of(conn: AsyncConnection, dag: str) -> dict[str, str]:
    """The time zone of each schedule of a DAG that can be planned."""
    zones = {}
    for each in await schedules.list_all(conn, dag=dag, limit=_MOST_SCHEDULES):
        with suppress(*UNPLANNABLE):
            zones[each.name] = read_spec(each.spec).timezone
    return zones


def only_zone(zones: Mapping[str, str]) -> str:
    """The zone of times in forms: that of the only schedule."""
    return next(iter(zones.values())) if len(zones) == 1 else "UTC"


def empty_fields(declared: Sequence[ParamSpec], given: Mapping[str, Any] | None = None) -> list[Field]:
    """The fields filled with the given values, otherwise with the defaults."""
    values: dict[str, Any] = {spec.name: None if spec.required else spec.default for spec in declared}
    values |= given or {}
    return [Field(spec, _shown(spec, values[spec.name]), _options(spec)) for spec in declared]


def read_fields(declared: Iterable[ParamSpec], form: dict[str, str]) -> tuple[list[Field], dict[str, JsonValue]]:
    """Check each parameter separately, so that each error is next to its field. An empty field means the default."""
    fields, params = [], {}
    for spec in declared:
        text = form.get(PREFIX + spec.name, "")
        problem = None
        try:
            if (value := _read(spec, text)) is not _NOTHING:
                params[spec.name] = value
            check_params([spec], {spec.name: params[spec.name]} if spec.name in params else {})
        except InvalidParams as error:
            problem = str(error)
        fields.append(Field(spec, text, _options(spec), problem))
    return fields, params  # type: ignore[return-value]


_NOTHING = object()


def _read(spec: ParamSpec, text: str) -> object:
    """Parse a field. Browsers do not send an unchecked checkbox, so a missing one means false; other empty fields are unset."""
    if spec.choices is not None:
        return _NOTHING if not text else _chosen(spec, text)
    if spec.type is ParamType.BOOLEAN:
        return text in ("true", "on")
    if not text.strip():
        may_be_empty = spec.type is ParamType.STRING and not spec.required and spec.default not in (None, "")
        return "" if may_be_empty else _NOTHING
    return parse_param([spec], spec.name, text if spec.type is ParamType.STRING else text.strip())


def _chosen(spec: ParamSpec, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidParams(f"param {spec.name!r} must be {spec.allowed}.") from None


def _options(spec: ParamSpec) -> list[tuple[str, str]]:
    return [(json.dumps(each), each if isinstance(each, str) else json.dumps(each)) for each in spec.choices or ()]


def _shown(spec: ParamSpec, value: JsonValue) -> str:
    if spec.choices is not None:
        return "" if value is None and spec.required else json.dumps(value)
    if spec.type is ParamType.BOOLEAN:
        return "true" if value else ""
    if value is None:
        return ""
    return value if isinstance(value, str) and spec.type is ParamType.STRING else json.dumps(value, ensure_ascii=False)
