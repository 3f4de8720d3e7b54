"""Brings a database's schema up to this program, forward only, one transaction per migration.

Safe when many processes start at once. Must never change an applied migration, nor write to a schema newer than itself.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import LiteralString

from psycopg import AsyncConnection

from evertick.domain.errors import SchemaMismatch
from evertick.store import roles
from evertick.store.line import take_your_time
from evertick.store.statements import sql

MIGRATIONS_DIRECTORY = Path(__file__).with_name("migrations")

_FILE_NAME = re.compile(r"^(\d{4})_([a-z0-9_]+)\.sql$")
LOCK_KEY = 0x65766572746963  # "evertic" in ASCII: any number would do, as long as it never changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file, and what it did to the database if it was applied."""

    number: int
    name: str
    script: LiteralString
    checksum: str

    @property
    def label(self) -> str:
        return f"{self.number:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One migration as the database remembers it."""

    number: int
    name: str
    applied_at: datetime
    checksum: str

    @property
    def label(self) -> str:
        return f"{self.number:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaStatus:
    """Which migrations a database has, and which it still needs."""

    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]

    @property
    def is_current(self) -> bool:
        return not self.pending


async def migrate(conn: AsyncConnection, directory: Path = MIGRATIONS_DIRECTORY) -> list[str]:
    """Apply every pending migration and return their labels; the empty list means that nothing was to do."""
    done: list[str] = []
    current = await status(conn, directory)
    while current.pending:
        if label := await _apply_next(conn, directory):
            done.append(label)
        current = await status(conn, directory)
    if done and await roles.are_used(conn):
        await roles.apply(conn)  # what is new has no rights yet, and what was replaced has lost them
    return done


async def status(conn: AsyncConnection, directory: Path = MIGRATIONS_DIRECTORY) -> SchemaStatus:
    """Compare the database with the migrations of this program. Raises SchemaMismatch where they contradict."""
    known = migrations(directory)
    applied = await _applied(conn)
    _refuse_contradiction(known, applied)
    return SchemaStatus(applied=tuple(applied), pending=tuple(known[len(applied) :]))


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


async def _apply_next(conn: AsyncConnection, directory: Path) -> str | None:
    """Apply the first pending migration, if another process did not do so while this one waited for the lock."""
    take_your_time(conn)
    async with conn.transaction():
        # A migration may rewrite a large table, and nine other starters may be waiting for it.
        await conn.execute("set local statement_timeout = 0")
        await conn.execute("set local lock_timeout = 0")
        await conn.execute(sql("migration", "lock"), {"key": LOCK_KEY})
        # A table lock that is asked for stops everybody who comes later: give up before work piles up behind it.
        await conn.execute("set local lock_timeout = '10s'")
        await _create_record(conn)
        pending = (await status(conn, directory)).pending
        if not pending:
            return None
        migration = pending[0]
        await conn.execute(migration.script, prepare=False)
        await conn.execute(
            sql("migration", "record"),
            {"number": migration.number, "name": migration.name, "checksum": migration.checksum},
        )
    return migration.label


async def _create_record(conn: AsyncConnection) -> None:
    await conn.execute("set local client_min_messages = warning")
    await conn.execute("create schema if not exists evertick")
    await conn.execute("set local search_path = evertick")
    await conn.execute(
        "create table if not exists evertick.migration ("
        " number int primary key,"
        " name text not null,"
        " applied_at timestamptz not null default clock_timestamp(),"
        " checksum text not null)"
    )


async def _applied(conn: AsyncConnection) -> list[Applied]:
    found = await (await conn.execute(sql("migration", "has_record"))).fetchone()
    if found is None or not found[0]:
        return []
    rows = await conn.execute(sql("migration", "applied"))
    return [
        Applied(number=number, name=name, applied_at=applied_at, checksum=checksum)
        async for number, name, applied_at, checksum in rows
    ]


def _refuse_contradiction(known: list[Migration], applied: list[Applied]) -> None:
    if len(applied) > len(known):
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
    return Migration(number=int(match[1]), name=match[2], script=text, checksum=checksum)
