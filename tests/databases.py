"""The test databases: one server for the whole test run, one migrated template, a fresh copy for each test."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.sql import SQL, Identifier

from evertick.db.connect import Purpose, connect
from evertick.db.function_sets import own_set
from evertick.db.migrate import migrate, migrations
from evertick.supervisor.postgres import EmbeddedPostgres
from tests.waiting import eventually_sync

# A test's data need not outlive a power cut: a database from the template takes 20 ms this way, 50 ms otherwise.
QUICK_SETTINGS = {"fsync": "off", "full_page_writes": "off", "checkpoint_flush_after": "0", "max_connections": "300"}

ROOMY_BYTES = 4 * 1024**3

_TEMPLATE_LOCK = 0x74656D706C617465


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A server on which tests may create databases. `url` names its maintenance database.

    `is_lasting`: nobody stops it while tests run, so that one connection serves for all databases that are made and dropped.
    """

    url: str
    is_lasting: bool = False

    def database_url(self, name: str) -> str:
        return conninfo.make_conninfo(self.url, dbname=name)

    def admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True)

    def template(self) -> str:
        """The name of a database that has every migration and the functions, made once per server and state of these files."""
        name = template_name()
        with self.admin() as admin:
            admin.execute("select pg_advisory_lock(%s)", [_TEMPLATE_LOCK])
            if not admin.execute("select 1 from pg_database where datname = %s", [name]).fetchone():
                self._build(admin, name)
        return name

    def create(self, template: str | None = None) -> str:
        """Create a database, empty or like `template`, and return its name."""
        name = f"test_{uuid.uuid4().hex[:16]}"
        source = SQL("template {} strategy file_copy").format(Identifier(template)) if template else SQL("")
        with self._hand() as admin:
            admin.execute(SQL("create database {} {}").format(Identifier(name), source))
        return name

    def drop(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        with self._hand() as admin:
            let_sessions_end(admin, name)
            admin.execute(SQL("drop database if exists {} with (force)").format(Identifier(name)))

    @contextmanager
    def _hand(self) -> Iterator[psycopg.Connection[Any]]:
        if self.is_lasting:
            yield _lasting_connection(self.url, os.getpid())
            return
        with self.admin() as admin:
            yield admin

    def _build(self, admin: psycopg.Connection[Any], name: str) -> None:
        # Under another name until it is whole: a killed test run must not leave half a template.
        draft = f"{name}_draft"
        admin.execute(SQL("drop database if exists {} with (force)").format(Identifier(draft)))
        admin.execute(SQL("create database {}").format(Identifier(draft)))
        run(_migrate(self.database_url(draft)))
        let_sessions_end(admin, draft)
        admin.execute(SQL("alter database {} rename to {}").format(Identifier(draft), Identifier(name)))


@cache
def _lasting_connection(url: str, process: int) -> psycopg.Connection[Any]:
    """Of this process: one that was forked must not speak on the connection of its parent."""
    return psycopg.connect(url, autocommit=True)


def quick_folder() -> str | None:
    """Where a test's server may live: in memory where there is plenty, because each test copies a database (14 ms there,
    50 to 500 ms on a busy disk). None means the usual place."""
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOMY_BYTES
    return str(memory) if is_roomy else None


def template_name() -> str:
    """One for each state of the migrations and functions, so that programs that differ in them can share a server."""
    checksums = "".join(migration.checksum for migration in migrations()) + own_set().hash
    return f"evertick_template_{hashlib.sha256(checksums.encode()).hexdigest()[:12]}"


@contextmanager
def own_cluster(home: Path, **settings: str) -> Iterator[Cluster]:
    """A server of our own, for as long as the block lasts."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        server = EmbeddedPostgres(home, settings={**QUICK_SETTINGS, **settings})
        url = runner.run(server.start())
        try:
            yield Cluster(url=conninfo.make_conninfo(url, dbname="postgres"))
        finally:
            runner.run(server.stop())


def run(coroutine: Any) -> Any:
    """Run a coroutine from a fixture that has no event loop, leaving the loops of the tests alone."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)


async def _migrate(url: str) -> None:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn)


def let_sessions_end(admin: psycopg.Connection[Any], name: str) -> None:
    """A closed session takes a moment to go, and PostgreSQL would poll for that in steps of 100 ms."""
    query = "select 1 from pg_stat_activity where datname = %s and backend_type = 'client backend'"
    try:
        eventually_sync(lambda: admin.execute(query, [name]).fetchone() is None, within_seconds=0.05)
    except AssertionError:
        return
