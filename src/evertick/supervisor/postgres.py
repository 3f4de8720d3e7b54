"""The embedded PostgreSQL: started as a child process, watched, restarted when it dies, stopped with Evertick.

Ready means that a query succeeds. Must never leave a server running, and never delete a data directory.
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
from pathlib import Path

import psycopg
import structlog

from evertick.db.migrate import answers, create_database
from evertick.domain.errors import PostgresUnavailable
from evertick.supervisor.postgres_cluster import (
    SYNC_METHOD,
    environment,
    initialise,
    launch_command,
    programs,
    stop_old_server,
)
from evertick.supervisor.postgres_home import HomeDirectory, HomeDirectoryLock

# Durability is never traded. The rest: few, spread checkpoints (each causes full-page images), quick vacuuming of small
# hot tables, no parallel workers for reads from memory. The wheel is built without lz4.
_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "shared_preload_libraries": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "wal_compression": "pglz",
    "recovery_init_sync_method": SYNC_METHOD,
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    # The leader vacuums the hot tables (decision 0011); this is for all others.
    "autovacuum_naptime": "30s",
    "io_method": "sync",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # The log must contain no payload: rows appear in details, parameters and statements.
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
    "log_checkpoints": "off",
    "logging_collector": "off",
    "log_destination": "stderr",
}

_LOG_BYTES = 8 * 1024 * 1024
_LOG_CHECK_SECONDS = 10.0
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_LONGEST_BACKOFF_SECONDS = 5.0
_STEADY_SECONDS = 30.0
_FAST_SHUTDOWN_SECONDS = 20.0

_log = structlog.get_logger("evertick.postgres")


class EmbeddedPostgres:
    """One server for one home. It dies with the thread that called `start`, so call that in the main thread."""

    def __init__(
        self, home: Path, *, settings: Mapping[str, str] | None = None, ready_within_seconds: float = 600.0
    ) -> None:
        self._home = HomeDirectory(home)
        self._lock = HomeDirectoryLock(self._home)
        self._settings = {**_SETTINGS, **(settings or {})}
        self._ready_within_seconds = ready_within_seconds
        self._process: Process | None = None
        self._is_stopped = True
        self._log_start = 0

    @property
    def url(self) -> str:
        return self._home.url

    @property
    def pid(self) -> int | None:
        """The server's process id, while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> str:
        """Lock the home, create the data directory if there is none, start the server. Returns the URL once it answers."""
        self._home.prepare()
        await self._lock.acquire()
        self._is_stopped = False
        try:
            await initialise(self._home.data, programs())
            await self._bring_up()
            await create_database(self.url)
        except BaseException as error:
            await self.stop()
            if isinstance(error, OSError | psycopg.Error):
                raise PostgresUnavailable(f"The embedded PostgreSQL in {self._home.directory}: {error}") from error
            raise
        return self.url

    async def supervise(self) -> None:
        """Restart the server whenever it dies, until canceled or stopped; keep its log within bounds."""
        quick_deaths = 0
        while (process := self._process) is not None:
            steady_from = time.monotonic() + _STEADY_SECONDS
            await self._watch(process)
            if self._is_stopped:
                return
            _log.warning("postgres_died", exit_code=process.returncode, reason=self._log_tail())
            await self._restart(quick_deaths)
            quick_deaths = 0 if time.monotonic() > steady_from else quick_deaths + 1

    async def stop(self) -> None:
        """Shut the server down and release the home. Safe to call at any time, and twice."""
        process, self._process, self._is_stopped = self._process, None, True
        try:
            if process is not None:
                await _end(process)
                self._home.leave()
        finally:
            self._lock.release()

    async def _watch(self, process: Process) -> None:
        """Return when the process has ended; meanwhile, keep its log within bounds."""
        async with asyncio.TaskGroup() as group:
            bounding = group.create_task(self._bound_log_for_ever())
            await process.wait()
            bounding.cancel()

    async def _restart(self, failures: int) -> None:
        while not self._is_stopped:
            await asyncio.sleep(backoff_seconds(failures))
            try:
                await self._bring_up()
            except (PostgresUnavailable, OSError) as error:
                # A full disk or a lack of processes is temporary, so keep trying.
                failures += 1
                _log.error("postgres_restart_failed", failures=failures, reason=str(error))
            else:
                _log.info("postgres_restarted", pid=self.pid)
                return

    async def _bring_up(self) -> None:
        """Start the server process and wait until it answers; on failure no process is left."""
        stale_pid = await stop_old_server(self._home.data)
        process = await self._launch(stale_pid)
        try:
            if self._is_stopped:
                raise PostgresUnavailable(f"The embedded PostgreSQL in {self._home.directory} was stopped.")
            self._process = process
            await self._wait_until_ready(process)
        except BaseException:
            await _end(process)
            raise

    async def _launch(self, stale_pid: int | None) -> Process:
        # The lock on the home and the search for old servers have proven that no server uses these.
        for path in self._home.sockets.glob(".s.PGSQL.*"):
            path.unlink(missing_ok=True)
        # A stale lock file may contain a pid that another process has by now. PostgreSQL does not mistake its own
        # grandparent for a rival, and still checks the shared memory that the file names, which deleting the file would
        # skip.
        extra = {} if stale_pid is None else {"PG_GRANDPARENT_PID": str(stale_pid)}
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        program: list[str | Path] = [programs() / "postgres", "-D", self._home.data, "-k", self._home.sockets, *options]
        self._bound_log()
        # Opened for appending, so that truncating the file while the server writes is safe.
        log = os.open(self._home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._log_start = os.fstat(log).st_size
            return await asyncio.create_subprocess_exec(
                *launch_command(self._home.data, signal.SIGINT, program),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(**extra),
                # Ctrl-C in the terminal is meant for Evertick alone: the database stops last.
                start_new_session=True,
            )
        finally:
            os.close(log)

    async def _wait_until_ready(self, process: Process) -> None:
        deadline = time.monotonic() + self._ready_within_seconds
        pause_seconds = 0.005
        while not await answers(self._home.maintenance_url):
            if process.returncode is not None:
                raise PostgresUnavailable(
                    f"The embedded PostgreSQL in {self._home.directory} ended with exit code {process.returncode} while"
                    f" starting. Its log, {self._home.log}, ends with:\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise PostgresUnavailable(
                    f"The embedded PostgreSQL in {self._home.directory} did not answer within"
                    f" {self._ready_within_seconds:g} s. Its log, {self._home.log}, ends with:\n{self._log_tail()}"
                )
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, 0.25)

    def _log_tail(self) -> str:
        """The last lines that the server wrote since its last start."""
        try:
            with self._home.log.open("rb") as file:
                file.seek(max(self._log_start, self._home.log.stat().st_size - _TAIL_BYTES))
                lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            return f"(the log cannot be read: {error.strerror})"
        return "\n".join(lines[-_TAIL_LINES:]) or "(the log is empty)"

    async def _bound_log_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_SECONDS)
            self._bound_log()

    def _bound_log(self) -> None:
        """Keep one older log next to the current one, each of bounded size."""
        if not self._home.log.exists() or self._home.log.stat().st_size <= _LOG_BYTES:
            return
        # On a full disk there is no room for the copy, and all the more reason to truncate.
        with suppress(OSError):
            shutil.copy2(self._home.log, self._home.log.with_suffix(".log.1"))
        with suppress(OSError):
            os.truncate(self._home.log, 0)
            self._log_start = 0


async def _end(process: Process) -> None:
    """Fast shutdown; if that hangs, an immediate one, from which the next start recovers; then SIGKILL."""
    for with_signal, within_seconds in (
        (signal.SIGINT, _FAST_SHUTDOWN_SECONDS),
        (signal.SIGQUIT, 5.0),
        (signal.SIGKILL, 5.0),
    ):
        if process.returncode is not None:
            return
        process.send_signal(with_signal)
        try:
            await asyncio.wait_for(process.wait(), within_seconds)
        except TimeoutError:
            continue
        return


def backoff_seconds(failures: int) -> float:
    """The delay before the next start, after this many failures in a row: a disk may stay full for days."""
    return 0.0 if failures == 0 else min(0.1 * 2 ** min(failures, 10), _LONGEST_BACKOFF_SECONDS)
