"""`evertick alerts`, `notifications`, `notify` and `quarantine`: missed deadlines, messages about them, and what fails every
time."""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli.options import Json, Limit, noun
from evertick.cli.output import Cell, clock, document, facts, hint, line, print_json, show, table
from evertick.client.connect import open_client
from evertick.client.local import database_url, opened
from evertick.config import read_settings
from evertick.db.connect import Purpose
from evertick.db.queries.notifications import Alert, QuarantinedRow
from evertick.domain.durations import relative
from evertick.domain.errors import DeliveryFailed, UserError
from evertick.domain.notifications import Destination, headline, parse_destination
from evertick.notifications.delivery import Sending
from evertick.operations.notifications import (
    Again,
    DeliveryState,
    Notification,
    list_alerts,
    list_notifications,
    list_quarantine,
    retry,
    retry_all,
    show_notification,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List missed deadlines.")
notifications_app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, show and retry notifications.")
notify_app = typer.Typer(no_args_is_help=True, add_completion=False, help="Test a destination.")
quarantine_app = typer.Typer(add_completion=False)

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only of this DAG.")]
All = Annotated[bool, typer.Option("--all", help="Also alerts that are over.")]
StateFilter = Annotated[DeliveryState | None, typer.Option("--state", help="Only notifications in this state.")]
RunFilter = Annotated[int | None, typer.Option("--run", help="Only notifications about this run.")]
SinkFilter = Annotated[str | None, typer.Option("--sink", help="Only notifications to this destination.")]
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The notification's number, as the list shows it.")]
Numbers = Annotated[
    list[int] | None, typer.Argument(metavar="[NUMBER]...", help="Numbers of notifications; see also --all and --sink.")
]
AllFailed = Annotated[bool, typer.Option("--all", help="All failed notifications; with --sink, those to it.")]
SinkText = Annotated[
    str,
    typer.Argument(metavar="SINK", help="webhook:URL, webhook:secret/NAME, slack:secret/NAME, email:ADDRESS."),
]

_MISSED = {
    "not_fired": "did not fire in time",
    "not_started": "did not start in time",
    "not_finished": "did not finish in time",
}
_STYLES = {"sent": "green", "failed": "bold red", "waiting": "yellow"}


@app.callback()
def _alerts() -> None:
    pass


@app.command("list", epilog="Example: evertick alerts list --all")
def list_alerts_command(
    dag: DagFilter = None, everything: All = False, limit: Limit = 100, as_json: Json = False
) -> None:
    """List alerts, open ones first: the deadline, how often it was missed, and since when.

    One alert is one episode: it ends when the schedule fires again, or a later run is in time.
    """
    with open_client() as client:
        found = client.pages(list_alerts, limit, dag=dag, all=everything)
        if as_json:
            print_json({"alerts": [document(each) for each in found]})
        elif found:
            now = client.now
            columns = ("DAG", "SCHEDULE", "WHAT", "#RUN", "DUE", "#TIMES", "RAISED", "OVER")
            show(table(columns, [_alert_cells(each, now) for each in found]))
        else:
            show(
                hint(
                    "No alerts. A schedule gets deadlines with start_within and finish_within, a task with"
                    " finish_within."
                )
            )


def alert_text(alert: Alert) -> str:
    return f"{alert.dag}, schedule {alert.schedule}: {_what(alert)}" + (
        f" ({alert.count} times)" if alert.count > 1 else ""
    )


def _what(alert: Alert) -> str:
    return f"{alert.task} {_MISSED[alert.kind]}" if alert.task else _MISSED[alert.kind]


def _alert_cells(each: Alert, now: datetime) -> list[Cell]:
    over: Cell = relative(each.ended_at, now) if each.ended_at else line("open", "bold red")
    return [
        each.dag,
        each.schedule,
        _what(each),
        each.run_id,
        clock(each.due_at),
        each.count,
        relative(each.raised_at, now),
        over,
    ]


# Notifications --------------------------------------------------------------------------------------------------------


@notifications_app.callback()
def _notifications() -> None:
    pass


@notifications_app.command("list", epilog="Example: evertick notifications list --state failed")
def list_notifications_command(
    dag: DagFilter = None,
    state: StateFilter = None,
    run: RunFilter = None,
    sink: SinkFilter = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List notifications, newest first: the event, the destination, the attempts, and its last answer."""
    with open_client() as client:
        found = client.pages(list_notifications, limit, dag=dag, state=state, run_id=run, sink=sink)
        if as_json:
            print_json({"notifications": [_notification_document(each) for each in found]})
        elif found:
            now = client.now
            columns = ("#NUMBER", "STATE", "WHAT", "SINK", "WHEN", "#TRIES", "NEXT", "ANSWER")
            show(table(columns, [_notification_cells(each, now) for each in found]))
        else:
            show(hint("No notifications. A DAG or task sends them with on_failure=[notify.email(...)]."))


@notifications_app.command("show", epilog="Example: evertick notifications show 17")
def show_notification_command(number: Number, as_json: Json = False) -> None:
    """Show one notification with its content."""
    with open_client() as client:
        found = client.call(show_notification, number=number)
        now = client.now
    if as_json:
        print_json(_notification_document(found))
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


@notifications_app.command("retry", epilog="Example: evertick notifications retry 17 18")
def retry_command(numbers: Numbers = None, everything: AllFailed = False, sink: SinkFilter = None) -> None:
    """Retry failed notifications. They start again and keep their numbers."""
    if bool(numbers) == (everything or sink is not None):
        raise UserError("Name the notifications by their numbers, or give --all or --sink.")
    with open_client() as client:
        if not numbers:
            count = client.call(retry_all, body=Again(sink=sink)).count
            show(line(f"{noun(count, 'notification')} will be tried again."))
            return
        for number in numbers:
            client.call(retry, number=number)
            show(line(f"Notification {number} will be tried again."))


def _notification_document(found: Notification) -> dict[str, object]:
    return {"delivery_id": found.number, **document(found, without=["number"])}


def _notification_cells(each: Notification, now: datetime) -> list[Cell]:
    return [
        each.number,
        line(each.state, _STYLES[each.state]),
        headline(each.fact),
        each.sink,
        relative(each.created_at, now),
        each.attempts,
        relative(each.due_at, now) if each.state == "waiting" else None,
        each.answer,
    ]


@notify_app.callback()
def _notify() -> None:
    pass


@notify_app.command("test", epilog="Example: evertick notify test email:ops@example.com")
def send_test_command(sink: SinkText, as_json: Json = False) -> None:
    """Send a test message to a destination and print its answer. Exit status 1 if the message was not accepted.

    The message is not stored. It is sent from this machine with its settings: the network of the scheduler's machine may
    differ.
    """
    chosen = parse_destination(sink)
    began = time.monotonic()
    try:
        answer, is_sent = asyncio.run(_send_test(chosen)), True
    except DeliveryFailed as error:
        answer, is_sent = str(error), False
    seconds = time.monotonic() - began
    if as_json:
        print_json({"sink": chosen.text, "is_sent": is_sent, "answer": answer, "seconds": round(seconds, 3)})
    else:
        verb = "Sent to" if is_sent else "Not sent to"
        show(line(f"{verb} {chosen.text}: {answer} ({seconds * 1000:.0f} ms)", "green" if is_sent else "bold red"))
    if not is_sent:
        raise typer.Exit(1)


async def _send_test(sink: Destination) -> str:
    settings = read_settings()
    async with opened(database_url(settings), Purpose.READ) as conn:

        async def connect() -> AsyncConnection:
            return conn

        sending = Sending(settings, connect=connect)
        try:
            fact = {"event": "test", "dag": "Evertick", "reason": "If you read this, notifications work."}
            return await sending.send(sink.text, fact, delivery=f"test-{secrets.token_hex(4)}")
        finally:
            sending.close()


# Quarantine -----------------------------------------------------------------------------------------------------------


@quarantine_app.command(epilog="Example: evertick quarantine")
def quarantine_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the quarantine: runs, schedules and DAGs that fail every time, why, since when, and the next attempt."""
    with open_client() as client:
        found = client.pages(list_quarantine, limit)
        if as_json:
            print_json({"quarantine": [document(each) for each in found]})
        elif found:
            now = client.now
            columns = ("WHAT", "WHERE", "SINCE", "#FAILURES", "TRIED AGAIN", "WHY")
            show(table(columns, [_quarantine_cells(each, now) for each in found]))
        else:
            show(hint("Nothing is in quarantine."))


def _quarantine_cells(each: QuarantinedRow, now: datetime) -> list[Cell]:
    what = f"run {each.subject_id}" if each.kind == "run" else each.kind
    where = f"{each.dag}, schedule {each.schedule}" if each.schedule else each.dag
    return [
        what,
        where,
        relative(each.since, now),
        each.failures,
        tried_again(each, now),
        f"{each.verb}: {each.reason}",
    ]


def tried_again(each: QuarantinedRow, now: datetime) -> str:
    if each.retry_at is None:
        return "when it is published anew"
    return relative(each.retry_at, now) if each.retry_at > now else "with the next round"
