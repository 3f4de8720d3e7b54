"""A PostgreSQL that the fault suite owns: on memory, over TCP, stopped, killed and started again as often as wished.

It dies with the process that started it. Must never touch a server or a folder that is not its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from psycopg import conninfo

from evertick.db.connect import Purpose, connect
from evertick.db.migrate import answers, create_database, migrate
from evertick.supervisor.postgres import environment, initialise, launch_command, programs, stop_old_server
from tests.ports import own_port
from tests.waiting import eventually

DATABASE = "evertick"
READY_WITHIN_SECONDS = 60.0

# What the embedded server sets, as far as it decides behaviour. On memory a sync costs nothing, so nothing is traded.
SETTINGS: dict[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    # A killed server must leave nothing outside of its folder.
    "dynamic_shared_memory_type": "mmap",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "autovacuum_naptime": "10s",
    "io_method": "sync",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    "log_destination": "stderr",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A data directory with a migrated database in it, to be copied for each server (initdb takes a second)."""

    data: Path


@dataclass(slots=True, kw_only=True)
class PostgresServer:
    """`folder` holds its data and its log. `extra` goes into its environment."""

    folder: Path
    port: int
    settings: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    _process: Process | None = None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "postgres.log"

    @property
    def url(self) -> str:
        """Straight to the server, past every proxy."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgresql://evertick@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> float:
        """Start it and wait until it answers; returns the seconds that took. After a kill, what is left goes first."""
        began = time.monotonic()
        while True:
            await self._launch()
            if await self._is_ready(began + READY_WITHIN_SECONDS):
                return time.monotonic() - began
            assert time.monotonic() < began + READY_WITHIN_SECONDS, f"PostgreSQL does not start:\n{self.tail()}"

    async def _launch(self) -> None:
        stale = await stop_old_server(self.data)
        # See EmbeddedPostgres._launch: a stale lock file may name a pid that somebody else has by now.
        marks = {} if stale is None else {"PG_GRANDPARENT_PID": str(stale)}
        options = [part for name, value in {**SETTINGS, **self.settings}.items() for part in ("-c", f"{name}={value}")]
        program = [programs() / "postgres", "-D", self.data, "-p", str(self.port), *options]
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launch_command(self.data, signal.SIGQUIT, [str(part) for part in program]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(**marks, **self.extra),
                start_new_session=True,
            )
            self.pids.add(self._process.pid)
        finally:
            os.close(log)

    async def _is_ready(self, deadline: float) -> bool:
        """False when the process ended instead: the next try may find the port or the folder free."""
        process = self._process
        assert process is not None
        answered = False

        async def settled() -> bool:
            nonlocal answered
            answered = await answers(self.url_of("postgres"))
            return answered or process.returncode is not None

        await eventually(settled, max(deadline - time.monotonic(), 1.0), pause_seconds=0.02)
        return answered

    async def stop(self, how: str = "fast") -> None:
        """`fast` ends sessions and writes a checkpoint; `immediate` is a crash that the next start recovers from."""
        await self._end({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[how])

    async def kill(self) -> None:
        """kill -9 of the postmaster; its backends find out by themselves."""
        await self._end(signal.SIGKILL)

    async def _end(self, with_signal: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        # A frozen server heeds nothing but SIGKILL. By os.kill: the process object would wait for it behind asyncio's back.
        for number in (with_signal, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()

    def tail(self, lines: int = 15) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


async def make_template(folder: Path) -> Template:
    """Build the data directory that every server of this run starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    server = PostgresServer(folder=folder, port=own_port())
    await initialise(server.data, programs())
    await server.start()
    try:
        await create_database(server.url)
        async with await connect(server.url, purpose=Purpose.SCHEDULER) as conn:
            await migrate(conn)
    finally:
        await server.stop()
    return Template(data=server.data)


async def from_template(template: Template, folder: Path, **options: object) -> PostgresServer:
    """A server on a fresh copy, not started."""
    folder.mkdir(parents=True, exist_ok=True)
    server = PostgresServer(folder=folder, port=own_port(), **options)  # type: ignore[arg-type]
    await asyncio.to_thread(shutil.copytree, template.data, server.data, symlinks=True)
    server.data.chmod(0o700)
    return server


def through(url: str, port: int) -> str:
    """The same database by way of a proxy on this machine."""
    return conninfo.make_conninfo(url, host="127.0.0.1", port=port)
