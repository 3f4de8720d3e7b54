"""`evertick schedules`: list, change, pause and delete schedules without a deploy, and show their history and skipped fires."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, cast

import typer

from evertick.cli import options
from evertick.cli.app import Group
from evertick.cli.commands.simulate import explain, next_fires, simulate
from evertick.cli.dag_view import published_spec, schedule_document, show_missed
from evertick.cli.options import DagFilter, DagName, DryRun, ExpectVersion, Json, Limit, ScheduleName, Yes, duration
from evertick.cli.output import Cell, clock, document, hint, line, print_json, show, show_list, state, table
from evertick.client.connect import call, open_client, read_pages
from evertick.db.queries.schedules import ScheduleVersion, SkipRecord
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.engine.fire_schedules import JsonObject, in_words, spec_json
from evertick.operations import schedules
from evertick.operations.dags import CatchUpOptions, show_dag
from evertick.operations.paging import MOST_LISTED
from evertick.operations.schedules import Schedule, ScheduleRequest, list_all_schedules, list_skips, schedule_etag

app = Group()

NameFilter = Annotated[str | None, typer.Argument(metavar="NAME", help="Only schedules with this name.")]
Deleted = Annotated[bool, typer.Option("--deleted", help="Also deleted schedules.")]
At = Annotated[list[str] | None, typer.Option("--at", metavar="TIME", help="An instant instead; repeat for several.")]
Start = Annotated[str | None, typer.Option("--start", metavar="TIME", help="No fire before this.")]
End = Annotated[str | None, typer.Option("--end", metavar="TIME", help="No fire after this.")]
Anchor = Annotated[str | None, typer.Option("--anchor", metavar="TIME", help="Start of the first interval.")]
Jitter = Annotated[float | None, duration("--jitter", "Fixed delay of up to this duration, as 5m.")]
Misfire = Annotated[MisfirePolicy | None, typer.Option("--misfire", help="Policy for missed fires.")]
Window = Annotated[float | None, duration("--catchup-window", "Maximum age of a missed fire that still runs.")]
Most = Annotated[
    int | None, typer.Option("--catchup-limit", min=1, max=1000, help="Maximum number of missed fires that run.")
]
Overlap = Annotated[OverlapPolicy | None, typer.Option("--overlap", help="Policy while an earlier run is open.")]
StartWithin = Annotated[
    float | None, duration("--start-within", "Alert if a run has not started within this time, as 10m.")
]
FinishWithin = Annotated[
    float | None, duration("--finish-within", "Alert if a run has not finished within this time, as 2h.")
]
_KEPT_OF_SPEC = ("timezone", "start_at", "end_at", "jitter_seconds")
_RULES = ("misfire", "window_seconds", "catchup_limit", "overlap", "start_within", "finish_within", "params")
_REASONS = {
    "misfire_latest": "missed; only the latest ran",
    "misfire_skip": "missed; the policy is skip",
    "outside_window": "missed for longer than the catch-up window",
    "over_limit": "missed; more than the catch-up limit",
    "paused": "paused",
    "set_aside": "could not be planned",
    "past_when_published": "over before the schedule was known",
    "overlap_skip": "the run before was still open",
    "overlap_queue_one": "one run was waiting already",
    "overlap_cancel": "a later fire was due as well",
}


@app.command("list", epilog="Example: evertick schedules list")
def list_command(dag: DagFilter = None, limit: Limit = 200, deleted: Deleted = False, as_json: Json = False) -> None:
    """List schedules with their state, next and last fire, and origin.

    Source `code`: declared in the DAG file. `edited`: changed by a user since, so the DAG file no longer controls it.
    """
    found, now = read_pages(list_all_schedules, limit, dag=dag, with_deleted=deleted)
    if as_json:
        return print_json({"schedules": [{"dag": each.dag, **schedule_document(each)} for each in found]})
    if not found:
        subject = f"{dag} has no schedule" if dag else "No DAG has a schedule yet"
        show(hint(f"{subject}. Add one to a DAG with @dag(schedule='@daily'), or '@every 5m', or '30 6 * * *'."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        last = relative(each.last_fired, now)
        rows.append([each.dag, each.name, _status(each), each.when, _next(each, now), last, _origin(each), each.error])
    show(table(("DAG", "NAME", "STATUS", "WHEN", "NEXT", "LAST", "SOURCE", "ERROR"), rows))
    if any(each.origin == "user" for each in found):
        show(hint("Edited schedules ignore the DAG file. Restore one with: evertick schedules reset DAG NAME"))
    if len(found) == limit:
        show(hint(f"The first {limit:,} schedules; see more with --limit"))


app.command("next", epilog="Example: evertick schedules next --cron '30 6 * * MON-FRI' --tz Europe/Berlin -n 3")(
    next_fires
)
app.command("explain", epilog="Example: evertick schedules explain --cron '30 2 * * *' --tz Europe/Berlin")(explain)
app.command(
    "simulate",
    epilog="Example: evertick schedules simulate --cron '30 2 * * *' --tz Europe/Berlin --from 2025-01-01 --to 2025-12-31",
)(simulate)


@app.command("set", epilog="Example: evertick schedules set etl nightly --cron '30 2 * * *' --tz Europe/Berlin")
def set_command(
    dag: DagName,
    name: ScheduleName,
    cron: options.CronOption = None,
    at: At = None,
    tz: options.ZoneOption = None,
    start: Start = None,
    end: End = None,
    anchor: Anchor = None,
    jitter: Jitter = None,
    param: options.ParamOption = None,
    misfire: Misfire = None,
    catchup_window: Window = None,
    catchup_limit: Most = None,
    overlap: Overlap = None,
    start_within: StartWithin = None,
    finish_within: FinishWithin = None,
    expect_version: ExpectVersion = None,
    as_json: Json = False,
) -> None:
    """Create or change a schedule of a DAG. Options not given are unchanged; fires that are already due still run.

    The DAG file no longer controls the schedule until `evertick schedules reset` restores it. If another
    user changes it at the same time, one of the two changes is refused.
    """
    if cron is not None and at:
        raise UserError("Give an expression with --cron, or instants with --at: one of the two.")
    times = _given(timezone=tz, start_at=start, end_at=end, anchor_at=anchor, jitter_seconds=jitter)
    rules = _given(
        misfire=misfire,
        overlap=overlap,
        catchup_limit=catchup_limit,
        catchup_window_seconds=catchup_window,
        start_within_seconds=start_within or None,
        finish_within_seconds=finish_within or None,
    )
    with open_client() as client:
        old = {each.name: each for each in client.pages(schedules.list_schedules, MOST_LISTED, dag=dag)}.get(name)
        page = client.call(show_dag, dag=dag).record
        spec = _spec(cron, at or [], times, page.timezone, old)
        params = old.params if old else {}
        if param:
            params = {**params, **options.read_pairs(published_spec(client, page).params, param)}
        body = ScheduleRequest(when=spec_json(spec), timezone=spec.timezone, params=params, **{**_rules(old), **rules})
        expected = expect_version if expect_version is not None else old.version if old else 0
        # Only this command has the key, so that the call can be repeated when its answer was lost.
        key, etag = secrets.token_hex(8), schedule_etag(expected)
        done = client.call(
            schedules.put_schedule, dag=dag, name=name, body=body, if_match=etag, idempotency_key=key
        ).record
        now = client.now
    _show_set(dag, done, now, is_new=old is None, as_json=as_json)


def _show_set(dag: str, done: Schedule, now: datetime, *, is_new: bool, as_json: bool) -> None:
    if as_json:
        facts = {"schedule": done.when, "version": done.version, "next_due": done.next_due, "is_new": is_new}
        return print_json({"dag": dag, "name": done.name, **facts})
    show(line(f"Schedule {done.name} of {dag}: {done.when} (version {done.version})."))
    if done.next_due is None:
        show(line("It never fires: all of its instants are over.", "yellow"))
    else:
        show(hint(f"Next: {clock(done.next_due)}, {relative(done.next_due, now)}."))
    show(hint("The DAG file no longer controls this schedule. Show its changes with: evertick schedules history"))


@app.command("pause", epilog="Example: evertick schedules pause etl nightly")
def pause_command(
    dag: DagName, name: ScheduleName, expect_version: ExpectVersion = None, as_json: Json = False
) -> None:
    """Pause one schedule. Fires that are already due still run; later fires are recorded as skipped."""
    version = call(schedules.pause_schedule, dag=dag, name=name, if_match=_etag(expect_version)).version
    if as_json:
        return print_json({"dag": dag, "name": name, "version": version, "is_paused_directly": True})
    show(line(f"Schedule {name} of {dag} is paused (version {version})."))
    show(hint(f"Resume it with: evertick schedules unpause {dag} {name}"))


@app.command("unpause", epilog="Example: evertick schedules unpause etl nightly --catch-up latest --dry-run")
def unpause_command(
    dag: DagName,
    name: ScheduleName,
    catch_up: options.CatchUpOption = None,
    window: options.WindowOption = None,
    expect_version: ExpectVersion = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Resume one schedule with its next fire, or catch up if asked. --dry-run shows the runs."""
    options.check_catch_up(catch_up, window)
    body = CatchUpOptions(catch_up=catch_up, window_seconds=window, is_preview=dry_run)
    done = call(schedules.unpause_schedule, dag=dag, name=name, body=body, if_match=_etag(expect_version))
    if as_json:
        version = None if dry_run else done.version
        return print_json(
            {"dag": dag, "name": name, "version": version, "missed": [asdict(each) for each in done.missed]}
        )
    if not dry_run:
        show(line(f"Schedule {name} of {dag} resumed (version {done.version})."))
    show_missed(done.missed, is_done=not dry_run)
    if done.is_paused and not done.is_paused_directly:
        show(hint(f"The DAG is paused as well; resume it with: evertick dags unpause {dag}"))


@app.command("delete", epilog="Example: evertick schedules delete etl nightly --yes")
def delete_command(dag: DagName, name: ScheduleName, expect_version: ExpectVersion = None, yes: Yes = False) -> None:
    """Delete one schedule. Fires that are already due still run; its runs, skipped fires and history remain."""
    with open_client() as client:
        version = client.call(schedules.show_schedule, dag=dag, name=name).record.version
        options.confirm(f"Delete schedule {name} of {dag} (version {version})?", yes=yes)
        client.call(schedules.delete_schedule, dag=dag, name=name, if_match=_etag(expect_version))
    show(line(f"Deleted schedule {name} of {dag}. Publishing does not bring it back."))
    show(hint(f"If the DAG's file declares it, restore it with: evertick schedules reset {dag} {name}"))


@app.command("reset", epilog="Example: evertick schedules reset etl nightly")
def reset_command(dag: DagName, name: ScheduleName) -> None:
    """Restore the schedule from the DAG file, unpaused; delete it if the file does not declare it."""
    is_declared = call(schedules.reset_schedule, dag=dag, name=name).is_declared
    rest = "is as the DAG's file declares it." if is_declared else "is deleted: the DAG's file does not declare it."
    show(line(f"Schedule {name} of {dag} {rest}"))


@app.command("history", epilog="Example: evertick schedules history etl nightly")
def history_command(dag: DagName, name: ScheduleName, limit: Limit = 50, as_json: Json = False) -> None:
    """List the versions of a schedule, newest first, with the user and the change; also of a deleted schedule."""
    with open_client() as client:
        found = client.pages(schedules.list_schedule_versions, limit, dag=dag, name=name)
    if as_json:
        return print_json({"dag": dag, "name": name, "versions": [document(each) for each in found]})
    rows: list[list[Cell]] = []
    for place, each in enumerate(found):
        before = found[place + 1].settings if place + 1 < len(found) else {}
        words = in_words(cast(JsonObject, each.settings["spec"]))
        rows.append([each.version, clock(each.changed_at), each.changed_by, each.change, words, _changed(each, before)])
    show(table(("#VERSION", "CHANGED", "BY", "CHANGE", "WHEN", "ALSO CHANGED"), rows))


@app.command("skips", epilog="Example: evertick schedules skips etl")
def skips_command(dag: DagFilter = None, name: NameFilter = None, limit: Limit = 50, as_json: Json = False) -> None:
    """List fires without a run, newest first: the first and last instant of each range, the count, and the reason."""
    with open_client() as client:
        found = client.pages(list_skips, limit, dag=dag, name=name)

    def cells(each: SkipRecord) -> list[Cell]:
        reason = _REASONS.get(each.reason, each.reason)
        return [each.dag, each.name, clock(each.first_at), clock(each.last_at), each.count, reason]

    columns = ("DAG", "NAME", "FIRST", "LAST", "#COUNT", "REASON")
    show_list("skips", found, columns, cells, as_json=as_json, empty="No fire was skipped.")


def _given(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _etag(version: int | None) -> str | None:
    return None if version is None else schedule_etag(version)


def _spec(cron: str | None, at: list[str], times: dict[str, Any], timezone: str, old: Schedule | None) -> ScheduleSpec:
    """The requested times. Fields that are not given keep their values; a new schedule has the DAG's time zone."""
    when: str | list[str] | None = cron
    if at:
        when = f"@once {at[0]}" if len(at) == 1 else at
    if old is None:
        if when is None:
            raise UserError("This schedule is new: give its times with --cron EXPR or --at TIME.")
        return parse_schedule(when, **{"timezone": timezone, **times})
    if when is None:
        return parse_schedule(old.spec | times)
    kept = {key: old.spec[key] for key in _KEPT_OF_SPEC if key in old.spec}
    return parse_schedule(when, **(kept | times))


def _rules(old: Schedule | None) -> dict[str, Any]:
    if old is None:
        return {}
    limits = ("catchup_window_seconds", "catchup_limit", "start_within_seconds", "finish_within_seconds")
    policies = {"misfire": MisfirePolicy(old.misfire), "overlap": OverlapPolicy(old.overlap)}
    return {**policies, **{each: getattr(old, each) for each in limits}}


def _changed(version: ScheduleVersion, before: JsonObject) -> str | None:
    """The rules that differ from the version before."""
    now = version.settings
    found = [f"{name}={now.get(name)}" for name in _RULES if before and now.get(name) != before.get(name)]
    return ", ".join(found) or None


def _origin(row: Schedule) -> str:
    return "code" if row.origin == "code" else f"edited ({row.changed_by})"


def _status(row: Schedule) -> Cell:
    if row.deleted_at:
        return state("canceled", "deleted")
    if row.error:
        return state("broken", "error")
    return state("paused") if row.is_paused else state("success", "on")


def _next(row: Schedule, now: datetime) -> str:
    if row.is_paused or row.error or row.deleted_at:
        return "-"
    waits = "after" in row.spec or "event" in row.spec
    return relative(row.next_due, now) if row.next_due else "-" if waits else "ended"
