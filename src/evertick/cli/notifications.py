"""`evertick notifications`: what was told to whom, what waits, and what could not be sent."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_troubles
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit, noun
from evertick.cli.tables import Cell, facts, hint, line, show, table
from evertick.cli.times import clock
from evertick.db.queries import notifications
from evertick.db.queries.notifications import Delivery
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.notifications import headline
from evertick.engine.notifications import find_delivery, retry_failed, retry_one
from evertick.engine.runs import find_dag_row

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What was told to whom.")


class State(StrEnum):
    WAITING = "waiting"
    SENT = "sent"
    FAILED = "failed"


DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only this DAG's.")]
StateFilter = Annotated[State | None, typer.Option("--state", help="Only those that wait, were sent, or failed.")]
RunFilter = Annotated[int | None, typer.Option("--run", help="Only those about this run.")]
SinkFilter = Annotated[str | None, typer.Option("--sink", help="Only those of this sink, as the list shows it.")]
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The notification's number, as the list shows it.")]
Numbers = Annotated[list[int] | None, typer.Argument(metavar="[NUMBER]...", help="Which; see also --all and --sink.")]
All = Annotated[bool, typer.Option("--all", help="All that failed; with --sink, those of that sink.")]

_STYLES = {"sent": "green", "failed": "bold red", "waiting": "yellow"}


@app.callback()
def _notifications() -> None:
    pass


@app.command("list", epilog="Example: evertick notifications list --state failed")
def list_notifications(
    dag: DagFilter = None,
    state: StateFilter = None,
    run: RunFilter = None,
    sink: SinkFilter = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List notifications, the latest first: of what, to whom, how often it was tried, and what the sink said."""
    wanted = notifications.DeliveryFilter(state=state, sink=sink, dag=dag, run_id=run)

    async def read(conn: AsyncConnection) -> list[Delivery]:
        if dag is not None:
            await find_dag_row(conn, dag)
        return await notifications.list_deliveries(conn, wanted, limit=limit)

    found, now = ask(read, far=lambda server: far_troubles.list_notifications(server, wanted, limit))
    if as_json:
        print_json({"notifications": [document(each) for each in found]})
    elif found:
        columns = ("#NUMBER", "STATE", "WHAT", "SINK", "WHEN", "#TRIES", "NEXT", "ANSWER")
        show(table(columns, [_cells(each, now) for each in found]))
    else:
        show(hint("No notifications. A DAG or task is told about with on_failure=[notify.email(...)]."))


@app.command("show", epilog="Example: evertick notifications show 17")
def show_notification(number: Number, as_json: Json = False) -> None:
    """Show one notification with everything that is sent."""
    found, now = ask(
        lambda conn: find_delivery(conn, number), far=lambda server: far_troubles.find_notification(server, number)
    )
    if as_json:
        print_json(document(found))
        return
    rows: dict[str, Cell] = {
        "state": line(found.state, _STYLES[found.state]),
        "sink": found.sink,
        "created": clock(found.created_at),
        "tries": found.attempts,
        "next try": relative(found.due_at, now) if found.state == "waiting" else None,
        "ended": clock(found.ended_at) if found.ended_at else None,
        "answer": found.answer,
        **{f"fact: {name}": str(value) for name, value in found.fact.items()},
    }
    show(line(headline(found.fact), "bold"), facts(rows))


@app.command("retry", epilog="Example: evertick notifications retry 17 18")
def retry_notifications(numbers: Numbers = None, everything: All = False, sink: SinkFilter = None) -> None:
    """Try failed notifications again, from the start and under their old numbers."""
    if bool(numbers) == (everything or sink is not None):
        raise UserError("name the notifications by their numbers, or give --all or --sink.")
    if not numbers:
        count = change(
            lambda conn: retry_failed(conn, sink=sink, actor=actor()),
            far=lambda server: far_troubles.retry_failed(server, sink),
        )
        show(line(f"{noun(count, 'notification')} will be tried again."))
        return
    for number in numbers:
        _retry_one(number)
        show(line(f"Notification {number} will be tried again."))


def _retry_one(number: int) -> None:
    change(
        lambda conn: retry_one(conn, delivery_id=number, actor=actor()),
        far=lambda server: far_troubles.retry_one(server, number),
    )


def _cells(each: Delivery, now: datetime) -> list[Cell]:
    return [
        each.delivery_id,
        line(each.state, _STYLES[each.state]),
        headline(each.fact),
        each.sink,
        relative(each.created_at, now),
        each.attempts,
        relative(each.due_at, now) if each.state == "waiting" else None,
        each.answer,
    ]
