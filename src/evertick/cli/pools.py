"""`evertick pools`: how many slots there are of what tasks must share."""

from __future__ import annotations

from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_fleet
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.gate_page import gate_page
from evertick.cli.options import Json, Limit, Yes, noun
from evertick.cli.prompt import confirm
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.engine import gates as verb

app = typer.Typer(no_args_is_help=True, add_completion=False)

Pool = Annotated[str, typer.Argument(metavar="POOL", help="The pool's name.")]
Slots = Annotated[int, typer.Argument(metavar="SLOTS", min=0, help="How many slots it has; 0 closes it.")]


@app.callback()
def about() -> None:
    """Pools: named slots that tasks share. A task takes its slots with `@task(pool="warehouse")`."""


@app.command("list", epilog="Example: evertick pools list")
def list_pools(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the pools: their slots, how many are taken, and how many tasks wait."""
    found, _ = ask(
        lambda conn: gates.list_gates(conn, kinds=["pool"], limit=limit),
        far=lambda server: far_fleet.list_pools(server)[:limit],
    )
    if as_json:
        print_json({"pools": [document(pool) for pool in found]})
        return
    if not found:
        show(hint("There are no pools. Make one with: evertick pools set warehouse 4"))
        return
    columns = ("POOL", "#SLOTS", "#USED", "#FREE", "#TASKS", "#WAITING")
    rows: list[list[Cell]] = [
        [pool.name, pool.capacity, pool.used, max(pool.capacity - pool.used, 0), pool.holders, pool.waiters]
        for pool in found
    ]
    show(table(columns, rows))


@app.command("show", epilog="Example: evertick pools show warehouse")
def show_pool(pool: Pool, limit: Limit = 20, as_json: Json = False) -> None:
    """Show who holds a pool's slots, and who waits for them, the next one first."""
    gate_page("pool", ["pool"], pool, limit=limit, as_json=as_json)


# A negative number would otherwise be taken for an option, and the reason would be hidden.
@app.command("set", epilog="Example: evertick pools set warehouse 4", context_settings={"ignore_unknown_options": True})
def set_pool(pool: Pool, slots: Slots) -> None:
    """Make a pool, or change its slots at once. With fewer than are taken, nothing new begins until there is room."""

    async def write(conn: AsyncConnection) -> tuple[bool, int, int]:
        done = await verb.set_pool(conn, name=pool, slots=slots, actor=actor())
        (row,) = [each for each in await gates.list_gates(conn, kinds=["pool"]) if each.name == pool]
        return done.is_new, done.admitted, row.used

    is_new, admitted, used = change(write, Channel.READY, far=lambda server: far_fleet.set_pool(server, pool, slots))
    show(line(f"{'Made' if is_new else 'Pool'} {pool}{' with' if is_new else ' has'} {noun(slots, 'slot')}."))
    if used > slots:
        show(hint(f"{used} are taken: what runs goes on, and nothing new begins until fewer than {slots} are."))
    elif admitted:
        show(hint(f"{noun(admitted, 'task')} could begin."))


@app.command("delete", epilog="Example: evertick pools delete warehouse")
def delete_pool(pool: Pool, yes: Yes = False) -> None:
    """Delete a pool that no DAG needs and no task holds."""
    confirm(f"Delete pool {pool}?", yes=yes)
    change(
        lambda conn: verb.delete_pool(conn, name=pool, actor=actor()),
        far=lambda server: far_fleet.delete_pool(server, pool),
    )
    show(line(f"Deleted pool {pool}."))
