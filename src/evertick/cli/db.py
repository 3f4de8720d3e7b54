"""`evertick db`: the database as a whole. Migrates it, and tells how it stands."""

from __future__ import annotations

import asyncio

import typer
from psycopg import AsyncConnection

from evertick.cli.connection import database_url, telling
from evertick.cli.documents import print_json
from evertick.cli.options import Json, noun
from evertick.cli.tables import Cell, facts, hint, line, show, state
from evertick.config import read_settings
from evertick.store import runners, shards
from evertick.store.db import Purpose, connect, where
from evertick.store.migrate import SchemaStatus, migrate, status

SHARD = 0

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Bring the database up to date, or see how it stands."
)


@app.command("migrate", epilog="Example: evertick db migrate")
def migrate_database() -> None:
    """Apply every migration that the database lacks. Safe to run at any time, by several at once."""
    url = database_url(read_settings())

    async def apply() -> list[str]:
        with telling(url):
            async with await connect(url, purpose=Purpose.PLANNING) as conn:
                return await migrate(conn)

    applied = asyncio.run(apply())
    for label in applied:
        show(line(f"Applied {label}"))
    show(line(f"The database at {where(url)} is up to date.", "green"))


@app.command("status", epilog="Example: evertick db status --json")
def show_status(as_json: Json = False) -> None:
    """Where the database is, whether its schema is current, who leads, and how many runners live."""
    url = database_url(read_settings())

    async def look() -> tuple[str, SchemaStatus, str | None, int]:
        with telling(url):
            async with await connect(url, purpose=Purpose.READ) as conn:
                found = await status(conn)
                leader, live = await _who(conn) if found.is_current else (None, 0)
                version = conn.info.server_version
                return f"{version // 10000}.{version % 10000}", found, leader, live

    server, found, leader, live = asyncio.run(look())
    if as_json:
        print_json(
            {
                "database": where(url),
                "server_version": server,
                "is_current": found.is_current,
                "applied": [{"migration": each.label, "applied_at": each.applied_at} for each in found.applied],
                "pending": [each.label for each in found.pending],
                "leader": leader,
                "runners": live,
            }
        )
    else:
        _show_status(where(url), server, found, leader or "nobody leads", live)
    if found.pending:
        raise typer.Exit(1)


async def _who(conn: AsyncConnection) -> tuple[str | None, int]:
    """Who leads, and how many runners are alive."""
    leader = await shards.leader(conn, shard=SHARD)
    return leader.owner if leader and leader.is_live else None, len(await runners.live(conn))


def _show_status(place: str, server: str, found: SchemaStatus, leader: str, live: int) -> None:
    newest = found.applied[-1].label if found.applied else "none"
    schema = state("success", f"current ({newest})") if found.is_current else state("failed", f"behind ({newest})")
    values: dict[str, Cell] = {"Database": place, "PostgreSQL": server, "Schema": schema}
    if found.is_current:
        values |= {"Scheduler": leader, "Runners": noun(live, "runner") + " alive"}
    show(facts(values))
    if found.pending:
        names = ", ".join(each.label for each in found.pending)
        show(hint(f"Pending: {names}. Apply them with: evertick db migrate"))
