"""Brings a database's schema up to this program, forward only, one transaction per migration.

Safe when many processes start at once, and while the release before is at work. Must never change an applied migration, nor
keep those waiting for long who use a table that it wants.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import LiteralString

from psycopg import AsyncConnection, errors

from evertick.domain.errors import MigrationBlocked, SchemaMismatch
from evertick.store import roles
from evertick.store.line import take_your_time
from evertick.store.rows import all_rows
from evertick.store.statements import sql

MIGRATIONS_DIRECTORY = Path(__file__).with_name("migrations")

_FILE_NAME = re.compile(r"^(\d{4})_([a-z0-9_]+)\.sql$")
# The first line of a migration beside which older programs may work: the last migration that these must know.
_OLDEST_PROGRAM = re.compile(r"^-- oldest program: (\d{4})$", re.MULTILINE)
LOCK_KEY = 0x65766572746963  # "evertic" in ASCII: any number would do, as long as it never changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file, and what it did to the database if it was applied."""

    number: int
    name: str
    script: LiteralString
    checksum: str
    oldest_program: int

    @property
    def label(self) -> str:
        return f"{self.number:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One migration as the database remembers it. `oldest_program`: whose own migrations end there or later may work on."""

    number: int
    name: str
    applied_at: datetime
    checksum: str
    oldest_program: int

    @property
    def label(self) -> str:
        return f"{self.number:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaStatus:
    """Which migrations a database has, and which it still needs. `newer`: those of a later release, beside which this program may
    work."""

    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]
    newer: tuple[Applied, ...] = ()

    @property
    def is_current(self) -> bool:
        return not self.pending


@dataclass(frozen=True, slots=True)
class _InTheWay:
    """A session that has one of our tables."""

    pid: int
    application: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to ask for a table that somebody uses, how long to leave it to the others before asking again, and when to give up.

    Whoever asks for a table stops everybody who comes later. But the server ends an autovacuum that is in the way only for who has
    asked for longer than its `deadlock_timeout`, which is a second.
    """

    lock_seconds: float = 2.0
    pause_seconds: float = 3.0
    give_up_seconds: float = 600.0


USUAL = Patience()


async def migrate(
    conn: AsyncConnection,
    directory: Path = MIGRATIONS_DIRECTORY,
    *,
    patience: Patience = USUAL,
    tell: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Apply every pending migration and return their labels; the empty list means that nothing was to do.

    `tell` hears of each try that was given up because a table was in use.
    """
    done: list[str] = []
    give_up_at = time.monotonic() + patience.give_up_seconds
    while (current := await status(conn, directory)).pending:
        try:
            if label := await _apply_next(conn, directory, patience):
                done.append(label)
                give_up_at = time.monotonic() + patience.give_up_seconds
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            blocked = f"{current.pending[0].label} waits for a table that is in use{await _whose(conn)}."
            if time.monotonic() > give_up_at:
                raise MigrationBlocked(
                    f"Migration {blocked} It has tried for {patience.give_up_seconds:g} s and changed nothing. End what is"
                    " in its way and run `evertick db migrate` again."
                ) from None
            tell(blocked)
            await asyncio.sleep(patience.pause_seconds * random.uniform(0.5, 1.0))
    return done


async def status(conn: AsyncConnection, directory: Path = MIGRATIONS_DIRECTORY) -> SchemaStatus:
    """Compare the database with the migrations of this program. Raises SchemaMismatch where they contradict."""
    known = migrations(directory)
    applied = await _applied(conn)
    _refuse_contradiction(known, applied)
    return SchemaStatus(
        applied=tuple(applied), pending=tuple(known[len(applied) :]), newer=tuple(applied[len(known) :])
    )


def migrations(directory: Path = MIGRATIONS_DIRECTORY) -> list[Migration]:
    """The migrations of a directory in order, numbered from 1 without a gap."""
    found = [_read(path) for path in sorted(directory.glob("*.sql"))]
    for expected, migration in enumerate(found, 1):
        if migration.number != expected:
            raise SchemaMismatch(
                f"Migration {migration.label} stands where number {expected:04} is due: the files in {directory}"
                " must be numbered from 0001 without a gap or a repeated number."
            )
    return found


async def _apply_next(conn: AsyncConnection, directory: Path, patience: Patience) -> str | None:
    """Apply the first pending migration, if another process did not do so while this one waited for the lock."""
    take_your_time(conn)
    async with conn.transaction():
        # A migration may rewrite a large table, and nine other starters may be waiting for it.
        await conn.execute("set local statement_timeout = 0")
        await conn.execute("set local lock_timeout = 0")
        await conn.execute(sql("migration", "lock"), {"key": LOCK_KEY})
        await conn.execute(sql("migration", "set_lock_timeout"), {"timeout": f"{patience.lock_seconds * 1000:.0f}ms"})
        await _create_record(conn)
        pending = (await status(conn, directory)).pending
        if not pending:
            return None
        migration = pending[0]
        await conn.execute(migration.script, prepare=False)
        await conn.execute(
            sql("migration", "record"),
            {
                "number": migration.number,
                "name": migration.name,
                "checksum": migration.checksum,
                "oldest_program": migration.oldest_program,
            },
        )
        # What is new has no rights yet, and what was replaced has lost them: nobody may see it so.
        if await roles.are_used(conn):
            await roles.apply(conn, keeps_older=True)
    return migration.label


async def _whose(conn: AsyncConnection) -> str:
    """Who has had our tables for longest, for people."""
    found = await all_rows(conn, sql("migration", "in_the_way"), {}, _InTheWay)
    return "".join(f", by {each.application} (pid {each.pid}) for {each.seconds:.0f} s" for each in found)


async def _create_record(conn: AsyncConnection) -> None:
    await conn.execute("set local client_min_messages = warning")
    await conn.execute("create schema if not exists evertick")
    await conn.execute("set local search_path = evertick")
    await conn.execute(
        "create table if not exists evertick.migration ("
        " number int primary key,"
        " name text not null,"
        " applied_at timestamptz not null default clock_timestamp(),"
        " checksum text not null,"
        " oldest_program int not null)"
    )


async def _applied(conn: AsyncConnection) -> list[Applied]:
    found = await (await conn.execute(sql("migration", "has_record"))).fetchone()
    if found is None or not found[0]:
        return []
    rows = await conn.execute(sql("migration", "applied"))
    return [
        Applied(number=number, name=name, applied_at=applied_at, checksum=checksum, oldest_program=oldest_program)
        async for number, name, applied_at, checksum, oldest_program in rows
    ]


def _refuse_contradiction(known: list[Migration], applied: list[Applied]) -> None:
    if any(record.oldest_program > len(known) for record in applied[len(known) :]):
        raise SchemaMismatch(
            f"The database's schema is newer than this program: it has {applied[-1].label}, and this Evertick ends at"
            f" {known[-1].label if known else 'none'}. Upgrade Evertick on this host, or use another database."
        )
    for migration, record in zip(known, applied, strict=False):
        if (migration.number, migration.name, migration.checksum) != (record.number, record.name, record.checksum):
            raise SchemaMismatch(
                f"Migration {migration.label} differs from {record.label} that was applied to this database on"
                f" {record.applied_at:%Y-%m-%d %H:%M} UTC. An applied migration never changes: restore the file and put"
                " the change into a new one, or install the release that this database belongs to."
            )


def _read(path: Path) -> Migration:
    match = _FILE_NAME.match(path.name)
    if match is None:
        raise SchemaMismatch(f"{path.name} is not a migration's name: it must look like 0001_tables.sql.")
    text = path.read_text(encoding="utf-8")
    checksum = hashlib.sha256(text.encode()).hexdigest()
    number = int(match[1])
    oldest = _OLDEST_PROGRAM.match(text)
    return Migration(
        number=number,
        name=match[2],
        script=text,
        checksum=checksum,
        # Without a word about it nobody who does not know it may work with it.
        oldest_program=int(oldest[1]) if oldest else number,
    )
