"""`evertick forecast`: when runs and tasks will end, which deadlines will be missed, and the load of the next hours."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.options import Json, Limit
from evertick.cli.output import Cell, clock, document, heading, hint, line, print_json, show, table
from evertick.client.connect import read
from evertick.domain.durations import parse_duration, relative
from evertick.domain.errors import UserError
from evertick.operations.monitoring.forecasts import MOST_HOURS, ForecastReport, RunEta, forecast_run, show_forecast

app = Single()

Run = Annotated[int | None, typer.Argument(metavar="RUN", min=1, help="Show the waiting tasks of this run.")]


def _until(text: str) -> datetime:
    with suppress(ValueError, OverflowError):
        return datetime.now(UTC) + parse_duration(text)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    raise UserError(f"--until {text!r} is not a time: write 2030-01-31T18:00, or a duration such as 6h.")


Until = Annotated[
    datetime | None,
    typer.Option("--until", metavar="TIME", parser=_until, help="Look ahead until then: a time, or 6h (default 24h)."),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--if",
        metavar="CHANGE",
        help="What if: pool:NAME=SLOTS, slots:QUEUE=+N, or schedule:DAG/NAME=SPEC. Repeat for several.",
    ),
]
_BAR = 20


@app.command(epilog="Example: evertick forecast --until 6h --if pool:warehouse=8")
def forecast_command(
    run: Run = None, until: Until = None, change: Change = None, limit: Limit = 30, as_json: Json = False
) -> None:
    """Predict when runs and waiting tasks end, which deadlines are missed, and how loaded the runners are.

    The prediction repeats a simulation of the open and coming runs, with the durations of past attempts.
    """
    if run is not None:
        if change or until:
            raise UserError("--until and --if are for the forecast of all runs: leave RUN out.")
        return _show_run(run, as_json=as_json)
    hours = 24 if until is None else math.ceil((until - datetime.now(UTC)).total_seconds() / 3600)
    if not 1 <= hours <= MOST_HOURS:
        raise UserError(f"--until must be in the next {MOST_HOURS // 24} days.")
    found, now = read(show_forecast, hours=hours, change=change, limit=limit)
    if as_json:
        return print_json(document(found))
    _show_report(found, now)


def _show_run(run: int, *, as_json: bool) -> None:
    found, now = read(forecast_run, run_id=run)
    if as_json:
        return print_json(document(found))
    show(table(_COLUMNS, [_cells(found.run, now)]))
    if found.tasks:
        show(heading("Tasks"))
        rows: list[list[Cell]] = [
            [each.task, relative(each.start_at, now) if each.start_at > now else "running", relative(each.end_at, now)]
            for each in found.tasks
        ]
        show(table(("TASK", "STARTS", "ENDS"), rows))


_COLUMNS = ("RUN", "DAG", "DUE", "ENDS", "80 % BETWEEN", "DEADLINE", "MISSES IT")


def _cells(each: RunEta, now: datetime) -> list[Cell]:
    band = None if each.low_at is None or each.high_at is None else f"{clock(each.low_at)} – {clock(each.high_at)}"
    is_late = each.miss_share >= 0.5
    misses = None if each.deadline_at is None else line(f"{each.miss_share:.0%}", "bold red" if is_late else "")
    return [
        each.run_id or "to come",
        each.dag,
        relative(each.due_at, now),
        "not known" if each.end_at is None else relative(each.end_at, now),
        band,
        None if each.deadline_at is None else clock(each.deadline_at),
        misses,
    ]


def _show_report(found: ForecastReport, now: datetime) -> None:
    if found.runs:
        show(table(_COLUMNS, [_cells(each, now) for each in found.runs]))
    else:
        show(hint("No run is open, and no schedule fires in this time."))
    show(heading("Load"))
    rows: list[list[Cell]] = []
    for each in found.load:
        share = each.used / each.slots if each.slots else 0.0
        bar = "█" * round(_BAR * share)
        rows.append([each.queue, clock(each.begins_at), each.slots, f"{each.needed:.1f}", bar, f"{each.backlog:.1f}"])
    show(table(("QUEUE", "HOUR FROM", "#SLOTS", "#NEEDED", "IN USE", "#LEFT OVER"), rows))
    if found.accuracy.inside_share is not None and found.accuracy.mean_error is not None:
        inside, error = f"{found.accuracy.inside_share:.0%}", f"{found.accuracy.mean_error:.0%}"
        judged = f"{found.accuracy.judged:,}"
        show(hint(f"Of {judged} earlier forecasts, {inside} of the ends were in the band; the mean error was {error}."))
