"""`evertick backfill`: run a stretch of a DAG's schedule again, or for the first time."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_backfills, far_plans
from evertick.cli.backfill_page import (
    backfill_document,
    follow,
    outlook_document,
    show_backfill,
    show_outlook,
    show_rows,
)
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import print_json
from evertick.cli.journey import read_moment
from evertick.cli.options import DagName, DryRun, Json, Limit, noun
from evertick.cli.tables import hint, line, show
from evertick.cli.travel import CronOption, EveryOption, ZoneOption
from evertick.cli.trigger import KeyOption, ParamsOption, read_object
from evertick.db.notify import Channel
from evertick.db.queries import backfills, schedules
from evertick.db.queries.backfills import BackfillRow, FailedRun
from evertick.domain.errors import NotFound, OutcomeUnknown, UserError
from evertick.domain.schedules.preview import Reprocess
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.engine import backfills as verb
from evertick.engine.backfills import BackfillRequest, find_backfill
from evertick.engine.fire_schedules import UNPLANNABLE, JsonObject, read_spec
from evertick.engine.runs import find_dag_row

if TYPE_CHECKING:
    from evertick.cli.server import Server

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run a stretch of a schedule again.")

Backfill = Annotated[str, typer.Argument(metavar="BACKFILL", help="Its number, as `evertick backfill list` shows it.")]
DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only backfills of this DAG.")]
FromOption = Annotated[
    str, typer.Option("--from", metavar="TIME", help="The first instant: 2025-03-30, 2025-03-30T02:30, …Z.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="The last instant; a day means all of it. Now if left out.")
]
ScheduleOption = Annotated[
    str | None, typer.Option("--schedule", metavar="NAME", help="Which of the DAG's schedules, if it has several.")
]
ReprocessOption = Annotated[
    Reprocess,
    typer.Option("--reprocess", help="Which instants run again although they had a run.", case_sensitive=False),
]
NewestFirst = Annotated[bool, typer.Option("--newest-first", help="From the end of the range to its beginning.")]
Parallel = Annotated[int, typer.Option("--parallel", metavar="N", help="How many of its runs may be open at once.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show its progress until it is over.")]
_MOST_SCHEDULES = 1000
LeaveRuns = Annotated[bool, typer.Option("--leave-runs", help="Let the runs that it has made go on.")]


@app.command("create", epilog="Example: evertick backfill create etl --from 2025-03-01 --to 2025-03-31 --parallel 4")
def create(
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
    """Make runs for the instants of a range that have none, a few at a time and behind the DAG's own schedule."""
    spec = _expression(schedule, cron, every, tz)
    zone = spec.timezone if spec is not None else _zone_of(dag, schedule)
    wish = BackfillRequest(
        dag=dag,
        first=read_moment("--from", since, zone),
        last=None if until is None else read_moment("--to", until, zone, is_end=True),
        schedule=schedule,
        spec=spec,
        reprocess=reprocess,
        newest_first=newest_first,
        parallel=parallel,
        params=None if params is None else read_object(params),
    )
    if dry_run:
        outlook, _ = ask(lambda conn: verb.preview(conn, wish), far=lambda server: far_backfills.foresee(server, wish))
        if as_json:
            print_json(outlook_document(outlook, wish))
        else:
            show_outlook(outlook, wish)
        return
    own_key = key or f"cli-{secrets.token_hex(8)}"
    try:
        made, outlook = change(
            lambda conn: verb.create(conn, wish, request=own_key, actor=actor()),
            Channel.PLAN,
            is_keyed=True,
            far=lambda server: far_backfills.create(server, wish, own_key),
        )
    except OutcomeUnknown as error:
        raise OutcomeUnknown(f"{error} To repeat it is safe with: --key {own_key}") from None
    if as_json:
        print_json({"backfill": made.id, "is_new": made.is_new or key is None, **outlook_document(outlook, wish)})
        return
    if key is not None and not made.is_new:
        show(line(f"Backfill {made.id} of {dag} has this key already."))
    else:
        show(line(f"Started backfill {made.id} of {dag}: {noun(outlook.total, 'instant')}."))
    if follow_it:
        follow(made.id)
    show(hint(f"See how it goes with: evertick backfill show {made.id} --follow"))


@app.command("list", epilog="Example: evertick backfill list etl")
def list_backfills(dag: DagFilter = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List backfills, newest first, and how far each is."""
    found, now = ask(
        lambda conn: backfills.list_newest(conn, dag=dag, limit=limit),
        far=lambda server: far_backfills.list_backfills(server, dag, limit),
    )
    if as_json:
        print_json({"backfills": [backfill_document(each, now) for each in found]})
    elif found:
        show_rows(found, now)
    else:
        if dag is not None:
            ask(lambda conn: find_dag_row(conn, dag), far=lambda server: far_plans.find_dag(server, dag))
        show(hint("No backfill yet. Make one with: evertick backfill create DAG --from 2025-03-01 --to 2025-03-31"))


@app.command("show", epilog="Example: evertick backfill show 3 --follow")
def show_one(number: Backfill, follow_it: Follow = False, as_json: Json = False) -> None:
    """Show one backfill: what it does, how far it is, and how long it will still take."""
    backfill_id = _number(number)
    if follow_it and not as_json:
        follow(backfill_id)

    async def read(conn: AsyncConnection) -> tuple[BackfillRow, list[FailedRun]]:
        found = await find_backfill(conn, backfill_id)
        return found, await backfills.failed_runs(conn, backfill_id=backfill_id)

    (row, failed), now = ask(read, far=lambda server: far_backfills.find_backfill(server, backfill_id))
    if as_json:
        print_json({**backfill_document(row, now), "failed_runs": [each.run_id for each in failed]})
        return
    show_backfill(row, failed, now)


@app.command("pause", epilog="Example: evertick backfill pause 3")
def pause(number: Backfill) -> None:
    """Make no more runs until it is resumed. Those that it has made go on."""
    backfill_id = _number(number)
    row = change(
        lambda conn: verb.pause(conn, backfill_id=backfill_id, actor=actor()),
        far=lambda server: far_backfills.change_backfill(server, backfill_id, "pause"),
    )
    show(line(f"Paused backfill {backfill_id} of {row.dag}."))
    show(hint(f"Let it go on with: evertick backfill resume {backfill_id}"))


@app.command("resume", epilog="Example: evertick backfill resume 3")
def resume(number: Backfill) -> None:
    """Go on where it was paused."""
    backfill_id = _number(number)
    row = change(
        lambda conn: verb.resume(conn, backfill_id=backfill_id, actor=actor()),
        Channel.PLAN,
        far=lambda server: far_backfills.change_backfill(server, backfill_id, "resume"),
    )
    show(line(f"Backfill {backfill_id} of {row.dag} goes on."))


@app.command("cancel", epilog="Example: evertick backfill cancel 3 --leave-runs")
def cancel(number: Backfill, leave_runs: LeaveRuns = False) -> None:
    """End it: no more runs are made, and those that are open are canceled."""
    backfill_id = _number(number)
    done = change(
        lambda conn: verb.cancel(conn, backfill_id=backfill_id, leaves_runs=leave_runs, actor=actor()),
        Channel.STOP,
        Channel.READY,
        far=lambda server: far_backfills.cancel(server, backfill_id, leaves_runs=leave_runs),
    )
    what = "Its open runs go on." if leave_runs else f"Canceled {noun(done.runs or 0, 'run')} of it."
    show(line(f"Canceled backfill {backfill_id}. {what}"))


def _expression(schedule: str | None, cron: str | None, every: str | None, tz: str | None) -> ScheduleSpec | None:
    if len([each for each in (schedule, cron, every) if each is not None]) > 1:
        raise UserError("--schedule, --cron and --every each say which instants are meant: give one of them.")
    if cron is None and every is None:
        if tz is not None:
            raise UserError("--tz goes with --cron and --every: a DAG's schedules have their own time zones.")
        return None
    return parse_schedule(cron if cron is not None else f"@every {every}", timezone=tz)


def _zone_of(dag: str, schedule: str | None) -> str:
    """In which times without an offset are read: that of the schedule that is meant. What is wrong with it is told later."""

    async def read(conn: AsyncConnection) -> list[tuple[str, JsonObject | str]]:
        return [(each.name, each.spec) for each in await schedules.of_dag(conn, dag=dag)]

    def read_far(server: Server) -> list[tuple[str, JsonObject | str]]:
        return [(each.name, each.spec) for each in far_plans.list_schedules(server, dag, _MOST_SCHEDULES)]

    found, _ = ask(read, far=read_far)
    for name, spec in found:
        if schedule in (None, name):
            try:
                return read_spec(spec).timezone
            except UNPLANNABLE:
                break
    return "UTC"


def _number(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise UserError(f"{text!r} is not a backfill's number. `evertick backfill list` shows them.")
    if len(text) > 9:
        raise NotFound(f"There is no backfill {text[:40]}. `evertick backfill list` shows what there is.")
    return int(text)
