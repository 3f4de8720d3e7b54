"""`evertick runners`: who runs tasks."""

from __future__ import annotations

import typer

from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, show, table
from evertick.cli.times import length, relative
from evertick.store import runners

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def about() -> None:
    """Runners that are alive, and how busy they are."""


@app.command("list", epilog="Example: evertick runners list")
def list_runners(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the runners that are alive, with their queues and how many slots are taken."""
    found, now = ask(lambda conn: runners.list_busy(conn, limit=limit))
    if as_json:
        # A session is 63 bits, more than a number in JavaScript holds.
        print_json({"runners": [{**document(each), "session": str(each.session)} for each in found]})
        return
    if not found:
        show(hint("No runner is alive, so nothing can run. Start one with: evertick runner (or all with: evertick up)"))
        return
    rows: list[list[Cell]] = []
    for each in found:
        place: list[Cell] = [each.host, each.pid, ", ".join(each.queues), f"{each.busy}/{each.slots}"]
        rows.append([each.runner_id, *place, relative(each.started_at, now), length(each.silent_seconds)])
    show(table(("RUNNER", "HOST", "#PID", "QUEUES", "#BUSY", "STARTED", "SILENT FOR"), rows))
