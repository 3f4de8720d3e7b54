"""`evertick quarantine`: what was set aside because it fails every time."""

from __future__ import annotations

from datetime import datetime

import typer

from evertick.cli import far_troubles
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, show, table
from evertick.db.queries import notifications
from evertick.db.queries.notifications import QuarantinedRow
from evertick.domain.durations import relative

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: evertick quarantine")
def list_set_aside(limit: Limit = 1000, as_json: Json = False) -> None:
    """List what was set aside because it fails every time: why, since when, and when it is tried again."""
    found, now = ask(
        lambda conn: notifications.list_quarantined(conn, limit=limit),
        far=lambda server: far_troubles.list_set_aside(server, limit),
    )
    if as_json:
        print_json({"quarantine": [document(each) for each in found]})
    elif found:
        columns = ("WHAT", "WHERE", "SINCE", "#FAILURES", "TRIED AGAIN", "WHY")
        show(table(columns, [_cells(each, now) for each in found]))
    else:
        show(hint("Nothing is set aside."))


def _cells(each: QuarantinedRow, now: datetime) -> list[Cell]:
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
