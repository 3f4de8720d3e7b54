"""`evertick schedules`: list, change, pause and delete schedules without a deploy, and show their history and skipped fires."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

import typer

from evertick.cli.commands.simulate import explain, next_fires, simulate
from evertick.cli.dag_view import published_spec, schedule_document, show_missed
from evertick.cli.options import (
    CatchUpOption,
    DagName,
    DryRun,
    ExpectVersion,
    Json,
    Limit,
    ParamOption,
    ScheduleName,
    WindowOption,
    Yes,
    ZoneOption,
    confirm,
    read_catch_up,
    read_pairs,
    seconds_of,
)
from evertick.cli.output import Cell, clock, document, hint, line, print_json, show, state, table
from evertick.client.connect import Client, open_client
from evertick.db.queries.schedules import ScheduleVersion
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.engine.fire_schedules import JsonObject, in_words, spec_json
from evertick.operations import schedules
from evertick.operations.dags import Unpause, show_dag
from evertick.operations.schedules import PutSchedule, Schedule, all_skips, list_all_schedules, schedule_etag

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, preview, change, pause and delete the schedules of DAGs."
)

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only schedules of this DAG.")]
NameFilter = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only schedules with this name.")]
Deleted = Annotated[bool, typer.Option("--deleted", help="Also deleted schedules.")]
Cron = Annotated[
    str | None, typer.Option("--cron", metavar="EXPR", help="When: '30 6 * * MON-FRI', '@daily', '@every 90s'.")
]
At = Annotated[
    list[str] | None, typer.Option("--at", metavar="TIME", help="An instant instead; repeat it for more instants.")
]
Start = Annotated[str | None, typer.Option("--start", metavar="TIME", help="No fire before this.")]
End = Annotated[str | None, typer.Option("--end", metavar="TIME", help="No fire after this.")]
Anchor = Annotated[str | None, typer.Option("--anchor", metavar="TIME", help="Start of the first interval.")]
Jitter = Annotated[
    str | None,
    typer.Option("--jitter", metavar="LENGTH", help="Deterministic jitter: delay each fire by up to this long, as 5m."),
]
Misfire = Annotated[MisfirePolicy | None, typer.Option("--misfire", help="Policy for missed fires.")]
Window = Annotated[
    str | None, typer.Option("--catchup-window", metavar="LENGTH", help="Maximum age of a missed fire that still runs.")
]
Most = Annotated[
    int | None, typer.Option("--catchup-limit", min=1, max=1000, help="Maximum number of missed fires that run.")
]
Overlap = Annotated[OverlapPolicy | None, typer.Option("--overlap", help="Policy while an earlier run is open.")]
StartWithin = Annotated[
    str | None, typer.Option("--start-within", metavar="LENGTH", help="Alert if a run has not started after this: 10m.")
]
FinishWithin = Annotated[
    str | None,
    typer.Option("--finish-within", metavar="LENGTH", help="Alert if a run has not finished after this: 2h."),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the options say about a schedule; everything else keeps its value."""

    cron: str | None
    at: Sequence[str]
    times: Mapping[str, Any]
    rules: Mapping[str, Any]
    pairs: Sequence[str]
    expected: int | None


@app.command("list", epilog="Example: evertick schedules list")
def list_command(dag: DagFilter = None, limit: Limit = 200, deleted: Deleted = False, as_json: Json = False) -> None:
    """List schedules with their state, next and last fire, and origin.

    Origin `code`: declared in the DAG's file. `by hand`: changed by a user since, so publishing does not change it.
    """
    with open_client() as client:
        found = client.pages(list_all_schedules, limit, dag=dag, with_deleted=deleted)
        now = client.now
    if as_json:
        print_json({"schedules": [{"dag": each.dag, **schedule_document(each)} for each in found]})
        return
    if not found:
        subject = f"{dag} has no schedule" if dag else "No DAG has a schedule yet"
        show(hint(f"{subject}. Add one to a DAG with @dag(schedule='@daily'), or '@every 5m', or '30 6 * * *'."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        last = relative(each.last_fired, now)
        rows.append([each.dag, each.name, _status(each), each.when, _next(each, now), last, _origin(each), each.error])
    show(table(("DAG", "NAME", "STATUS", "WHEN", "NEXT", "LAST", "FROM", "ERROR"), rows))
    if any(each.origin == "user" for each in found):
        show(
            hint(
                "By hand: publishing leaves it alone. `evertick schedules reset DAG NAME` restores the code's version."
            )
        )
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


@app.command("put", epilog="Example: evertick schedules put etl nightly --cron '30 2 * * *' --tz Europe/Berlin")
def put_command(
    dag: DagName,
    name: ScheduleName,
    cron: Cron = None,
    at: At = None,
    tz: ZoneOption = None,
    start: Start = None,
    end: End = None,
    anchor: Anchor = None,
    jitter: Jitter = None,
    param: ParamOption = None,
    misfire: Misfire = None,
    catchup_window: Window = None,
    catchup_limit: Most = None,
    overlap: Overlap = None,
    start_within: StartWithin = None,
    finish_within: FinishWithin = None,
    expect_version: ExpectVersion = None,
    as_json: Json = False,
) -> None:
    """Create or change a schedule of a DAG. Omitted options keep their values; fires that are already due still run.

    Publishing no longer changes the schedule until `evertick schedules reset` restores the code's version. If another
    user changes it at the same time, one of the two changes is refused.
    """
    if cron is not None and at:
        raise UserError("Give an expression with --cron, or instants with --at: one of the two.")
    when = {"timezone": tz, "start_at": start, "end_at": end, "anchor_at": anchor}
    rules: dict[str, Any] = {"misfire": misfire, "overlap": overlap, "catchup_limit": catchup_limit}
    rules |= {"catchup_window_seconds": seconds_of(catchup_window, "--catchup-window")}
    rules |= {"start_within_seconds": seconds_of(start_within, "--start-within") or None}
    rules |= {"finish_within_seconds": seconds_of(finish_within, "--finish-within") or None}
    wanted = _Wanted(
        cron=cron,
        at=at or (),
        times=_given({**when, "jitter_seconds": seconds_of(jitter, "--jitter")}),
        rules=_given(rules),
        pairs=param or (),
        expected=expect_version,
    )
    with open_client() as client:
        old = {each.name: each for each in client.call(schedules.list_schedules, dag=dag).items}.get(name)
        done = _put(client, dag, name, wanted, old)
        now = client.now
    if as_json:
        facts = {"schedule": done.when, "version": done.version, "next_due": done.next_due, "is_new": old is None}
        print_json({"dag": dag, "name": name, **facts})
        return
    show(line(f"Schedule {name} of {dag}: {done.when} (version {done.version})."))
    if done.next_due is None:
        show(line("It never fires: all of its instants are over.", "yellow"))
    else:
        show(hint(f"Next: {clock(done.next_due)}, {relative(done.next_due, now)}."))
    show(hint("Publishing leaves it alone from now on. See its changes with: evertick schedules history"))


@app.command("pause", epilog="Example: evertick schedules pause etl nightly")
def pause_command(
    dag: DagName, name: ScheduleName, expect_version: ExpectVersion = None, as_json: Json = False
) -> None:
    """Pause one schedule. Fires that are already due still run; later fires are recorded as skipped."""
    with open_client() as client:
        version = client.call(schedules.pause, dag=dag, name=name, if_match=_etag(expect_version)).version
    if as_json:
        print_json({"dag": dag, "name": name, "version": version, "is_paused_itself": True})
        return
    show(line(f"Schedule {name} of {dag} is paused (version {version})."))
    show(hint(f"Resume it with: evertick schedules unpause {dag} {name}"))


@app.command("unpause", epilog="Example: evertick schedules unpause etl nightly --catch-up latest --dry-run")
def unpause_command(
    dag: DagName,
    name: ScheduleName,
    catch_up: CatchUpOption = MisfirePolicy.SKIP,
    window: WindowOption = None,
    expect_version: ExpectVersion = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Resume one schedule with its next fire, or catch up if you ask. --dry-run shows what would run."""
    window_seconds = read_catch_up(catch_up, window)
    body = Unpause(catch_up=catch_up, window_seconds=window_seconds, is_preview=dry_run)
    with open_client() as client:
        done = client.call(schedules.unpause, dag=dag, name=name, body=body, if_match=_etag(expect_version))
    if as_json:
        version = None if dry_run else done.version
        print_json({"dag": dag, "name": name, "version": version, "missed": [asdict(each) for each in done.missed]})
        return
    if not dry_run:
        show(line(f"Schedule {name} of {dag} goes on (version {done.version})."))
    show_missed(done.missed, is_done=not dry_run)
    if done.is_paused and not done.is_paused_itself:
        show(hint(f"The DAG is paused as well; resume it with: evertick dags unpause {dag}"))


@app.command("delete", epilog="Example: evertick schedules delete etl nightly --yes")
def delete_command(dag: DagName, name: ScheduleName, expect_version: ExpectVersion = None, yes: Yes = False) -> None:
    """Delete one schedule. Fires that are already due still run; its runs, skipped fires and history remain."""
    with open_client() as client:
        version = client.call(schedules.show_schedule, dag=dag, name=name).record.version
        confirm(f"Delete schedule {name} of {dag} (version {version})?", yes=yes)
        client.call(schedules.delete, dag=dag, name=name, if_match=_etag(expect_version))
    show(line(f"Deleted schedule {name} of {dag}. Publishing does not bring it back."))
    show(hint(f"If the DAG's file declares it, restore it with: evertick schedules reset {dag} {name}"))


@app.command("reset", epilog="Example: evertick schedules reset etl nightly")
def reset_command(dag: DagName, name: ScheduleName) -> None:
    """Restore one schedule to the declaration in the DAG's file, unpaused; delete it if the file does not declare it."""
    with open_client() as client:
        is_declared = client.call(schedules.reset, dag=dag, name=name).is_declared
    rest = "is as the DAG's file declares it." if is_declared else "is deleted: the DAG's file does not declare it."
    show(line(f"Schedule {name} of {dag} {rest}"))


@app.command("history", epilog="Example: evertick schedules history etl nightly")
def history_command(dag: DagName, name: ScheduleName, limit: Limit = 50, as_json: Json = False) -> None:
    """List the versions of a schedule, newest first, with the user and the change; also of a deleted schedule."""
    with open_client() as client:
        count = min(limit, client.items_per_page)
        found = client.call(schedules.history, dag=dag, name=name, count=count).items
    if as_json:
        print_json({"dag": dag, "name": name, "versions": [document(each) for each in found]})
        return
    rows: list[list[Cell]] = []
    for place, each in enumerate(found):
        before = found[place + 1].settings if place + 1 < len(found) else {}
        words = in_words(_object(each.settings["spec"]))
        rows.append([each.version, clock(each.changed_at), each.changed_by, each.change, words, _changed(each, before)])
    show(table(("#VERSION", "CHANGED", "BY", "CHANGE", "WHEN", "ALSO CHANGED"), rows))


@app.command("skips", epilog="Example: evertick schedules skips etl")
def skips_command(dag: DagFilter = None, name: NameFilter = None, limit: Limit = 50, as_json: Json = False) -> None:
    """List fires without a run, newest first: the first and last instant of each range, the count, and the reason."""
    with open_client() as client:
        found = client.call(all_skips, dag=dag, name=name, count=min(limit, client.items_per_page)).items
    if as_json:
        print_json({"skips": [document(each) for each in found]})
        return
    if not found:
        show(hint("No fire was skipped."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        reason = _REASONS.get(each.reason, each.reason)
        rows.append([each.dag, each.name, clock(each.first_at), clock(each.last_at), each.count, reason])
    show(table(("DAG", "NAME", "FIRST", "LAST", "#COUNT", "WHY"), rows))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _put(client: Client, dag: str, name: str, wanted: _Wanted, old: Schedule | None) -> Schedule:
    page = client.call(show_dag, dag=dag).record
    spec = _spec(wanted, page.timezone, old)
    params = read_pairs(published_spec(client, page).params, wanted.pairs) if wanted.pairs else {}
    expected = wanted.expected if wanted.expected is not None else old.version if old else 0
    return client.call(
        schedules.change,
        dag=dag,
        name=name,
        body=PutSchedule(
            when=spec_json(spec),
            timezone=spec.timezone,
            params={**(old.params if old else {}), **params},
            **{**_rules(old), **wanted.rules},
        ),
        if_match=schedule_etag(expected),
        # Only this command has the key, so that the call can be repeated when its answer was lost.
        idempotency_key=secrets.token_hex(8),
    ).record


def _etag(version: int | None) -> str | None:
    return None if version is None else schedule_etag(version)


def _spec(wanted: _Wanted, timezone: str, old: Schedule | None) -> ScheduleSpec:
    """The requested times. Fields that are not given keep their values; a new schedule has the DAG's time zone."""
    when: str | list[str] | None = wanted.cron
    if when is None and wanted.at:
        when = f"@once {wanted.at[0]}" if len(wanted.at) == 1 else list(wanted.at)
    if old is None:
        if when is None:
            raise UserError("This schedule is new: say when, with --cron EXPR or --at TIME.")
        return parse_schedule(when, **{"timezone": timezone, **wanted.times})
    if when is None:
        return parse_schedule(old.spec | dict(wanted.times))
    kept: dict[str, Any] = {key: old.spec[key] for key in _KEPT_OF_SPEC if key in old.spec}
    return parse_schedule(when, **(kept | dict(wanted.times)))


def _rules(old: Schedule | None) -> dict[str, Any]:
    if old is None:
        return {}
    return {
        "misfire": MisfirePolicy(old.misfire),
        "overlap": OverlapPolicy(old.overlap),
        "catchup_window_seconds": old.catchup_window_seconds,
        "catchup_limit": old.catchup_limit,
        "start_within_seconds": old.start_within_seconds,
        "finish_within_seconds": old.finish_within_seconds,
    }


def _changed(version: ScheduleVersion, before: JsonObject) -> str | None:
    """The rules that differ from the version before."""
    found = [
        f"{name}={version.settings.get(name)}"
        for name in _RULES
        if before and version.settings.get(name) != before.get(name)
    ]
    return ", ".join(found) or None


def _object(raw: object) -> JsonObject:
    return raw if isinstance(raw, dict) else {}


def _origin(row: Schedule) -> str:
    return "code" if row.origin == "code" else f"by hand ({row.changed_by})"


def _status(row: Schedule) -> Cell:
    if row.deleted_at:
        return state("canceled", "deleted")
    if row.error:
        return state("broken", "error")
    return state("paused") if row.is_paused else state("success", "on")


def _next(row: Schedule, now: datetime) -> str:
    if row.is_paused or row.error or row.deleted_at:
        return "-"
    waits = "after" in row.spec
    return relative(row.next_due, now) if row.next_due else "-" if waits else "ended"
