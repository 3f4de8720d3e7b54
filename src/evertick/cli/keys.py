"""`evertick keys`: keys, rates and limits that are in use now. They come with the tasks that need them, and go with them."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.cli import far_fleet
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.gate_page import gate_page, used_text
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, show, table
from evertick.db.queries import gates

app = typer.Typer(no_args_is_help=True, add_completion=False)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The key, as `evertick keys list` shows it.")]
KINDS = ["mutex", "key", "group", "task", "dag", "order", "rate", "past"]


@app.callback()
def about() -> None:
    """Mutex keys, ordered keys, rates and limits in use: who holds them, and who waits."""


@app.command("list", epilog="Example: evertick keys list")
def list_keys(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the keys (mutex and ordered), rates and limits that tasks hold or wait for now."""
    found, _ = ask(
        lambda conn: gates.list_gates(conn, kinds=KINDS, limit=limit),
        far=lambda server: far_fleet.list_keys(server)[:limit],
    )
    if as_json:
        print_json({"keys": [document(key) for key in found]})
        return
    if not found:
        show(hint('No key is in use. A task takes one with @task(mutex="table:{params.table}").'))
        return
    rows: list[list[Cell]] = [[key.kind, key.name, used_text(key), key.holders, key.waiters] for key in found]
    show(table(("KIND", "KEY", "USED", "#HOLDERS", "#WAITING"), rows))


@app.command("show", epilog="Example: evertick keys show table:orders")
def show_key(key: Key, limit: Limit = 20, as_json: Json = False) -> None:
    """Show who holds a key, and who waits for it, the next one first."""
    gate_page("key", KINDS, key, limit=limit, as_json=as_json)
