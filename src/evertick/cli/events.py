"""`evertick events`: tell waiting tasks what happened outside."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from evertick.cli import far_waiting
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.db.notify import Channel
from evertick.db.queries import waits
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.engine.waits import send_event

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The event's name, as tasks wait for it.")]
Payload = Annotated[
    str, typer.Option("--payload", metavar="JSON", help="What comes with it; it becomes the waiting task's result.")
]
Key = Annotated[
    str | None, typer.Option("--key", help="The same key twice is one event: safe to repeat after a lost answer.")
]
OfName = Annotated[str | None, typer.Option("--name", help="Only events of this name.")]


@app.callback()
def about() -> None:
    """Events from outside, that tasks wait for with `wait_for_event("NAME")`."""


@app.command("send", epilog="""Example: evertick events send file-arrived --payload '{"path": "/in/a.csv"}'""")
def send(name: Name, payload: Payload = "null", key: Key = None, as_json: Json = False) -> None:
    """Send an event. Every task that waits for it goes on; one of a run that is there already and begins to wait later finds it."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--payload is not JSON: {error}. A text needs its quotes: --payload '\"ready\"'.") from None
    done = change(
        lambda conn: send_event(conn, name=name, payload=value, actor=actor(), key=key),
        Channel.PLAN,
        is_keyed=key is not None,
        far=lambda server: far_waiting.send_event(server, name, value, key),
    )
    if as_json:
        print_json({"event": document(done)})
    elif done.is_new:
        show(line(f"Sent event {name}."))
    else:
        show(line(f"Event {name} with this key was sent before, by {done.sent_by}; nothing was sent again."))


@app.command("list", epilog="Example: evertick events list --name file-arrived")
def list_events(name: OfName = None, limit: Limit = 50, as_json: Json = False) -> None:
    """List what was sent, the newest first."""
    found, now = ask(
        lambda conn: waits.list_events(conn, name=name, limit=limit),
        far=lambda server: far_waiting.list_events(server, name, limit),
    )
    if as_json:
        print_json({"events": [document(each) for each in found]})
        return
    if not found:
        show(hint("No event was sent. Send one with: evertick events send NAME"))
        return
    rows: list[list[Cell]] = [
        [each.name, each.key, relative(each.sent_at, now), each.sent_by, json.dumps(each.payload)] for each in found
    ]
    show(table(("EVENT", "KEY", "SENT", "BY", "PAYLOAD"), rows))
