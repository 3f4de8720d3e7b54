"""`evertick backfills`: create runs for a past date range, and show, pause, unpause and cancel backfills."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from evertick.cli import options, output
from evertick.cli.app import Group
from evertick.cli.dag_view import zone_of
from evertick.cli.options import DagFilter, DagName, DryRun, Json, Limit, noun, number, read_moment
from evertick.cli.output import Cell, clock, hint, iso, line, print_json, show, show_list, state, table
from evertick.client.connect import Client, call, open_client
from evertick.domain.durations import length, relative, took
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import never_was
from evertick.domain.schedules.preview import Reprocess
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.domain.schedules.time_zones import find_zone
from evertick.engine.fire_schedules import read_spec, spec_json
from evertick.operations import backfills
from evertick.operations.backfills import Backfill, BackfillDetails, BackfillPreview, CancelBackfillRequest, NewBackfill
from evertick.operations.schedules import list_all_schedules

app = Group()

BackfillNumber = Annotated[int, number("backfill", 999_999_999)]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="The first instant: 2025-03-30, 2025-03-30T02:30, …Z.")
]
PartitionsOption = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="KEY", help="A partition instead of a range; repeat it for several."),
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="The last instant; a day means all of it. Now if left out.")
]
ScheduleOption = Annotated[
    str | None, typer.Option("--schedule", metavar="NAME", help="The schedule to use, if the DAG has several.")
]
ReprocessOption = Annotated[
    Reprocess,
    typer.Option("--reprocess", help="Which scheduled times with a run get another run.", case_sensitive=False),
]
NewestFirst = Annotated[bool, typer.Option("--newest-first", help="From the end of the range to its start.")]
Parallel = Annotated[int, typer.Option("--parallel", metavar="N", help="Maximum number of open runs.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show its progress until it ends.")]
BackfillParams = Annotated[
    str | None, typer.Option("--params", metavar="JSON", help="Parameters of its runs as one JSON object.")
]
BackfillKey = Annotated[
    str | None, typer.Option("--key", help="Idempotency key: the same key never starts a second backfill.")
]
LeaveRuns = Annotated[bool, typer.Option("--leave-runs", help="Keep the runs that it has created.")]
_MOST_SCHEDULES = 1000
_STYLES = {"running": "running", "paused": "paused", "done": "success", "canceled": "canceled", "failed": "failed"}
_ENDED = ("done", "failed", "canceled")
_BAR_WIDTH = 20


@app.command("create", epilog="Example: evertick backfills create etl --from 2025-03-01 --to 2025-03-31 --parallel 4")
def create_command(
    dag: DagName,
    since: FromOption = None,
    until: ToOption = None,
    partition: PartitionsOption = None,
    schedule: ScheduleOption = None,
    cron: options.CronOption = None,
    every: options.EveryOption = None,
    tz: options.ZoneOption = None,
    reprocess: ReprocessOption = Reprocess.NONE,
    newest_first: NewestFirst = False,
    parallel: Parallel = 1,
    params: BackfillParams = None,
    key: BackfillKey = None,
    dry_run: DryRun = False,
    follow_it: Follow = False,
    as_json: Json = False,
) -> None:
    """Create runs for a past date range, or for partitions: for those without a run, a few at a time, after the DAG's schedule."""
    if (since is None) != bool(partition):
        raise UserError("Give a range that begins with --from, or partitions with --partition.")
    spec = _expression(schedule, cron, every, tz)
    with open_client() as client:
        zone = spec.timezone if spec is not None else zone_of(client, dag, schedule)
        body = NewBackfill(
            dag=dag,
            first=None if since is None else read_moment("--from", since, zone),
            last=None if until is None else read_moment("--to", until, zone, is_end=True),
            schedule=schedule,
            when=None if spec is None else spec_json(spec),
            reprocess=reprocess,
            newest_first=newest_first,
            parallel=parallel,
            params=None if params is None else options.read_object(params),
            partitions=list(partition or ()),
            is_preview=dry_run,
        )
        if dry_run:
            preview = client.call(backfills.create_backfill, body=body)
            return print_json(_preview_document(preview, body)) if as_json else _show_preview(preview, body)
        made = client.call_by_key(backfills.create_backfill, key, body=body)
        if as_json:
            is_new = made.is_new or key is None
            return print_json({"backfill": made.backfill_id, "is_new": is_new, **_preview_document(made, body)})
        assert made.backfill_id is not None, "only a preview has no number"
        if key is not None and not made.is_new:
            show(line(f"Backfill {made.backfill_id} of {dag} has this key already."))
        else:
            show(line(f"Started backfill {made.backfill_id} of {dag}: {noun(made.total, 'scheduled time')}."))
        if follow_it:
            _follow(client, made.backfill_id)
    show(hint(f"Follow it with: evertick backfills show {made.backfill_id} --follow"))


@app.command("list", epilog="Example: evertick backfills list etl")
def list_command(dag: DagFilter = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List backfills with their progress, newest first."""
    with open_client() as client:
        found = client.pages(backfills.list_backfills, limit, dag=dag)
        if dag is not None and not found:
            # An unknown DAG is an error with a suggestion.
            client.pages(list_all_schedules, 1, dag=dag)
        now = client.now

    def cells(row: Backfill) -> list[Cell]:
        span = f"{row.first_at:%Y-%m-%d %H:%M} – {row.last_at:%Y-%m-%d %H:%M}"
        created = relative(row.created_at, now)
        return [row.backfill_id, row.dag, _state(row), _progress(row), row.failed, span, created]

    columns = ("#ID", "DAG", "STATE", "PROGRESS", "#FAILED", "RANGE (UTC)", "CREATED")
    empty = "No backfill yet. Create one with: evertick backfills create DAG --from 2025-03-01 --to 2025-03-31"
    show_list("backfills", found, columns, cells, as_json=as_json, empty=empty, to_json=_document)


@app.command("show", epilog="Example: evertick backfills show 3 --follow")
def show_command(number: BackfillNumber, follow_it: Follow = False, as_json: Json = False) -> None:
    """Show one backfill: its range, its progress, and the estimated time left."""
    with open_client() as client:
        if follow_it and not as_json:
            _follow(client, number)
        found = client.call(backfills.show_backfill, backfill_id=number)
        now = client.now
    if as_json:
        return print_json({**_document(found), "failed_runs": [each.run_id for each in found.failed_runs]})
    _show_page(found, now)


@app.command("pause", epilog="Example: evertick backfills pause 3")
def pause_command(number: BackfillNumber) -> None:
    """Pause a backfill: it creates no more runs. Its open runs continue."""
    dag = call(backfills.pause_backfill, backfill_id=number).dag
    show(line(f"Paused backfill {number} of {dag}."), hint(f"Resume it with: evertick backfills unpause {number}"))


@app.command("unpause", epilog="Example: evertick backfills unpause 3")
def unpause_command(number: BackfillNumber) -> None:
    """Resume a paused backfill."""
    dag = call(backfills.unpause_backfill, backfill_id=number).dag
    show(line(f"Resumed backfill {number} of {dag}."))


@app.command("cancel", epilog="Example: evertick backfills cancel 3 --leave-runs")
def cancel_command(number: BackfillNumber, leave_runs: LeaveRuns = False) -> None:
    """Cancel a backfill and its open runs: it creates no more runs."""
    with open_client() as client:
        body = CancelBackfillRequest(leaves_runs=leave_runs)
        count = client.call(backfills.cancel_backfill, backfill_id=number, body=body).canceled_runs
    result = "Its open runs continue." if leave_runs else f"Canceled {noun(count, 'run')} of it."
    show(line(f"Canceled backfill {number}. {result}"))


def _expression(schedule: str | None, cron: str | None, every: str | None, tz: str | None) -> ScheduleSpec | None:
    if len([each for each in (schedule, cron, every) if each is not None]) > 1:
        raise UserError("--schedule, --cron and --every each select the instants: give one of them.")
    if cron is None and every is None:
        if tz is not None:
            raise UserError("--tz goes with --cron and --every: a DAG's schedules have their own time zones.")
        return None
    return parse_schedule(cron if cron is not None else f"@every {every}", timezone=tz)


def _document(row: Backfill) -> dict[str, object]:
    return output.document(row, without=("is_dag_paused",))


def _preview_document(found: BackfillPreview, wanted: NewBackfill) -> dict[str, object]:
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


def _show_preview(found: BackfillPreview, wanted: NewBackfill) -> None:
    """The runs that a backfill would create."""
    spec, runs = read_spec(found.spec), found.new_runs
    created = "a run to create for each without one" if runs is None else f"{noun(runs, 'run')} to create"
    show(line(f"{noun(found.total, 'scheduled time')}, {created}.", "bold"), hint(found.when))
    if found.existing:
        kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(found.existing.items()))
        show(hint(f"Scheduled times with a run: {kinds}. --reprocess selects which of them run again."))
    if lost := never_was(spec, found.first_at, found.last_at):
        gap = f"On the clock of {spec.timezone}, {noun(lost.count, 'time')} does not exist"
        show(hint(f"{gap}: no run is created for it."))
    order = "newest first" if wanted.newest_first else "oldest first"
    if spec.timezone == "UTC":
        sample = table(("UTC",), [[iso(instant)] for instant in found.sample])
    else:
        sample = table((spec.timezone, "UTC"), [[_local(spec, instant), iso(instant)] for instant in found.sample])
    if found.sample:
        show(output.heading(f"The first of them, {order}"), sample)
    if (more := (found.total if runs is None else runs) - len(found.sample)) > 0:
        show(hint(f"and {more:,} more"))
    show(hint("Dry run: nothing was created."))


def _show_page(row: BackfillDetails, now: datetime) -> None:
    failed, left = row.failed_runs, row.remaining_seconds
    order = "newest first" if row.newest_first else "oldest first"
    values: dict[str, Cell] = {
        "Backfill": line(f"{row.backfill_id} of {row.dag}", "bold"),
        "State": _state(row),
        "Waits": "its DAG is paused" if row.is_dag_paused and row.state == "running" else None,
        "Reason": row.reason,
        "When": row.when + (f" (schedule {row.schedule})" if row.schedule else ""),
        "Range": f"{clock(row.first_at)} to {clock(row.last_at)}, {order}",
        "Reprocess": row.reprocess,
        "Parallel": row.parallel,
        "Progress": _progress(row),
        "Runs": f"{row.made:,} created: {row.open_runs:,} open, {row.succeeded:,} succeeded, {row.failed:,} failed,"
        f" {row.canceled:,} canceled",
        "Skipped": f"{noun(row.left_alone, 'scheduled time')} without a new run" if row.left_alone else None,
        "Remaining": f"about {length(left)}" if left is not None else None,
        "Took": took(row.created_at, row.finished_at, now),
        "Created": f"{clock(row.created_at)} by {row.created_by}",
    }
    show(output.facts(values))
    if failed:
        numbers = ", ".join(str(each.run_id) for each in failed)
        show(hint(f"Failed runs: {numbers}. Show one with: evertick runs show {failed[0].run_id}"))


def _follow(client: Client, backfill_id: int) -> None:
    """A progress bar until the backfill ends; a line for each change where there is no terminal."""
    # Imported late: the other commands show no progress.
    from rich.progress import BarColumn, Progress, TextColumn

    out = output.console()
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
            row = client.call(backfills.show_backfill, backfill_id=backfill_id)
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
