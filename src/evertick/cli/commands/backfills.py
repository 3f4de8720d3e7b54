"""`evertick backfill`: create runs for a past range of a DAG's schedule, and show, pause, resume and cancel backfills."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn

from evertick.cli.options import (
    CronOption,
    DagName,
    DryRun,
    EveryOption,
    Json,
    KeyOption,
    Limit,
    ParamsOption,
    ZoneOption,
    noun,
    read_moment,
    read_object,
)
from evertick.cli.output import (
    Cell,
    clock,
    console,
    document,
    facts,
    heading,
    hint,
    iso,
    line,
    print_json,
    show,
    state,
    table,
)
from evertick.client.connect import Client, open_client
from evertick.domain.durations import length, relative, took
from evertick.domain.errors import NotFound, OutcomeUnknown, UserError
from evertick.domain.schedules.misfire import never_was
from evertick.domain.schedules.preview import Reprocess
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.domain.schedules.time_zones import find_zone
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec, spec_json
from evertick.operations.backfills import (
    Backfill,
    BackfillPage,
    CancelBackfill,
    Foreseen,
    NewBackfill,
    cancel_backfill,
    create_backfill,
    list_backfills,
    pause_backfill,
    resume_backfill,
    show_backfill,
)
from evertick.operations.schedules import list_all_schedules

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Create runs for a past range of a schedule, and follow them."
)

BackfillNumber = Annotated[
    str, typer.Argument(metavar="BACKFILL", help="The backfill's number, as `evertick backfill list` shows it.")
]
DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only backfills of this DAG.")]
FromOption = Annotated[
    str, typer.Option("--from", metavar="TIME", help="The first instant: 2025-03-30, 2025-03-30T02:30, …Z.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="The last instant; a day means all of it. Now if left out.")
]
ScheduleOption = Annotated[
    str | None, typer.Option("--schedule", metavar="NAME", help="The schedule to use, if the DAG has several.")
]
ReprocessOption = Annotated[
    Reprocess,
    typer.Option("--reprocess", help="Which instants with a run get another run.", case_sensitive=False),
]
NewestFirst = Annotated[bool, typer.Option("--newest-first", help="From the end of the range to its start.")]
Parallel = Annotated[
    int, typer.Option("--parallel", metavar="N", help="Maximum number of its runs that are open at the same time.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show its progress until it ends.")]
LeaveRuns = Annotated[bool, typer.Option("--leave-runs", help="Keep the runs that it has created.")]
_MOST_SCHEDULES = 1000
_STYLES = {"running": "running", "paused": "paused", "done": "success", "canceled": "canceled", "failed": "failed"}
_ENDED = ("done", "failed", "canceled")
_BAR_WIDTH = 20


@app.command("create", epilog="Example: evertick backfill create etl --from 2025-03-01 --to 2025-03-31 --parallel 4")
def create_command(
    dag: DagName,
    since: FromOption,
    until: ToOption = None,
    schedule: ScheduleOption = None,
    cron: CronOption = None,
    every: EveryOption = None,
    tz: ZoneOption = None,
    reprocess: ReprocessOption = Reprocess.NONE,
    newest_first: NewestFirst = False,
    parallel: Parallel = 1,
    params: ParamsOption = None,
    key: KeyOption = None,
    dry_run: DryRun = False,
    follow_it: Follow = False,
    as_json: Json = False,
) -> None:
    """Create runs for the instants of a range that have none, a few at a time and after the DAG's own schedule."""
    spec = _expression(schedule, cron, every, tz)
    with open_client() as client:
        zone = spec.timezone if spec is not None else _zone_of(client, dag, schedule)
        body = NewBackfill(
            dag=dag,
            first=read_moment("--from", since, zone),
            last=None if until is None else read_moment("--to", until, zone, is_end=True),
            schedule=schedule,
            when=None if spec is None else spec_json(spec),
            reprocess=reprocess,
            newest_first=newest_first,
            parallel=parallel,
            params=None if params is None else read_object(params),
            is_preview=dry_run,
        )
        if dry_run:
            preview = client.call(create_backfill, body=body)
            if as_json:
                print_json(_preview_document(preview, body))
            else:
                _show_preview(preview, body)
            return
        own_key = key or f"cli-{secrets.token_hex(8)}"
        try:
            made = client.call(create_backfill, body=body, idempotency_key=own_key)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error} It is safe to repeat it with: --key {own_key}") from None
        if as_json:
            is_new = made.is_new or key is None
            print_json({"backfill": made.backfill_id, "is_new": is_new, **_preview_document(made, body)})
            return
        assert made.backfill_id is not None, "only a preview has no number"
        if key is not None and not made.is_new:
            show(line(f"Backfill {made.backfill_id} of {dag} has this key already."))
        else:
            show(line(f"Started backfill {made.backfill_id} of {dag}: {noun(made.total, 'instant')}."))
        if follow_it:
            _follow(client, made.backfill_id)
    show(hint(f"Follow it with: evertick backfill show {made.backfill_id} --follow"))


@app.command("list", epilog="Example: evertick backfill list etl")
def list_command(dag: DagFilter = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List backfills with their progress, newest first."""
    with open_client() as client:
        found = client.pages(list_backfills, limit, dag=dag)
        if dag is not None and not found:
            # An unknown DAG is an error with a suggestion.
            client.pages(list_all_schedules, 1, dag=dag)
        now = client.now
    if as_json:
        print_json({"backfills": [_document(each) for each in found]})
    elif found:
        _show_table(found, now)
    else:
        show(hint("No backfill yet. Create one with: evertick backfill create DAG --from 2025-03-01 --to 2025-03-31"))


@app.command("show", epilog="Example: evertick backfill show 3 --follow")
def show_command(number: BackfillNumber, follow_it: Follow = False, as_json: Json = False) -> None:
    """Show one backfill: its range, its progress, and the estimated time left."""
    backfill_id = _number(number)
    with open_client() as client:
        if follow_it and not as_json:
            _follow(client, backfill_id)
        found = client.call(show_backfill, backfill_id=backfill_id)
        now = client.now
    if as_json:
        print_json({**_document(found), "failed_runs": [each.run_id for each in found.failed_runs]})
        return
    _show_page(found, now)


@app.command("pause", epilog="Example: evertick backfill pause 3")
def pause_command(number: BackfillNumber) -> None:
    """Pause a backfill: it creates no more runs. Its open runs continue."""
    backfill_id = _number(number)
    with open_client() as client:
        dag = client.call(pause_backfill, backfill_id=backfill_id).dag
    show(line(f"Paused backfill {backfill_id} of {dag}."))
    show(hint(f"Resume it with: evertick backfill resume {backfill_id}"))


@app.command("resume", epilog="Example: evertick backfill resume 3")
def resume_command(number: BackfillNumber) -> None:
    """Resume a paused backfill."""
    backfill_id = _number(number)
    with open_client() as client:
        dag = client.call(resume_backfill, backfill_id=backfill_id).dag
    show(line(f"Backfill {backfill_id} of {dag} goes on."))


@app.command("cancel", epilog="Example: evertick backfill cancel 3 --leave-runs")
def cancel_command(number: BackfillNumber, leave_runs: LeaveRuns = False) -> None:
    """Cancel a backfill and its open runs: it creates no more runs."""
    backfill_id = _number(number)
    with open_client() as client:
        body = CancelBackfill(leaves_runs=leave_runs)
        count = client.call(cancel_backfill, backfill_id=backfill_id, body=body).canceled_runs
    result = "Its open runs continue." if leave_runs else f"Canceled {noun(count, 'run')} of it."
    show(line(f"Canceled backfill {backfill_id}. {result}"))


def _expression(schedule: str | None, cron: str | None, every: str | None, tz: str | None) -> ScheduleSpec | None:
    if len([each for each in (schedule, cron, every) if each is not None]) > 1:
        raise UserError("--schedule, --cron and --every each select the instants: give one of them.")
    if cron is None and every is None:
        if tz is not None:
            raise UserError("--tz goes with --cron and --every: a DAG's schedules have their own time zones.")
        return None
    return parse_schedule(cron if cron is not None else f"@every {every}", timezone=tz)


def _zone_of(client: Client, dag: str, schedule: str | None) -> str:
    """The time zone of the schedule, for times without an offset. Creating the backfill reports errors in its name."""
    for each in client.pages(list_all_schedules, _MOST_SCHEDULES, dag=dag):
        if schedule in (None, each.name):
            try:
                return read_spec(each.spec).timezone
            except UNPLANNABLE:
                break
    return "UTC"


def _number(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise UserError(f"{text!r} is not a backfill's number. List backfills with `evertick backfill list`.")
    if len(text) > 9:
        raise NotFound(f"There is no backfill {text[:40]}. List backfills with `evertick backfill list`.")
    return int(text)


def _document(row: Backfill) -> dict[str, object]:
    return document(row, without=("is_dag_paused",))


def _preview_document(found: Foreseen, wanted: NewBackfill) -> dict[str, object]:
    return {
        "dag": wanted.dag,
        "schedule": found.schedule,
        "when": found.when,
        "first_at": found.first_at,
        "last_at": found.last_at,
        "count": found.total,
        "existing": found.existing,
        "new_runs": found.new_runs,
        "reprocess": wanted.reprocess,
        "sample": found.sample,
    }


def _show_preview(found: Foreseen, wanted: NewBackfill) -> None:
    """The runs that a backfill would create."""
    spec, runs = read_spec(found.spec), found.new_runs
    made = "a run for each instant without one" if runs is None else noun(runs, "run")
    show(line(f"{noun(found.total, 'instant')}: {made} would be created.", "bold"), hint(found.when))
    if found.existing:
        kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(found.existing.items()))
        show(hint(f"Instants that have a run: {kinds}. --reprocess selects which of them run again."))
    if lost := never_was(spec, found.first_at, found.last_at):
        show(
            hint(
                f"On the clock of {spec.timezone}, {noun(lost.count, 'time')} does not exist: no run is created for it."
            )
        )
    order = "newest first" if wanted.newest_first else "oldest first"
    if spec.timezone == "UTC":
        sample = table(("UTC",), [[iso(instant)] for instant in found.sample])
    else:
        sample = table((spec.timezone, "UTC"), [[_local(spec, instant), iso(instant)] for instant in found.sample])
    show(heading(f"The first of them, {order}"), sample)
    if found.total > len(found.sample):
        show(hint(f"and {found.total - len(found.sample):,} more"))
    show(hint("Nothing was created. Leave --dry-run out to create it."))


def _show_table(rows: Sequence[Backfill], now: datetime) -> None:
    cells: list[list[Cell]] = []
    for row in rows:
        span = f"{row.first_at:%Y-%m-%d %H:%M} – {row.last_at:%Y-%m-%d %H:%M}"
        made = relative(row.created_at, now)
        cells.append([str(row.backfill_id), row.dag, _state(row), _progress(row), str(row.failed), span, made])
    show(table(("#ID", "DAG", "STATE", "PROGRESS", "#FAILED", "RANGE (UTC)", "MADE"), cells))


def _show_page(row: BackfillPage, now: datetime) -> None:
    failed, left = row.failed_runs, row.remaining_seconds
    order = "newest first" if row.newest_first else "oldest first"
    values: dict[str, Cell] = {
        "Backfill": line(f"{row.backfill_id} of {row.dag}", "bold"),
        "State": _state(row),
        "Waits": "its DAG is paused" if row.is_dag_paused and row.state == "running" else None,
        "Reason": row.reason,
        "When": row.when + (f" (schedule {row.schedule})" if row.schedule else ""),
        "Range": f"{iso(row.first_at)} to {iso(row.last_at)}, {order}",
        "Runs again": row.reprocess,
        "At once": f"at most {noun(row.parallel, 'run')}",
        "Progress": _progress(row),
        "Runs": f"{row.made:,} made: {row.open_runs:,} open, {row.succeeded:,} succeeded, {row.failed:,} failed,"
        f" {row.canceled:,} canceled",
        "Left alone": f"{noun(row.left_alone, 'instant')} that needed no run" if row.left_alone else None,
        "Still needs": f"about {length(left)}" if left is not None else None,
        "Took": took(row.created_at, row.finished_at, now),
        "Made": f"{clock(row.created_at)} by {row.created_by}",
    }
    show(facts(values))
    if failed:
        numbers = ", ".join(str(each.run_id) for each in failed)
        show(hint(f"Runs that failed: {numbers}. Look at one with: evertick runs show {failed[0].run_id}"))


def _follow(client: Client, backfill_id: int) -> None:
    """A progress bar until the backfill ends; a line for each change where there is no terminal."""
    out = console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[rest]}"),
    )
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task(f"backfill {backfill_id}", total=1, rest="")
        last = ""

        def is_over() -> bool:
            nonlocal last
            row = client.call(show_backfill, backfill_id=backfill_id)
            left = row.remaining_seconds
            rest = f"{row.done:,} of {row.total:,}, {row.open_runs:,} open, {row.failed:,} failed"
            rest += f", about {length(left)} left" if left is not None else ""
            bar.update(task, total=row.total, completed=row.done, rest=rest)
            tenth = f"{row.state} {10 * row.done // row.total}"
            if not out.is_terminal and tenth != last:
                show(line(f"{row.state}: {rest}"))
            last = tenth
            return row.state in _ENDED and row.open_runs == 0

        client.poll(is_over)


def _progress(row: Backfill) -> str:
    share = row.done / row.total
    full = int(share * _BAR_WIDTH)
    return f"{'█' * full}{'░' * (_BAR_WIDTH - full)} {int(share * 100)} % ({row.done:,} of {row.total:,})"


def _state(row: Backfill) -> Cell:
    return state(_STYLES[row.state], row.state)


def _local(spec: ScheduleSpec, instant: datetime) -> str:
    return instant.astimezone(find_zone(spec.timezone)).isoformat(sep=" ", timespec="seconds")
