"""`evertick shards`: over how many the DAGs are spread, and which scheduler leads which."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from evertick.cli import far_fleet
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, noun
from evertick.cli.tables import Cell, hint, line, show, state, table
from evertick.db.notify import Channel
from evertick.db.queries import shards
from evertick.db.queries.shards import MOST_COUNTED, ShardRow
from evertick.domain.durations import relative
from evertick.engine import maintenance as verb

app = typer.Typer(no_args_is_help=True, add_completion=False)

Count = Annotated[int, typer.Argument(metavar="COUNT", help="How many shards there shall be, 1 to 64.")]


@app.callback()
def about() -> None:
    """Shards: parts of the DAGs, each planned by one scheduler at a time. Most installations need one."""


@app.command("list", epilog="Example: evertick shards list")
def list_shards(as_json: Json = False) -> None:
    """List the shards: who leads each of them, since when, how many DAGs it has, and how much is still to be moved."""
    found, now = ask(shards.page, far=far_fleet.list_shards)
    if as_json:
        print_json({"shards": [document(each) for each in found]})
        return
    show(
        table(
            ("SHARD", "STATE", "LEADER", "SINCE", "#EPOCH", "#DAGS", "#TO MOVE"), [_cells(each, now) for each in found]
        )
    )
    if unled := [str(each.shard) for each in found if not each.is_live]:
        show(
            hint(f"Nobody leads {', '.join(unled)}, so nothing fires there. Start a scheduler with: evertick scheduler")
        )


# A negative number would otherwise be taken for an option, and the reason would be hidden.
@app.command("set", epilog="Example: evertick shards set 4", context_settings={"ignore_unknown_options": True})
def set_shards(count: Count) -> None:
    """Say how many shards there shall be, at any time. DAGs move to theirs while everything goes on; no fire is lost or late."""
    change(lambda conn: verb.set_shards(conn, shards=count, actor=actor()), Channel.LEAD, Channel.PLAN)
    show(line(f"{noun(count, 'shard')} from now on."))
    show(
        hint(
            "The schedulers share them out and move the DAGs beside their work. See how it gets on: evertick shards list"
        )
    )


def _cells(each: ShardRow, now: datetime) -> list[Cell]:
    leader: Cell = each.owner if each.is_live else state("failed", "nobody")
    since = relative(each.led_since, now) if each.led_since is not None and each.is_live else None
    moves = f"{each.misplaced:,}" + ("+" if each.misplaced >= MOST_COUNTED else "")
    return [str(each.shard), each.state, leader, since, each.epoch, each.dags, moves]
