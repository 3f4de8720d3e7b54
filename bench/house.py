"""An installation to measure: a durable PostgreSQL, a database, and the services as `evertick up` runs them.

Each service is a process of its own with the product's defaults. Never trades durability, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import psycopg
from psycopg import AsyncConnection, conninfo
from psycopg.sql import SQL, Identifier

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.function_sets import own_set
from evertick.db.migrate import create_database, migrate, migrations
from evertick.db.queries import dags
from evertick.processes.system import die_with_parent
from evertick.supervisor.postgres import EmbeddedPostgres

ROOT = Path(__file__).parents[1]
DAGS = Path(__file__).with_name("dags")
LIGHT = tuple(f"{name}_{isolation}" for name in ("chain", "fan", "single", "held") for isolation in ("process", "warm"))

_READY_SECONDS = 60.0
_STOP_SECONDS = 20.0
_LOG_LINES = 15

Launcher = Callable[[str, int], Sequence[str]]


class NotMeasured(Exception):
    """A figure could not be measured; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A PostgreSQL server to create databases on. `url` names its maintenance database."""

    url: str

    def url_of(self, name: str) -> str:
        return conninfo.make_conninfo(self.url, dbname=name)

    async def make(self, name: str, *, is_migrated: bool = True) -> str:
        """Create a database, by default with the schema. Returns its URL."""
        await self.drop(name)
        source = SQL("template {}").format(Identifier(await self._template())) if is_migrated else SQL("")
        async with await AsyncConnection.connect(self.url, autocommit=True) as conn:
            await conn.execute(SQL("create database {} {}").format(Identifier(name), source))
        return self.url_of(name)

    async def _template(self) -> str:
        """A template database with the schema: running all migrations takes a second, copying a tenth of that."""
        name = template_name()
        async with await AsyncConnection.connect(self.url, autocommit=True) as conn:
            found = await conn.execute("select from pg_database where datname = %s", [name])
        if not found.rowcount:
            # Created under another name until it is complete: a killed run must not leave half of it.
            draft = f"{name}_draft"
            await self.drop(draft)
            await create_database(self.url_of(draft))
            async with await connect(self.url_of(draft), purpose=Purpose.SCHEDULER) as conn:
                await migrate(conn)
            async with await AsyncConnection.connect(self.url, autocommit=True) as conn:
                await conn.execute(SQL("alter database {} rename to {}").format(Identifier(draft), Identifier(name)))
        return name

    async def drop(self, name: str) -> None:
        async with await AsyncConnection.connect(self.url, autocommit=True) as conn:
            await conn.execute(SQL("drop database if exists {} with (force)").format(Identifier(name)))


def template_name() -> str:
    """One for each state of the migrations and functions: a killed benchmark may have left one on the server."""
    checksums = "".join(migration.checksum for migration in migrations()) + own_set().hash
    return f"bench_template_{hashlib.sha256(checksums.encode()).hexdigest()[:12]}"


@asynccontextmanager
async def working_folder() -> AsyncIterator[Path]:
    """A folder on the project's own disk, because a file system in memory would make fsync cost nothing."""
    parent = ROOT / "build"
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def postgres(folder: Path, *, url: str | None = None) -> AsyncIterator[Server]:
    """The server at `url`, or an embedded one with the product's own settings within the block."""
    if url is not None:
        given = Server(url=url)
        try:
            yield given
        finally:
            await given.drop(template_name())
        return
    embedded = EmbeddedPostgres(folder / "home")
    started = await embedded.start()
    try:
        yield Server(url=conninfo.make_conninfo(started, dbname="postgres"))
    finally:
        await embedded.stop()


def as_installed(service: str, number: int) -> Sequence[str]:
    """The command with which `evertick up` starts a service."""
    return (sys.executable, "-m", "evertick.cli.main", service)


def service_environment(**settings: str) -> dict[str, str]:
    """This environment with these settings and byte code enabled, because installed products have compiled byte code."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **settings}


class House:
    """`async with House(url=..., folder=...) as house:`; the services are up, and the light DAGs published."""

    def __init__(
        self,
        *,
        url: str,
        folder: Path,
        slots: int | None = None,
        runners: int = 1,
        launcher: Launcher = as_installed,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.url, self.folder, self.runners = url, folder, runners
        self.slots = slots or Settings().runner_slots
        self._dags, self._launcher = folder / "dags", launcher
        slots_setting = {} if slots is None else {"EVERTICK_RUNNER_SLOTS": str(slots)}
        self._settings = {**slots_setting, **settings}
        self.services: dict[str, Process] = {}
        self.conn: AsyncConnection

    async def __aenter__(self) -> Self:
        self._dags.mkdir(parents=True, exist_ok=True)
        self.conn = await connect(self.url, purpose=Purpose.SCHEDULER)
        try:
            for service in ("scheduler", "publisher", *(f"runner-{number}" for number in range(self.runners))):
                self.services[service] = await self._start(service)
            await self.until(self._leads, "the scheduler leads")
            await self.until(self._has_runners, f"{self.runners} runners are registered")
            await self.publish("light.py", LIGHT)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def restart(self, service: str, settings: Mapping[str, str]) -> None:
        """Restart a service with other settings; for a scheduler, wait until it leads."""
        self.services[service].terminate()
        await self.services[service].wait()
        self._settings |= settings
        self.services[service] = await self._start(service)
        await self.until(self._leads, "the scheduler leads")

    async def add(self, service: str, settings: Mapping[str, str]) -> None:
        """Start one more service with its own settings."""
        kept, self._settings = self._settings, {**self._settings, **settings}
        try:
            self.services[service] = await self._start(service)
        finally:
            self._settings = kept

    async def publish(self, file: str, expected: Sequence[str], **replaced: str) -> None:
        """Copy a file of bench/dags into the watched folder, with some text replaced, and wait until its DAGs are published."""
        text = (DAGS / file).read_text(encoding="utf-8")
        for old, new in replaced.items():
            text = text.replace(f"{old} = ", f"{old} = {new}  # ")
        # Atomically, because the publisher may scan at any moment.
        draft = self.folder / file
        draft.write_text(text, encoding="utf-8")
        draft.replace(self._dags / file)

        async def are_published() -> bool:
            found = [await dags.find(self.conn, name) for name in expected]
            return all(row is not None and row.version_id is not None and row.deleted_at is None for row in found)

        await self.until(are_published, f"{file} is published")

    async def withdraw(self, file: str, names: Sequence[str]) -> None:
        """Remove a file and wait until its DAGs are deleted."""
        (self._dags / file).unlink()

        async def are_gone() -> bool:
            found = [await dags.find(self.conn, name) for name in names]
            return all(row is None or row.deleted_at is not None for row in found)

        await self.until(are_gone, f"{file} is withdrawn")

    async def until(
        self,
        is_so: Callable[[], Awaitable[bool]],
        what: str,
        *,
        within_seconds: float = _READY_SECONDS,
        pause_seconds: float = 0.02,
    ) -> None:
        """Wait for a condition. Raises NotMeasured if a service died or the deadline passed."""
        deadline = time.monotonic() + within_seconds
        while not await is_so():
            for name, service in self.services.items():
                if service.returncode is not None:
                    raise NotMeasured(f"{name} ended with exit code {service.returncode}:\n{self._tail(name)}")
            if time.monotonic() > deadline:
                tails = "\n".join(f"[{name}]\n{self._tail(name)}" for name in self.services)
                raise NotMeasured(f"not within {within_seconds:g} s: {what}\n{tails}")
            await asyncio.sleep(pause_seconds)

    async def _start(self, service: str) -> Process:
        kind, _, number = service.partition("-")
        settings = {
            "EVERTICK_DATABASE_URL": self.url,
            "EVERTICK_HOME": str(self.folder / "home"),
            "EVERTICK_DAGS_FOLDER": str(self._dags),
            "EVERTICK_LOG": "json",
            "EVERTICK_RUNNER_ID": service,
            **self._settings,
        }
        parent = os.getpid()
        with (self.folder / f"{service}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *self._launcher(kind, int(number or 0)),
                env=service_environment(**settings),
                cwd=ROOT,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
            )

    async def _leads(self) -> bool:
        cursor = await self.conn.execute("select 1 from shard where lease_until > clock()")
        return await cursor.fetchone() is not None

    async def _has_runners(self) -> bool:
        cursor = await self.conn.execute("select count(*) from runner where ended_at is null")
        row = await cursor.fetchone()
        return row is not None and row[0] >= self.runners

    async def _stop(self) -> None:
        alive = [service for service in self.services.values() if service.returncode is None]
        for service in alive:
            with suppress(ProcessLookupError):
                service.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.gather(*(service.wait() for service in alive))
        for service in alive:
            if service.returncode is None:
                service.kill()
                await service.wait()
        with suppress(psycopg.Error):
            await self.conn.close()

    def _tail(self, service: str) -> str:
        text = (self.folder / f"{service}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LOG_LINES:]) or "(no output)"
