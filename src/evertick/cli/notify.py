"""`evertick notify`: does a sink work? Sends a message from here, with the settings that hold here."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli.connection import database_url, opened
from evertick.cli.documents import print_json
from evertick.cli.options import Json
from evertick.cli.tables import line, show
from evertick.config import read_settings
from evertick.db.connect import Purpose
from evertick.domain.errors import DeliveryFailed
from evertick.domain.notifications import Destination, parse_destination
from evertick.notifications.delivery import Sending

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Try a sink.")

SinkText = Annotated[
    str,
    typer.Argument(metavar="SINK", help="webhook:URL, webhook:secret/NAME, slack:secret/NAME, email:ADDRESS."),
]


@app.callback()
def _notify() -> None:
    pass


@app.command("test", epilog="Example: evertick notify test email:ops@example.com")
def send_test(sink: SinkText, as_json: Json = False) -> None:
    """Send a test message to a sink and say what came of it. Exit status 1 if it was not taken.

    Nothing of it is kept. It is sent from here: what the scheduler's machine can reach may differ.
    """
    chosen = parse_destination(sink)
    began = time.monotonic()
    try:
        said, is_sent = asyncio.run(_send(chosen)), True
    except DeliveryFailed as error:
        said, is_sent = str(error), False
    seconds = time.monotonic() - began
    if as_json:
        print_json({"sink": chosen.text, "is_sent": is_sent, "answer": said, "seconds": round(seconds, 3)})
    else:
        verb = "Sent to" if is_sent else "Not sent to"
        show(line(f"{verb} {chosen.text}: {said} ({seconds * 1000:.0f} ms)", "green" if is_sent else "bold red"))
    if not is_sent:
        raise typer.Exit(1)


async def _send(sink: Destination) -> str:
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
