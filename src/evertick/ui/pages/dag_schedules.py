"""A DAG's schedules: next fires, pause and unpause, and a form with a preview to change one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response
from pydantic import TypeAdapter, ValidationError

from evertick.api.context import Who
from evertick.db.queries import schedules, shards
from evertick.db.queries.schedules import ListedSchedule, SkipRecord
from evertick.domain.access import Permission
from evertick.domain.dags.validation import MAX_NAME
from evertick.domain.durations import parse_duration
from evertick.domain.errors import PreconditionFailed, UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.preview import fires_between
from evertick.domain.schedules.spec import ScheduleKind
from evertick.engine.fire_schedules import fires_of
from evertick.operations import schedules as operations
from evertick.operations.dags import DagName
from evertick.ui.layout import Form, done, page, page_router, schedule_words, segment, spec_words
from evertick.ui.pages.dag import DagView, dag_view

router = page_router()

_MOST, _FIRES, _SKIPS = 200, 5, 10
PREVIEWED = 10
_AHEAD = timedelta(days=366 * 5)
# Dependencies on other DAGs are Python objects in the DAG file and can only be changed there.
_EDITABLE = (ScheduleKind.CRON, ScheduleKind.INTERVAL, ScheduleKind.ONCE, ScheduleKind.TIMES)
_KEPT_OF_SPEC = ("start_at", "end_at", "anchor_at", "jitter_seconds")


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    row: ListedSchedule
    words: str
    fires: list[datetime]
    is_editable: bool


@router.get("/dags/{dag}/schedules", Permission.READ_SCHEDULES)
async def show_schedules(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        found = await schedules.list_all(conn, dag=dag, limit=_MOST)
        skipped: list[SkipRecord] = await schedules.skips(conn, dag=dag, limit=_SKIPS)
    lines = [
        ScheduleRow(row, schedule_words(row.spec), fires_of(row, _FIRES), row.spec.get("kind") in _EDITABLE)
        for row in found
    ]
    return page(request, "dag_schedules.html", **view.values("schedules"), lines=lines, skips=skipped)


@router.get("/dags/{dag}/schedules/edit", Permission.EDIT_SCHEDULES)
async def edit_schedule(
    dag: DagName, request: Request, caller: Who, name: Annotated[str, Query(max_length=250)] = ""
) -> Response:
    """The form: filled from an existing schedule, or empty."""
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        row = await operations.find_schedule(caller, conn, dag, name) if name else None
    timezone = view.spec.timezone if view.spec else "UTC"
    form = {"name": name, "when": "", "timezone": timezone, "misfire": "", "overlap": "", "version": "0"}
    if row is not None:
        form |= {"when": when_text(row.spec), "timezone": str(row.spec.get("timezone", "UTC"))}
        form |= {"misfire": row.misfire, "overlap": row.overlap, "version": str(row.version)}
    return _edit_page(request, view, form)


@router.post("/dags/{dag}/schedules/preview", Permission.READ_SCHEDULES)
async def preview_schedule(dag: DagName, request: Request, form: Form, caller: Who) -> Response:
    """Describe the schedule in the form and list its next fires. Saves nothing."""
    async with caller.read() as conn:
        await caller.dag(conn, dag)
        now = await shards.read_clock(conn)
    try:
        spec = operations.parsed(read_when(form.get("when", "")), {"timezone": form.get("timezone") or None})
        fires = fires_between(spec, now, now + _AHEAD, PREVIEWED)
        words = spec_words(spec)
        return page(request, "_schedule_preview.html", words=words, fires=fires, error=None)
    except UserError as error:
        return page(request, "_schedule_preview.html", words=None, fires=[], error=str(error))


@router.post("/dags/{dag}/schedules/save", Permission.EDIT_SCHEDULES)
async def save_schedule(dag: DagName, request: Request, form: Form, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
        listed = await schedules.list_all(conn, dag=dag, limit=_MOST)
    name = form.get("name", "").strip()
    try:
        if not name or len(name) > MAX_NAME:
            raise UserError(f"Invalid schedule name. Use 1 to {MAX_NAME} letters, digits, '_', '-' or '.'.")
        old = next((row for row in listed if row.name == name), None)
        version = form.get("version", "0")
        expected = int(version) if version.isdecimal() and len(version) < 10 else 0
        await operations.save(caller, dag, name, _wanted(form, old), expected=expected)
        return done(f"Schedule {name} saved.", go=f"/dags/{segment(dag)}/schedules")
    except PreconditionFailed:
        error = "Conflict: the schedule was changed in the meantime, or one with this name exists. Reload the page to see it."
    except ValidationError as fault:
        error = str(fault.errors()[0]["msg"])
    except UserError as fault:
        error = str(fault)
    kept = {name: form.get(name, "") for name in ("name", "when", "timezone", "misfire", "overlap", "version")}
    return _edit_page(request, view, kept, error=error, status=422)


@router.post("/dags/{dag}/schedules/{name}/{change}", Permission.PAUSE_SCHEDULES)
async def change_schedule(
    dag: DagName, name: operations.ScheduleName, change: Annotated[str, Path(pattern="^(pause|unpause)$")], caller: Who
) -> Response:
    await (operations.pause_schedule if change == "pause" else operations.unpause_schedule)(caller, dag=dag, name=name)
    return done(f"Schedule {name} {'paused' if change == 'pause' else 'unpaused'}.")


def when_text(spec: dict[str, Any]) -> str:
    """The text that a user would type for this schedule."""
    if spec.get("kind") == ScheduleKind.INTERVAL:
        seconds = f"{float(spec['every_seconds']):.6f}".rstrip("0").rstrip(".")
        return f"@every {seconds}s"
    if spec.get("kind") == ScheduleKind.ONCE:
        return f"@once {spec['at']}"
    if spec.get("kind") == ScheduleKind.TIMES:
        return "\n".join(map(str, spec["times"]))
    return str(spec.get("expression", ""))


def read_when(text: str) -> str | list[str]:
    """Read one expression, or a list of times with one line each."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines if len(lines) > 1 else "".join(lines)


def _wanted(form: dict[str, str], old: ListedSchedule | None) -> operations.ScheduleRequest:
    """The schedule to save. Settings without a field in the form keep their values."""
    given: dict[str, Any] = {"when": read_when(form.get("when", "")), "timezone": form.get("timezone") or None}
    given |= {name: form[name] for name in ("misfire", "overlap") if form.get(name)}
    if old is not None:
        given |= {name: old.spec.get(name) for name in _KEPT_OF_SPEC}
        if not _is_interval(form.get("when", "")):
            given.pop("anchor_at")
        given |= {"params": old.params, "catchup_limit": old.catchup_limit}
        given |= {"catchup_window_seconds": old.window_seconds}
        given |= {"start_within_seconds": old.start_within, "finish_within_seconds": old.finish_within}
    return TypeAdapter(operations.ScheduleRequest).validate_python(given)


def _is_interval(when: str) -> bool:
    try:
        return when.strip().lower().startswith("@every ") and bool(parse_duration(when.strip()[7:]))
    except ValueError:
        return False


def _edit_page(
    request: Request, view: DagView, form: dict[str, str], *, error: str | None = None, status: int = 200
) -> Response:
    values = view.values("schedules") | {"misfires": list(MisfirePolicy), "overlaps": list(OverlapPolicy)}
    return page(request, "dag_schedule_edit.html", status=status, **values, form=form, error=error)
