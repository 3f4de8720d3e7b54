"""`evertick db`: the database as a whole. Migrates it, prunes it, and tells how it stands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli.connection import database_url, opened
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, noun
from evertick.cli.prune import prune_database
from evertick.cli.tables import Cell, facts, hint, line, show, state
from evertick.config import read_settings
from evertick.db import failover, roles
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.connection import where
from evertick.db.failover import Timeline
from evertick.db.migrate import SchemaStatus, migrate, status
from evertick.db.queries import retention, runners, server, shards
from evertick.db.queries.server import TableSize
from evertick.domain.durations import relative
from evertick.domain.errors import SchemaMismatch
from evertick.domain.retention import Dated

SHARD = 0
_LARGEST = 3

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Bring the database up to date, or see how it stands."
)
app.command("prune", epilog="Example: evertick db prune --older-than 30d --dry-run")(prune_database)


@app.command("migrate", epilog="Example: evertick db migrate")
def migrate_database() -> None:
    """Apply pending migrations and install the functions of this release.

    Safe to run at any time, concurrently, while services work. If a table is in use for long, it retries for ten minutes.
    """
    url = database_url(read_settings())

    async def apply() -> list[str]:
        with with_advice(url):
            async with await connect(url, purpose=Purpose.PLANNING) as conn:
                return await migrate(conn, tell=lambda text: typer.echo(text, err=True))

    applied = asyncio.run(apply())
    for label in applied:
        show(line(f"Applied {label}"))
    show(line(f"The database at {where(url)} is up to date.", "green"))


@app.command("roles", epilog="Example: evertick db roles > roles.sql")
def make_roles(
    is_applied: Annotated[bool, typer.Option("--apply", help="Do it, as the owner of the schema.")] = False,
    keeps_older: Annotated[
        bool, typer.Option("--keep", help="Take nothing away: services of another release are at work.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the SQL that makes a role for each kind of service, with the right to what it needs and nothing else.

    Afterwards make a login for each machine: create role berlin login password '...' in role evertick_runner.
    Migrations renew these rights by themselves.
    """
    url = database_url(read_settings())

    async def make() -> list[str]:
        async with opened(url, Purpose.PLANNING) as conn:
            newer = (await status(conn)).newer
            if newer and not keeps_older:
                raise SchemaMismatch(
                    f"The database at {where(url)} has {newer[-1].label} of a later release, whose services need rights that"
                    " this program does not know of. Run this with that release, or with --keep."
                )
            lines = await roles.script(conn, keeps_older=keeps_older)
            if is_applied:
                await roles.apply(conn, keeps_older=keeps_older)
            return lines

    lines = asyncio.run(make())
    if as_json:
        print_json({"is_applied": is_applied, "roles": list(roles.MAY), "statements": lines})
    elif is_applied:
        show(line(f"{', '.join(roles.MAY)} have what they need in the database at {where(url)}.", "green"))
        show(hint("Make a login in one of them: create role berlin login password '...' in role evertick_runner;"))
    else:
        typer.echo("begin;\n" + "".join(f"{each};\n" for each in lines) + "commit;")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a database stands. Who leads, who lives, where it has lived and what is in it is known of a current schema only."""

    place: str
    server_version: str
    schema: SchemaStatus
    leader: str | None
    runners: int
    timelines: list[Timeline]
    tables: list[TableSize]
    oldest_run: Dated | None
    read_at: datetime

    @property
    def bytes(self) -> int:
        return sum(table.bytes for table in self.tables)


@app.command("status", epilog="Example: evertick db status --json")
def show_status(as_json: Json = False) -> None:
    """Where the database is, whether its schema is current, who leads and lives, its size and age, what a failover cost."""
    url = database_url(read_settings())

    async def look() -> Standing:
        with with_advice(url):
            async with await connect(url, purpose=Purpose.READ) as conn:
                return await _look(conn, where(url))

    found = asyncio.run(look())
    if as_json:
        print_json(_document(found))
    else:
        _show(found)
    if not found.schema.is_current:
        raise typer.Exit(1)


async def _look(conn: AsyncConnection, place: str) -> Standing:
    schema = await status(conn)
    leader = await shards.leader(conn, shard=SHARD) if schema.is_current else None
    version = conn.info.server_version
    return Standing(
        place=place,
        server_version=f"{version // 10000}.{version % 10000}",
        schema=schema,
        leader=leader.owner if leader and leader.is_live else None,
        runners=len(await runners.live(conn)) if schema.is_current else 0,
        timelines=await failover.history(conn) if schema.is_current else [],
        tables=await server.sizes(conn) if schema.is_current else [],
        oldest_run=await retention.run_at_or_above(conn, 0) if schema.is_current else None,
        read_at=await shards.read_clock(conn) if schema.is_current else datetime.now(UTC),
    )


def _document(found: Standing) -> dict[str, object]:
    return {
        "database": found.place,
        "server_version": found.server_version,
        "is_current": found.schema.is_current,
        "applied": [{"migration": each.label, "applied_at": each.applied_at} for each in found.schema.applied],
        "pending": [each.label for each in found.schema.pending],
        "newer": [each.label for each in found.schema.newer],
        "missing_functions": found.schema.missing_functions.hash if found.schema.missing_functions else None,
        "leader": found.leader,
        "runners": found.runners,
        "bytes": found.bytes,
        "tables": {table.name: table.bytes for table in found.tables},
        "oldest_run_at": found.oldest_run.created_at if found.oldest_run else None,
        # A system identifier is 64 bits, more than a number in JavaScript holds.
        "timelines": [{**document(each), "system_id": str(each.system_id)} for each in found.timelines],
    }


def _show(found: Standing) -> None:
    applied, is_current = found.schema.applied, found.schema.is_current
    newest = applied[-1].label if applied else "none"
    schema = state("success", f"current ({newest})") if is_current else state("failed", f"behind ({newest})")
    if found.schema.newer:
        schema = state("running", f"of a later release ({newest}), with which this one works")
    values: dict[str, Cell] = {"Database": found.place, "PostgreSQL": found.server_version, "Schema": schema}
    if is_current:
        values |= {"Scheduler": found.leader or "nobody leads", "Runners": noun(found.runners, "runner") + " alive"}
        values |= _age_and_size(found)
    if len(found.timelines) > 1:
        now = found.timelines[0]
        values["Failover"] = f"to timeline {now.timeline} at {now.first_seen_at:%Y-%m-%d %H:%M:%S} UTC"
    for each in found.timelines:
        if each.lost_until:
            lost = f"acknowledged writes of timeline {each.timeline} after {each.lsn}, at least until {each.lost_until}"
            values["Lost"] = state("failed", lost)
    show(facts(values))
    if not is_current:
        functions = found.schema.missing_functions
        pending = [each.label for each in found.schema.pending] + ([functions.label] if functions else [])
        names = ", ".join(pending)
        show(hint(f"Pending: {names}. Apply them with: evertick db migrate"))


def _age_and_size(found: Standing) -> dict[str, Cell]:
    largest = ", ".join(f"{table.name} {_megabytes(table.bytes)}" for table in found.tables[:_LARGEST])
    oldest = found.oldest_run
    return {
        "Size": f"{_megabytes(found.bytes)} ({largest}, ...)",
        "Oldest run": f"{relative(oldest.created_at, found.read_at)} (run {oldest.id})" if oldest else "no runs yet",
    }


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
