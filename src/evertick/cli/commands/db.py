"""`evertick db`: migrate and prune the database, make its roles, and show its status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from psycopg import AsyncConnection
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from evertick.cli.app import Group
from evertick.cli.options import DryRun, Json, Yes, confirm, noun
from evertick.cli.output import Cell, clock, console, document, facts, hint, line, print_json, show, state
from evertick.client.local import database_url, opened, user_name
from evertick.config import Settings, read_settings
from evertick.db import failover, roles
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.connection import where
from evertick.db.failover import Timeline
from evertick.db.migrate import SchemaStatus, migrate, status
from evertick.db.queries import retention, runners, server, shards
from evertick.db.queries.server import TableSize
from evertick.domain.access import Actor
from evertick.domain.durations import length, parse_duration, relative
from evertick.domain.errors import NotLeader, SchemaMismatch, UserError
from evertick.domain.retention import Dated, choose, rest_seconds
from evertick.engine.retention import Kind
from evertick.scheduler.retention import PruneRound, RetentionLimits, limits_of, old_run_ids

SHARD = 0
_LARGEST = 3
_WALK = 1000

app = Group()

# Singular and plural, for messages.
_NAMES = {
    Kind.RUNS: ("run", "runs"),
    Kind.JOURNAL: ("journal entry", "journal entries"),
    Kind.SKIP_RECORDS: ("skip record", "skip records"),
    Kind.ALERTS: ("alert", "alerts"),
    Kind.VIOLATIONS: ("violation that ended", "violations that ended"),
    Kind.NOTIFICATIONS: ("notification", "notifications"),
    Kind.BACKFILLS: ("backfill that is over", "backfills that are over"),
    Kind.CAUSES: ("cause of a run", "causes of runs"),
    Kind.EVENTS: ("event", "events"),
    Kind.ASSET_UPDATES: ("update of an asset", "updates of assets"),
    Kind.STATE: ("expired value of state", "expired values of state"),
    Kind.RUNNERS: ("runner that is gone", "runners that are gone"),
    Kind.VERSIONS: ("DAG version", "DAG versions"),
    Kind.BUNDLES: ("bundle of code", "bundles of code"),
    Kind.DEPLOYMENTS: ("old deployment", "old deployments"),
}

OlderThan = Annotated[
    str | None,
    typer.Option("--older-than", metavar="DURATION", help="Minimum age: 30d, 12h; EVERTICK_RETENTION_DAYS by default."),
]
Advance = Callable[[int], None]


@app.command("migrate", epilog="Example: evertick db migrate")
def migrate_database() -> None:
    """Apply every migration that the database lacks. Safe to run at any time, by several at once, while services work.

    If a table stays locked for long, the migration lets the others continue and tries again, for ten minutes.
    """
    url = database_url(read_settings())

    async def apply() -> list[str]:
        with with_advice(url):
            async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
                return await migrate(conn, tell=lambda text: typer.echo(text, err=True))

    applied = asyncio.run(apply())
    for label in applied:
        show(line(f"Applied {label}"))
    show(line(f"The database at {where(url)} is up to date.", "green"))


@app.command("roles", epilog="Example: evertick db roles > roles.sql")
def make_roles(
    is_applied: Annotated[bool, typer.Option("--apply", help="Apply it, as the owner of the schema.")] = False,
    keeps_older: Annotated[
        bool, typer.Option("--keep", help="Revoke nothing: services of another release are running.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the SQL that makes a role for each kind of service, with only the rights that it needs.

    Afterwards make a login for each machine: create role berlin login password '...' in role evertick_runner.
    Migrations renew these rights by themselves.
    """
    url = database_url(read_settings())

    async def make() -> list[str]:
        async with opened(url, Purpose.SCHEDULER) as conn:
            newer = (await status(conn)).newer
            if newer and not keeps_older:
                raise SchemaMismatch(
                    f"The database at {where(url)} has {newer[-1].label} of a later release, whose services need rights that"
                    " this program does not know. Run this with that release, or with --keep."
                )
            lines = await roles.script(conn, keeps_older=keeps_older)
            if is_applied:
                await roles.apply(conn, keeps_older=keeps_older)
            return lines

    lines = asyncio.run(make())
    if as_json:
        print_json({"is_applied": is_applied, "roles": list(roles.MAY), "statements": lines})
    elif is_applied:
        show(line(f"{', '.join(roles.MAY)} have their rights in the database at {where(url)}.", "green"))
        show(hint("Make a login in one of them: create role berlin login password '...' in role evertick_runner;"))
    else:
        typer.echo("begin;\n" + "".join(f"{each};\n" for each in lines) + "commit;")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """The status of a database. Leader, runners, timelines and sizes are known only for a current schema."""

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
    """Show the database's address, schema, leader, runners, size and age, and writes lost in failovers."""
    url = database_url(read_settings())

    async def read() -> DatabaseStatus:
        with with_advice(url):
            async with await connect(url, purpose=Purpose.READ) as conn:
                return await _read_status(conn, where(url))

    found = asyncio.run(read())
    if as_json:
        print_json(_document(found))
    else:
        _show(found)
    if not found.schema.is_current:
        raise typer.Exit(1)


async def _read_status(conn: AsyncConnection, place: str) -> DatabaseStatus:
    schema = await status(conn)
    leader = await shards.leader(conn, shard=SHARD) if schema.is_current else None
    version = conn.info.server_version
    return DatabaseStatus(
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


def _document(found: DatabaseStatus) -> dict[str, object]:
    return {
        "database": found.place,
        "server_version": found.server_version,
        "is_current": found.schema.is_current,
        "applied": [{"migration": each.label, "applied_at": each.applied_at} for each in found.schema.applied],
        "pending": [each.label for each in found.schema.pending],
        "missing_functions": found.schema.missing_functions.hash if found.schema.missing_functions else None,
        "newer": [each.label for each in found.schema.newer],
        "leader": found.leader,
        "runners": found.runners,
        "bytes": found.bytes,
        "tables": {table.name: table.bytes for table in found.tables},
        "oldest_run_at": found.oldest_run.created_at if found.oldest_run else None,
        # A system identifier is 64 bits, more than a number in JavaScript holds.
        "timelines": [{**document(each), "system_id": str(each.system_id)} for each in found.timelines],
    }


def _show(found: DatabaseStatus) -> None:
    applied, is_current = found.schema.applied, found.schema.is_current
    newest = applied[-1].label if applied else "none"
    schema = state("success", f"current ({newest})") if is_current else state("failed", f"behind ({newest})")
    if found.schema.newer:
        schema = state("running", f"of a later release ({newest}), with which this one works")
    values: dict[str, Cell] = {"Database": found.place, "PostgreSQL": found.server_version, "Schema": schema}
    if is_current:
        values |= {"Scheduler": found.leader or "none", "Runners": noun(found.runners, "runner") + " alive"}
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


def _age_and_size(found: DatabaseStatus) -> dict[str, Cell]:
    largest = ", ".join(f"{table.name} {_megabytes(table.bytes)}" for table in found.tables[:_LARGEST])
    oldest = found.oldest_run
    return {
        "Size": f"{_megabytes(found.bytes)} ({largest}, ...)",
        "Oldest run": f"{relative(oldest.created_at, found.read_at)} (run {oldest.id})" if oldest else "no runs yet",
    }


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


# Pruning --------------------------------------------------------------------------------------------------------------


@app.command("prune", epilog="Example: evertick db prune --older-than 30d --dry-run")
def prune_database(
    older_than: OlderThan = None, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Delete old runs with their tasks, logs and results, and all unused data.

    The leader does this by itself for runs older than the retention. Other work continues and is not slowed down.
    """
    settings = read_settings()
    url = database_url(settings)
    kept = _kept(older_than, settings)
    ids, now = asyncio.run(_old_runs(url, kept))
    before = now - kept
    if dry_run:
        with _bar(ids, shown=not as_json) as advance:
            found = asyncio.run(_count(url, before, now, advance))
        _show_pruned(found, before, kept, as_json=as_json, is_dry=True)
        return
    confirm(f"Delete about {noun(len(ids), 'run')} that ended before {clock(before)}, for good?", yes=yes)
    with _bar(ids, shown=not as_json) as advance:
        done = asyncio.run(_prune(url, limits_of(now, kept), advance))
    _show_pruned(done.counts, before, kept, as_json=as_json, is_dry=False)
    if done.refused:
        numbers = ", ".join(map(str, done.refused[:10]))
        raise UserError(
            f"PostgreSQL refused to delete {noun(len(done.refused), 'run')}: {numbers}. See the server's log."
        )


def _kept(older_than: str | None, settings: Settings) -> timedelta:
    if older_than is None:
        if not settings.retention_days:
            raise UserError(
                "EVERTICK_RETENTION_DAYS is 0: everything is kept. Name an age with --older-than, such as 30d."
            )
        return timedelta(days=settings.retention_days)
    try:
        return parse_duration(older_than)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--older-than {older_than!r}: {error}.") from None


async def _old_runs(url: str, kept: timedelta) -> tuple[range, datetime]:
    """The ids of runs that may be old enough, and the time of the database."""
    async with opened(url, Purpose.READ) as conn:
        now = await shards.read_clock(conn)
        try:
            before = now - kept
        except OverflowError:
            raise UserError("--older-than reaches back beyond the calendar. Name a shorter time.") from None
        return await old_run_ids(conn, before=before), now


async def _count(url: str, before: datetime, now: datetime, advance: Advance) -> dict[Kind, int]:
    runs, after, is_end = 0, 0, False
    async with opened(url, Purpose.READ) as conn:
        while not is_end:
            seen = await retention.walk_runs(conn, after=after, batch=_WALK)
            chosen = choose(seen, after=after, before=before, now=now)
            runs, after, is_end = runs + len(chosen.ids), chosen.last, chosen.is_end
            advance(after)
        old = await retention.count_old(conn, before=before)
    return {Kind.RUNS: runs, Kind.JOURNAL: old.journal, Kind.SKIP_RECORDS: old.skip_records}


async def _prune(url: str, limits: RetentionLimits, advance: Advance) -> PruneRound:
    """In the name of the leader of each step. The leader may change between two steps."""
    done = PruneRound(limits, actor=Actor(f"cli:{user_name()}"))
    async with opened(url, Purpose.SCHEDULER) as conn:
        while not done.is_over:
            leader = await shards.leader(conn, shard=SHARD)
            started = time.monotonic()
            try:
                await done.step(conn, epoch=leader.epoch if leader else 0)
            except NotLeader:
                continue
            advance(done.last_run_id)
            took = time.monotonic() - started
            await asyncio.sleep(rest_seconds(took, is_behind=await server.is_behind(conn)))
    return done


@contextmanager
def _bar(ids: range, *, shown: bool) -> Iterator[Advance]:
    """A progress bar over the runs, on a terminal."""
    out = console()
    if not shown or not out.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        bar = progress.add_task("runs", total=max(len(ids), 1))
        yield lambda last: progress.update(bar, completed=last - ids.start)


def _show_pruned(counts: Mapping[Kind, int], before: datetime, kept: timedelta, *, as_json: bool, is_dry: bool) -> None:
    if as_json:
        return print_json(
            {"before": before, "is_dry_run": is_dry, **{kind.value: counts.get(kind, 0) for kind in Kind}}
        )
    parts = [f"{count:,} {_NAMES[kind][count != 1]}" for kind, count in counts.items() if count]
    age = f"older than {length(kept.total_seconds())} (before {clock(before)})"
    if not parts:
        show(line(f"Nothing is {age}."))
    elif is_dry:
        show(line(f"Would delete {', '.join(parts)}: {age}."))
        show(hint("Versions and code that no run needs then go as well. Without --dry-run it is done."))
    else:
        show(line(f"Deleted {', '.join(parts)}: {age}.", "green"))
