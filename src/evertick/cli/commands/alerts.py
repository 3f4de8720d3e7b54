"""`evertick alerts`, `notifications` and `quarantine`: missed deadlines, messages about them, and repeated failures."""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli.app import Group, Single
from evertick.cli.options import DagFilter, Json, Limit, noun
from evertick.cli.output import Cell, clock, document, facts, hint, line, print_json, show, show_list
from evertick.client.connect import open_client, read, read_pages
from evertick.client.local import database_url, opened
from evertick.config import read_settings
from evertick.db.connect import Purpose
from evertick.db.queries.notifications import Alert, QuarantinedItem
from evertick.domain.durations import relative
from evertick.domain.errors import DeliveryFailed, UserError
from evertick.domain.notifications import Destination, headline, parse_destination
from evertick.notifications.delivery import Sending
from evertick.operations import notifications
from evertick.operations.notifications import DeliveryState, Notification, RetryRequest

app = Group()
notifications_app = Group()
quarantine_app = Single()

All = Annotated[bool, typer.Option("--all", help="Also alerts that are over.")]
StateFilter = Annotated[DeliveryState | None, typer.Option("--state", help="Only notifications in this state.")]
RunFilter = Annotated[int | None, typer.Option("--run", help="Only notifications about this run.")]
SinkFilter = Annotated[str | None, typer.Option("--sink", help="Only notifications to this destination.")]
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The notification's number, as the list shows it.")]
Numbers = Annotated[
    list[int] | None, typer.Argument(metavar="NUMBER", help="Numbers of notifications; see also --all and --sink.")
]
AllFailed = Annotated[bool, typer.Option("--all", help="All failed notifications; with --sink, those to it.")]
SinkText = Annotated[
    str,
    typer.Argument(metavar="DESTINATION", help="webhook:URL, webhook:secret/NAME, slack:secret/NAME, email:ADDRESS."),
]

_MISSED = {
    "not_fired": "did not fire in time",
    "not_started": "did not start in time",
    "not_finished": "did not finish in time",
    "will_miss": "is expected to miss its deadline",
}
_STYLES = {"sent": "green", "failed": "bold red", "waiting": "yellow"}


@app.command("list", epilog="Example: evertick alerts list --all")
def list_alerts_command(
    dag: DagFilter = None, everything: All = False, limit: Limit = 100, as_json: Json = False
) -> None:
    """List alerts, open ones first: the deadline, how often it was missed, and since when.

    One alert is one episode: it ends when the schedule fires again, or a later run is in time.
    """
    found, now = read_pages(notifications.list_alerts, limit, dag=dag, with_ended=everything)
    columns = ("DAG", "SCHEDULE", "MISSED", "#RUN", "DUE", "#TIMES", "RAISED", "OVER")

    def cells(each: Alert) -> list[Cell]:
        over: Cell = relative(each.ended_at, now) if each.ended_at else line("open", "bold red")
        due, raised = clock(each.due_at), relative(each.raised_at, now)
        return [each.dag, each.schedule, _what(each), each.run_id, due, each.count, raised, over]

    empty = "No alerts. A schedule gets deadlines with start_within and finish_within, a task with finish_within."
    show_list("alerts", found, columns, cells, as_json=as_json, empty=empty)


def alert_text(alert: Alert) -> str:
    return f"{alert.dag}, schedule {alert.schedule}: {_what(alert)}" + (
        f" ({alert.count} times)" if alert.count > 1 else ""
    )


def _what(alert: Alert) -> str:
    return f"{alert.task} {_MISSED[alert.kind]}" if alert.task else _MISSED[alert.kind]


# Notifications --------------------------------------------------------------------------------------------------------


@notifications_app.command("list", epilog="Example: evertick notifications list --state failed")
def list_notifications_command(
    dag: DagFilter = None,
    state: StateFilter = None,
    run: RunFilter = None,
    sink: SinkFilter = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List notifications, newest first: the event, the destination, the attempts, and the last response."""
    found, now = read_pages(notifications.list_notifications, limit, dag=dag, state=state, run_id=run, sink=sink)
    columns = ("#NUMBER", "STATE", "EVENT", "SINK", "WHEN", "#TRIES", "NEXT", "LAST RESPONSE")

    def cells(each: Notification) -> list[Cell]:
        then = relative(each.due_at, now) if each.state == "waiting" else None
        made: list[Cell] = [
            each.notification_id,
            line(each.state, _STYLES[each.state]),
            headline(each.payload),
            each.sink,
        ]
        return [*made, relative(each.created_at, now), each.attempts, then, each.last_response]

    empty = "No notifications. A DAG or task sends them with on_failure=[notify.email(...)]."
    show_list("notifications", found, columns, cells, as_json=as_json, empty=empty, to_json=_notification_document)


@notifications_app.command("show", epilog="Example: evertick notifications show 17")
def show_notification_command(number: Number, as_json: Json = False) -> None:
    """Show one notification with its content."""
    found, now = read(notifications.show_notification, notification_id=number)
    if as_json:
        return print_json(_notification_document(found))
    rows: dict[str, Cell] = {
        "state": line(found.state, _STYLES[found.state]),
        "sink": found.sink,
        "created": clock(found.created_at),
        "tries": found.attempts,
        "next try": relative(found.due_at, now) if found.state == "waiting" else None,
        "ended": clock(found.ended_at) if found.ended_at else None,
        "last response": found.last_response,
        **{f"payload: {name}": str(value) for name, value in found.payload.items()},
    }
    show(line(headline(found.payload), "bold"), facts(rows))


@notifications_app.command("retry", epilog="Example: evertick notifications retry 17 18")
def retry_command(numbers: Numbers = None, everything: AllFailed = False, sink: SinkFilter = None) -> None:
    """Retry failed notifications. They start again and keep their numbers."""
    if bool(numbers) == (everything or sink is not None):
        raise UserError("Name the notifications by their numbers, or give --all or --sink.")
    with open_client() as client:
        if not numbers:
            count = client.call(notifications.retry_notifications, body=RetryRequest(sink=sink)).count
            show(line(f"{noun(count, 'notification')} will be tried again."))
            return
        for number in numbers:
            client.call(notifications.retry_notification, notification_id=number)
            show(line(f"Notification {number} will be tried again."))


def _notification_document(found: Notification) -> dict[str, object]:
    return document(found)


@notifications_app.command("test", epilog="Example: evertick notifications test email:ops@example.com")
def send_test_command(sink: SinkText, as_json: Json = False) -> None:
    """Test a notification destination: send it a message and print its answer. Exit status 1 if delivery failed.

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
        print_json({"sink": chosen.text, "is_sent": is_sent, "response": answer, "seconds": round(seconds, 3)})
    else:
        verb = "Sent to" if is_sent else "Not sent to"
        show(line(f"{verb} {chosen.text}: {answer} ({seconds * 1000:.0f} ms)", "green" if is_sent else "bold red"))
        show(hint("With the settings of this machine; a scheduler on another one may have others."))
    if not is_sent:
        raise typer.Exit(1)


async def _send_test(sink: Destination) -> str:
    settings = read_settings()
    async with opened(database_url(settings), Purpose.READ) as conn:

        async def connect() -> AsyncConnection:
            return conn

        fact = {"event": "test", "dag": "Evertick", "reason": "If you read this, notifications work."}
        sending = Sending(settings, connect=connect)
        return await sending.send(sink.text, fact, delivery=f"test-{secrets.token_hex(4)}")


# Quarantine -----------------------------------------------------------------------------------------------------------


@quarantine_app.command(epilog="Example: evertick quarantine")
def quarantine_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List runs, schedules and DAGs suspended after repeated errors: the reason, since when, and the next attempt."""
    found, now = read_pages(notifications.list_quarantine, limit)
    columns = ("OBJECT", "WHERE", "SINCE", "#FAILURES", "TRIED AGAIN", "REASON")

    def cells(each: QuarantinedItem) -> list[Cell]:
        subject = f"run {each.subject_id}" if each.kind == "run" else each.kind
        where = f"{each.dag}, schedule {each.schedule}" if each.schedule else each.dag
        reason = f"{each.verb}: {each.reason}"
        return [subject, where, relative(each.since, now), each.failures, tried_again(each, now), reason]

    show_list("quarantine", found, columns, cells, as_json=as_json, empty="Nothing is in quarantine.")


def tried_again(each: QuarantinedItem, now: datetime) -> str:
    if each.retry_at is None:
        return "when it is published again"
    return relative(each.retry_at, now) if each.retry_at > now else "with the next round"
