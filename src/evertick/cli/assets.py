"""`evertick assets`: what updates data assets, what waits for them, and updates from outside."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_waiting
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.db.notify import Channel
from evertick.db.queries import assets
from evertick.db.queries.assets import AssetEvent
from evertick.domain.errors import UserError
from evertick.engine.waits import find_asset, update_asset

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The asset's name, as DAGs write it.")]
Extra = Annotated[
    str, typer.Option("--extra", metavar="JSON", help="What is said about the update; an object, kept on record.")
]


@app.callback()
def about() -> None:
    """Data assets: tasks update them (`outlets=[Asset("NAME")]`), DAGs run after them (`after(Asset("NAME"))`)."""


@app.command("list", epilog="Example: evertick assets list")
def list_assets(as_json: Json = False) -> None:
    """List the assets: which tasks update each, which DAGs wait for it, and which of them have heard of an update already."""
    found, _ = ask(assets.list_whole, far=far_waiting.list_assets)
    if as_json:
        print_json({"assets": [document(each) for each in found]})
        return
    if not found:
        show(hint('No DAG has one. A task updates an asset with outlets=[Asset("NAME")].'))
        return
    rows: list[list[Cell]] = [
        [
            each.name,
            ", ".join(f"{maker.dag}.{maker.task}" for maker in each.producers) or None,
            ", ".join(f"{taker.dag}{' (heard)' if taker.heard_at else ''}" for taker in each.consumers) or None,
        ]
        for each in found
    ]
    show(table(("ASSET", "UPDATED BY", "WAITED FOR BY"), rows))


@app.command("update", epilog="""Example: evertick assets update orders --extra '{"rows": 7}'""")
def update(name: Name, extra: Extra = "{}", as_json: Json = False) -> None:
    """Tell that an asset was updated by something outside. DAGs that run after it start, once they have heard of all of theirs."""
    try:
        said = json.loads(extra)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--extra is not JSON: {error}.") from None
    if not isinstance(said, dict):
        raise UserError("""--extra must be an object, as in --extra '{"rows": 7}'.""")

    async def write(conn: AsyncConnection) -> AssetEvent:
        await find_asset(conn, name)
        return await update_asset(conn, asset=name, extra=said, actor=actor())

    done = change(write, Channel.PLAN, far=lambda server: far_waiting.update_asset(server, name, said))
    if as_json:
        print_json({"update": document(done)})
        return
    show(line(f"Told of an update of {name}."))
