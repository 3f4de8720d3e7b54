"""`evertick checkins`: jobs that run elsewhere, and whether they have reported in time."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.cli.app import Group
from evertick.cli.options import Json, Limit, Yes, confirm
from evertick.cli.output import Cell, line, print_json, show, show_list, state
from evertick.client.connect import call, read_pages
from evertick.db.queries.monitoring.checkins import Checkin
from evertick.domain.durations import parse_duration, relative
from evertick.domain.errors import UserError
from evertick.engine.fire_schedules import in_words
from evertick.operations.monitoring import checkins
from evertick.operations.monitoring.checkins import CheckinReport, CheckinRequest

app = Group("Check-ins: jobs that run elsewhere report that they ran; a report that does not arrive is an alert.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the check-in.")]
Schedule = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="When a report is expected: '0 6 * * *', '@hourly', '@every 10m'.")
]
Grace = Annotated[str, typer.Option("--grace", metavar="DURATION", help="How long a report may be late (default 5m).")]
Zone = Annotated[str, typer.Option("--timezone", metavar="ZONE", help="The time zone of the schedule (default UTC).")]
Message = Annotated[str | None, typer.Option("--message", metavar="TEXT", help="What to show with the report.")]
Failed = Annotated[bool, typer.Option("--failed", help="The job ran, and failed.")]


@app.command("list", epilog="Example: evertick checkins list")
def list_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List check-ins: when each is expected next, and which are late."""
    found, now = read_pages(checkins.list_checkins, limit)

    def cells(each: Checkin) -> list[Cell]:
        shown = state("failed", "late" if each.late_since else "failed") if _is_bad(each) else state("success", "ok")
        last = relative(each.last_at, now) if each.last_at else None
        return [each.name, shown, in_words(each.spec), relative(each.due_at, now), last, each.message]

    columns = ("CHECK-IN", "STATUS", "SCHEDULE", "EXPECTED", "LAST REPORT", "MESSAGE")
    empty = "There are no check-ins. Create one with: evertick checkins set backup '0 3 * * *' --grace 30m"
    show_list("checkins", found, columns, cells, as_json=as_json, empty=empty)


@app.command("set", epilog="Example: evertick checkins set backup '0 3 * * *' --grace 30m")
def set_command(name: Name, schedule: Schedule, grace: Grace = "5m", timezone: Zone = "UTC") -> None:
    """Create a check-in, or change what it expects."""
    try:
        seconds = parse_duration(grace).total_seconds()
    except ValueError as error:
        raise UserError(f"--grace {grace!r}: {error}.") from None
    body = CheckinRequest(schedule=schedule, timezone=timezone, grace_seconds=seconds)
    done = call(checkins.put_checkin, name=name, body=body)
    show(line(f"{'Created' if done.is_new else 'Changed'} check-in {name}: {in_words(done.record.spec)}."))


@app.command("report", epilog="Example: evertick checkins report backup --message '12 GB'")
def report_command(name: Name, message: Message = None, failed: Failed = False, as_json: Json = False) -> None:
    """Report that a job ran. From elsewhere, send POST /api/v1/checkins/NAME."""
    done = call(checkins.record_checkin, name=name, body=CheckinReport(message=message, has_failed=failed))
    if as_json:
        return print_json({"checkin": done})
    show(line(f"Recorded a report of {name}."))


@app.command("delete", epilog="Example: evertick checkins delete backup")
def delete_command(name: Name, yes: Yes = False) -> None:
    """Delete a check-in."""
    confirm(f"Delete check-in {name}?", yes=yes)
    call(checkins.delete_checkin, name=name)
    show(line(f"Deleted check-in {name}."))


def _is_bad(each: Checkin) -> bool:
    return each.late_since is not None or each.has_failed
