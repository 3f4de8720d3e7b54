"""`evertick queues`: what waits in them, for how long, and who serves them."""

from __future__ import annotations

from datetime import datetime

import typer

from evertick.cli import far_fleet
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, show, state, table
from evertick.db.queries import runners
from evertick.db.queries.runners import QueueRow
from evertick.domain.durations import length

app = typer.Typer(no_args_is_help=True, add_completion=False)

# More than that in line is "many" to whoever looks, and counting them would take long.
MOST_COUNTED = 100_000


@app.callback()
def about() -> None:
    """Queues: how much waits there, for how long, and who serves them."""


@app.command("list", epilog="Example: evertick queues list")
def list_queues(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the queues: tasks in line, how long the first of them waits, tasks that run, and the live runners that serve it.

    A queue is listed if something waits or runs there, a runner serves it, or a published task goes there.
    """
    found, now = ask(
        lambda conn: runners.list_all(conn, cap=MOST_COUNTED, limit=limit),
        far=lambda server: far_fleet.list_queues(server)[:limit],
    )
    if as_json:
        print_json({"queues": [_document(each, now) for each in found]})
        return
    if not found:
        show(hint("No queue is in use: nothing is published and no runner is alive. Start with: evertick up"))
        return
    rows: list[list[Cell]] = [[each.queue, *_cells(each, now)] for each in found]
    show(table(("QUEUE", "#IN LINE", "OLDEST", "#RUNNING", "#SLOTS", "RUNNERS"), rows))
    if unserved := [each.queue for each in found if each.depth and not each.runners]:
        show(hint(f"Nobody serves {', '.join(unserved)}: start a runner with --queues {unserved[0]}."))


def _cells(queue: QueueRow, now: datetime) -> list[Cell]:
    depth = f"{queue.depth:,}" + ("+" if queue.depth >= MOST_COUNTED else "")
    waited = _waited_seconds(queue, now)
    return [depth, None if waited is None else length(waited), queue.running, queue.slots, _runners(queue)]


def _runners(queue: QueueRow) -> Cell:
    if not queue.runners:
        return state("failed", "none") if queue.depth else "none"
    notes = []
    if queue.specialised:
        notes.append(f"{queue.specialised} only for some names")
    if queue.draining:
        notes.append(f"{queue.draining} draining")
    return f"{queue.runners}{' (' + ', '.join(notes) + ')' if notes else ''}"


def _waited_seconds(queue: QueueRow, now: datetime) -> float | None:
    return None if queue.oldest_at is None else max((now - queue.oldest_at).total_seconds(), 0.0)


def _document(queue: QueueRow, now: datetime) -> dict[str, object]:
    return {**document(queue), "oldest_wait_seconds": _waited_seconds(queue, now)}
