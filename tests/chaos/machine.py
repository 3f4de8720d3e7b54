"""What this machine can do: private mounts, memory groups, false clocks, PID name-spaces. A scenario that needs one of
these and cannot have it is listed as not run.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
PRIVATE = "CHAOS_HAS_OWN_MOUNTS"
_MEMORY = Path("/dev/shm")
_CLOCK_MEMORY = ("faketime_shm_", "sem.faketime_sem_")
_MEMORY_V1 = Path("/sys/fs/cgroup/memory")
_MOUNT = 'mkdir -p "$1" && mount -t tmpfs -o size="$2" tmpfs "$1" && shift 2 && exec "$@"'


def private_mount(folder: Path, size: str) -> tuple[str, ...]:
    """A command in front of another: it sees a small disk at `folder` that nobody else sees, and that goes with it."""
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh", str(folder), size)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own at `folder`, for as long as the block lasts. `run.py` sees to it that nobody else ever sees it."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def own_pid_space() -> tuple[str, ...]:
    """A command in front of another: nobody outside can prove by its pid that it is gone."""
    return ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def false_clock(file: Path) -> dict[str, str]:
    """The environment of a process whose wall clock is as far off as the file says, from one moment to the next."""
    return {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def remove_clock_memory(pids: set[int]) -> None:
    """A process with a false clock that is killed leaves a little shared memory behind."""
    for pid in pids:
        for prefix in _CLOCK_MEMORY:
            (_MEMORY / f"{prefix}{pid}").unlink(missing_ok=True)


def sweep_clock_memory() -> None:
    """The same of processes that nobody could tidy up after, because the harness was killed itself."""
    left = {path for prefix in _CLOCK_MEMORY for path in _MEMORY.glob(f"{prefix}*")}
    remove_clock_memory({pid for path in left if not Path(f"/proc/{(pid := _last_number(path.name))}").exists()})


def _last_number(name: str) -> int:
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def lacks_mounts() -> str:
    return "" if _works(*private_mount(Path("/tmp"), "64k"), "true") else "needs the right to mount (root)"


def lacks_own_mounts() -> str:
    """Mounts that outlive one service would outlive a killed harness, too, unless they are its own."""
    return lacks_mounts() or ("" if os.environ.get(PRIVATE) else "needs `make chaos`, whose mounts nobody else sees")


def lacks_pid_spaces() -> str:
    return "" if _works(*own_pid_space(), "true") else "needs the right to make a PID name-space (root)"


def lacks_false_clock() -> str:
    return "" if FAKETIME.exists() else f"needs libfaketime ({FAKETIME}; the package is called faketime)"


def lacks_memory_group() -> str:
    try:
        with memory_group(64 * 1024 * 1024):
            return ""
    except OSError as error:
        return f"needs the right to make a memory control group: {error.strerror}"


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with so much memory; write a pid into its cgroup.procs."""
    group = _MEMORY_V1 / f"evertick-chaos-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        with suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                (_MEMORY_V1 / "cgroup.procs").write_text(pid)
            group.rmdir()


@cache
def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
