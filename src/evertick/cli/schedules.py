"""`evertick schedules`: when DAGs run, and when an expression would."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli.connection import ask
from evertick.cli.dag_page import fires_of, schedule_document
from evertick.cli.documents import print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, heading, hint, show, state, table
from evertick.cli.times import relative
from evertick.domain.errors import UserError
from evertick.domain.schedule import ScheduleSpec, describe, next_after, parse_schedule
from evertick.domain.zones import find_zone
from evertick.engine.plan import in_words, read_spec
from evertick.engine.trigger import find_dag_row
from evertick.store import schedules
from evertick.store.schedules import ListedSchedule

app = typer.Typer(no_args_is_help=True, add_completion=False, help="When DAGs run.")

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only this DAG's schedules.")]
CronOption = Annotated[
    str | None, typer.Option("--cron", metavar="EXPR", help="An expression to try: '30 6 * * MON-FRI', '@every 90s'.")
]
ZoneOption = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Its time zone, such as Europe/Berlin.")]
Count = Annotated[int, typer.Option("-n", "--count", min=1, max=1000, help="How many fires to show.")]


@app.command("list", epilog="Example: evertick schedules list")
def list_schedules(dag: DagFilter = None, limit: Limit = 200, as_json: Json = False) -> None:
    """List schedules: when each fires next, when it fired last, and whether it is paused or in error."""

    async def read(conn: AsyncConnection) -> list[ListedSchedule]:
        if dag is not None:
            await find_dag_row(conn, dag)
        return await schedules.list_all(conn, dag=dag, limit=limit)

    found, now = ask(read)
    if as_json:
        print_json({"schedules": [{"dag": each.dag, **schedule_document(each)} for each in found]})
        return
    if not found:
        whose = f"{dag} has no schedule" if dag else "No DAG has a schedule yet"
        show(hint(f"{whose}. Give one to a DAG with @dag(schedule='@daily'), or '@every 5m', or '30 6 * * *'."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        words, last = in_words(each.spec), relative(each.last_fired, now)
        rows.append([each.dag, each.name, _status(each), words, _next(each, now), last, each.error])
    show(table(("DAG", "NAME", "STATUS", "WHEN", "NEXT", "LAST", "ERROR"), rows))
    if len(found) == limit:
        show(hint(f"The first {limit:,} schedules; see more with --limit"))


@app.command("next", epilog="Example: evertick schedules next --cron '30 6 * * MON-FRI' --tz Europe/Berlin -n 3")
def next_fires(
    dag: DagFilter = None, cron: CronOption = None, tz: ZoneOption = None, count: Count = 5, as_json: Json = False
) -> None:
    """Show the next fires of a DAG's schedules, or of an expression that you want to try."""
    if (dag is None) == (cron is None):
        raise UserError("Name a DAG, or give an expression with --cron: one of the two.")
    if cron is not None:
        spec, now = parse_schedule(cron, timezone=tz), datetime.now(UTC)
        fires = _fires_after(spec, now, count)
        if as_json:
            print_json({"schedule": describe(spec), "next_fires": fires})
        else:
            _show_fires(spec, fires, now)
        return
    if tz is not None:
        raise UserError("--tz goes with --cron: a DAG's schedules have their own time zones.")
    (_, found), now = ask(lambda conn: _of_dag(conn, str(dag)))
    if as_json:
        print_json({"dag": dag, "schedules": [schedule_document(each, fires_of(each, count)) for each in found]})
        return
    if not found:
        show(hint(f"{dag} has no schedule: it runs by hand, with `evertick dags trigger {dag}`."))
    for each in found:
        show(heading(each.name))
        if each.error:
            show(hint(in_words(each.spec)), state("failed", each.error))
        else:
            _show_fires(read_spec(each.spec), fires_of(each, count), now, paused=each.paused)


async def _of_dag(conn: AsyncConnection, dag: str) -> tuple[int, list[ListedSchedule]]:
    row = await find_dag_row(conn, dag)
    return row.dag_id, await schedules.list_all(conn, dag=dag)


def _fires_after(spec: ScheduleSpec, now: datetime, count: int) -> list[datetime]:
    fires: list[datetime] = []
    while len(fires) < count and (following := next_after(spec, fires[-1] if fires else now)) is not None:
        fires.append(following)
    return fires


def _show_fires(spec: ScheduleSpec, fires: list[datetime], now: datetime, *, paused: bool = False) -> None:
    show(hint(describe(spec)))
    if paused:
        show(state("paused", "paused: it fires nothing until its DAG is unpaused"))
    elif not fires:
        show(hint("It has ended: no fire is left."))
    else:
        zone = find_zone(spec.timezone)
        rows = [[_wall(fire.astimezone(zone)), _wall(fire), relative(fire, now)] for fire in fires]
        show(table((spec.timezone if spec.timezone != "UTC" else "LOCAL (UTC)", "UTC", "WHEN"), rows))


def _wall(instant: datetime) -> str:
    """With the offset, so that a change of the clocks is seen; with fractions only where there are some."""
    return instant.isoformat(sep=" ", timespec="milliseconds" if instant.microsecond else "seconds")


def _status(row: ListedSchedule) -> Cell:
    if row.error:
        return state("broken", "error")
    return state("paused") if row.paused else state("success", "on")


def _next(row: ListedSchedule, now: datetime) -> str:
    if row.paused or row.error:
        return "-"
    return relative(row.next_due, now) if row.next_due else "ended"
