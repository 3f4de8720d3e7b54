"""Brings a database up to this program: the tables by migrations, forward only, one transaction each; then the set of functions.

Safe when many processes start at once, and while the previous release is running. Must never change an applied migration, nor
block other sessions for long on a table that it locks.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import LiteralString

import psycopg
from psycopg import AsyncConnection, conninfo, errors
from psycopg.sql import SQL, Identifier

from evertick.db import function_sets, roles
from evertick.db.connection import disable_timeout, has_own_session, where
from evertick.db.function_sets import FunctionSet, lock_key, own_set, schema_of
from evertick.db.statements import FUNCTIONS_DIRECTORY, query
from evertick.domain.errors import MigrationBlocked, SchemaMismatch

MIGRATIONS_DIRECTORY = Path(__file__).with_name("migrations")


_FILE_NAME = re.compile(r"^(\d{4})_([a-z0-9_]+)\.sql$")


# The first line of a migration that older programs tolerate: the last migration that such a program must know.
_OLDEST_PROGRAM = re.compile(r"^-- oldest program: (\d{4})$", re.MULTILINE)


# The complete text of a migration that builds an index without blocking writes. It cannot run in a transaction.
_INDEX = re.compile(r"create (?:unique )?index concurrently (\w+) on [^;]+;?", re.IGNORECASE)


_TURN_SECONDS = 0.1


LOCK_KEY = 0x65766572746963  # "evertic" in ASCII: any number would do, as long as it never changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file. `oldest_program`: programs whose own migrations end there or later can run with it. `index`: the index
    that it builds concurrently, if it does nothing else."""

    number: int
    name: str
    script: LiteralString
    checksum: str
    oldest_program: int
    index: str | None

    @property
    def label(self) -> str:
        return f"{self.number:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One migration as the database records it. `oldest_program`: programs whose migrations end there or later can keep running."""

    label: str
    applied_at: datetime
    checksum: str
    oldest_program: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaStatus:
    """The applied migrations of a database, and the pending ones. `newer`: those of a later release, with which this program works.

    `missing_functions`: the set of this program, where the database does not have it.
    """

    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]
    newer: tuple[Applied, ...] = ()
    missing_functions: FunctionSet | None = None

    @property
    def is_current(self) -> bool:
        return not self.pending and self.missing_functions is None

    @property
    def next_label(self) -> str | None:
        """What `migrate` does next, if anything."""
        if self.pending:
            return self.pending[0].label
        return None if self.missing_functions is None else self.missing_functions.label


@dataclass(frozen=True, slots=True)
class _InTheWay:
    """A session that holds a lock on one of our tables."""

    pid: int
    application: str
    seconds: float


@query
async def lock(conn: AsyncConnection, *, key: int) -> bool: ...


@query
async def lock_session(conn: AsyncConnection, *, key: int) -> bool: ...


@query
async def unlock_session(conn: AsyncConnection, *, key: int) -> None: ...


@query
async def set_lock_timeout(conn: AsyncConnection, *, seconds: float, is_local: bool) -> None: ...


@query
async def record(conn: AsyncConnection, migration: Migration) -> None: ...


@query
async def in_the_way(conn: AsyncConnection) -> list[_InTheWay]: ...


@query
async def has_record(conn: AsyncConnection) -> bool: ...


@query
async def applied_migrations(conn: AsyncConnection) -> list[Applied]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRetry:
    """How long to wait for a table lock, how long to pause before the next try, and when to give up.

    A waiting lock request blocks all later ones on that table. But the server cancels a blocking autovacuum only for a request
    that has waited longer than its `deadlock_timeout`, which is a second.
    """

    lock_seconds: float = 2.0
    pause_seconds: float = 3.0
    give_up_seconds: float = 600.0


USUAL = LockRetry()


async def migrate(
    conn: AsyncConnection,
    directory: Path = MIGRATIONS_DIRECTORY,
    functions: Path | None = FUNCTIONS_DIRECTORY,
    *,
    patience: LockRetry = USUAL,
    tell: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Apply every pending migration, then install the functions; the labels of what was done, none if the database was current.

    `tell` receives each try that was abandoned because a table was in use. Sets of functions that are no longer used go.
    """
    done: list[str] = []
    give_up_at = time.monotonic() + patience.give_up_seconds
    while not (current := await status(conn, directory, functions)).is_current:
        try:
            if current.pending:
                label = await _apply_next(conn, directory, patience)
            else:
                label = await _install_next(conn, directory, functions, patience)
            if label is None:
                await asyncio.sleep(_TURN_SECONDS)
            else:
                done.append(label)
                give_up_at = time.monotonic() + patience.give_up_seconds
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            blocked = f"{current.next_label} waits for a table that is in use{await _whose(conn)}."
            if time.monotonic() > give_up_at:
                raise MigrationBlocked(
                    f"Migration {blocked} It timed out after {patience.give_up_seconds:g} s and is not applied. End the"
                    " sessions that block it and run `evertick db migrate` again."
                ) from None
            tell(blocked)
            await asyncio.sleep(patience.pause_seconds * random.uniform(0.5, 1.0))
    if functions is not None:
        await _drop_superseded(conn, own_set(functions), patience)
    return done


async def status(
    conn: AsyncConnection, directory: Path = MIGRATIONS_DIRECTORY, functions: Path | None = FUNCTIONS_DIRECTORY
) -> SchemaStatus:
    """Compare the database with the tables and functions of this program. Raises SchemaMismatch where they contradict."""
    known = migrations(directory)
    applied = await applied_migrations(conn) if await has_record(conn) else []
    _refuse_contradiction(known, applied)
    own = None if functions is None else own_set(functions)
    has_functions = own is None or (
        bool(applied) and await function_sets.is_installed(conn, hash=own.hash, schema=own.schema)
    )
    return SchemaStatus(
        applied=tuple(applied),
        pending=tuple(known[len(applied) :]),
        newer=tuple(applied[len(known) :]),
        missing_functions=None if has_functions else own,
    )


def migrations(directory: Path = MIGRATIONS_DIRECTORY) -> list[Migration]:
    """The migrations of a directory in order, numbered from 1 without gaps."""
    found = [_read(path) for path in sorted(directory.glob("*.sql"))]
    for expected, migration in enumerate(found, 1):
        if migration.number != expected:
            raise SchemaMismatch(
                f"Migration {migration.label} is in the place of number {expected:04}: number the files in {directory}"
                " from 0001 without a gap or a repeated number."
            )
    return found


async def _apply_next(conn: AsyncConnection, directory: Path, patience: LockRetry) -> str | None:
    """Apply the first pending migration, unless another process is applying it or just did."""
    disable_timeout(conn)
    async with conn.transaction():
        if not await _lock(conn, patience):
            return None
        await _create_record(conn)
        pending = (await status(conn, directory, None)).pending
        if not pending:
            return None
        migration = pending[0]
        if migration.index is None:
            await conn.execute(migration.script, prepare=False)
            await record(conn, migration)
            # New objects have no grants yet, and replaced ones lost theirs: grant before the commit makes them visible.
            if await roles.are_used(conn):
                await roles.apply(conn, keeps_older=True)
            return migration.label
    return await _make_index(conn, directory, patience)


async def _install_next(
    conn: AsyncConnection, directory: Path, functions: Path | None, patience: LockRetry
) -> str | None:
    """Install the functions, unless another process is at it or did so a moment ago. With their rights, or not at all."""
    disable_timeout(conn)
    async with conn.transaction():
        if not await _lock(conn, patience):
            return None
        missing = (await status(conn, directory, functions)).missing_functions
        if missing is None:
            return None
        await function_sets.install(conn, missing)
        if await roles.are_used(conn):
            await roles.apply(conn, keeps_older=True)
    return missing.label


async def _drop_superseded(conn: AsyncConnection, own: FunctionSet, patience: LockRetry) -> None:
    """Drop the sets of earlier releases that no connection uses. One that cannot be dropped now is dropped by a later migrate."""
    with suppress(errors.LockNotAvailable, errors.DeadlockDetected):
        async with conn.transaction():
            if not await _lock(conn, patience):
                return
            for each in await function_sets.superseded(conn, hash=own.hash):
                if await lock(conn, key=lock_key(each)):
                    await conn.execute(SQL("drop schema if exists {} cascade").format(Identifier(schema_of(each))))
                    await function_sets.forget(conn, hash=each)


async def _lock(conn: AsyncConnection, patience: LockRetry) -> bool:
    """Only one process at a time changes the schema. Never waited for: see migrate.lock."""
    if not await lock(conn, key=LOCK_KEY):
        return False
    # Work on a new table may take long.
    await conn.execute("set local statement_timeout = 0")
    await set_lock_timeout(conn, seconds=patience.lock_seconds, is_local=True)
    return True


async def _make_index(conn: AsyncConnection, directory: Path, patience: LockRetry) -> str | None:
    """Build an index without blocking writers: it waits for older transactions. A failed try leaves an invalid index behind."""
    if not has_own_session(conn):
        raise MigrationBlocked(
            "Building an index concurrently needs its own session, but a pooler is in front of the server. Run"
            " `evertick db migrate` with the server's own address."
        )
    if not await lock_session(conn, key=LOCK_KEY):
        return None
    try:
        pending = (await status(conn, directory, None)).pending
        index = pending[0].index if pending else None
        if index is None:
            return None
        await conn.execute("set statement_timeout = 0")
        await set_lock_timeout(conn, seconds=patience.give_up_seconds, is_local=False)
        await conn.execute(SQL("drop index concurrently if exists {}").format(Identifier("evertick", index)))
        await conn.execute(pending[0].script, prepare=False)
        await record(conn, pending[0])
        return pending[0].label
    finally:
        if not conn.closed:
            await conn.execute("reset statement_timeout")
            await conn.execute("reset lock_timeout")
            await unlock_session(conn, key=LOCK_KEY)


async def _whose(conn: AsyncConnection) -> str:
    """The sessions that have held our tables the longest, for people."""
    found = await in_the_way(conn)
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


def _refuse_contradiction(known: list[Migration], applied: list[Applied]) -> None:
    if any(each.oldest_program > len(known) for each in applied[len(known) :]):
        raise SchemaMismatch(
            f"The database's schema is newer than this program: it has {applied[-1].label}, and this Evertick ends at"
            f" {known[-1].label if known else 'none'}. Upgrade Evertick on this host, or use another database."
        )
    for migration, found in zip(known, applied, strict=False):
        if (migration.label, migration.checksum) != (found.label, found.checksum):
            raise SchemaMismatch(
                f"Migration {migration.label} differs from {found.label} that was applied to this database on"
                f" {found.applied_at:%Y-%m-%d %H:%M} UTC. An applied migration must not change: restore the file and put"
                " the change into a new one, or install the release that this database belongs to."
            )


def _read(path: Path) -> Migration:
    match = _FILE_NAME.match(path.name)
    if match is None:
        raise SchemaMismatch(f"{path.name} is not a valid migration name: it must look like 0001_baseline.sql.")
    text = path.read_text(encoding="utf-8")
    checksum = hashlib.sha256(text.encode()).hexdigest()
    number = int(match[1])
    oldest = _OLDEST_PROGRAM.match(text)
    return Migration(
        number=number,
        name=match[2],
        script=text,
        checksum=checksum,
        # Without a declaration, a program that does not know the migration cannot run with it.
        oldest_program=int(oldest[1]) if oldest else number,
        index=_index_of(text, path),
    )


def _index_of(text: str, path: Path) -> str | None:
    """The index that a script builds concurrently. It must do nothing else: it cannot be rolled back with other changes."""
    bare = re.sub(r"--[^\n]*", "", text).strip()
    found = _INDEX.fullmatch(bare)
    if found is None and re.search(r"\bconcurrently\b", bare, re.IGNORECASE):
        raise SchemaMismatch(
            f"{path.name} does something concurrently: it must be a single `create index concurrently NAME on ...`."
        )
    return found[1] if found else None


def refuse_pending(found: SchemaStatus, url: str) -> None:
    if not found.is_current:
        first = f"lacks migration {found.next_label}" if found.applied else "has no Evertick schema yet"
        raise SchemaMismatch(f"The database at {where(url)} {first}. Run `evertick db migrate`.")


# A running server answers within milliseconds; one that hangs must not block the process that monitors it.
_PATIENCE_SECONDS = 5.0


async def answers(url: str) -> bool:
    """Whether the server answers a query. A process or a socket that merely exists does not count."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            async with await AsyncConnection.connect(url, autocommit=True, connect_timeout=2) as conn:
                await conn.execute("select 1")
    except (psycopg.Error, OSError):
        return False
    return True


async def create_database(url: str) -> None:
    """Create the database that `url` names, unless it exists."""
    name = str(conninfo.conninfo_to_dict(url)["dbname"])
    async with await AsyncConnection.connect(conninfo.make_conninfo(url, dbname="postgres"), autocommit=True) as conn:
        found = await conn.execute("select from pg_database where datname = %s", [name])
        if found.rowcount:
            return
        try:
            await conn.execute(SQL("create database {}").format(Identifier(name)))
        except (errors.DuplicateDatabase, errors.UniqueViolation):
            # Another process created it between the query and the command.
            return
