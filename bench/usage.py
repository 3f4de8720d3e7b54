"""Resource usage of processes: CPU time with nanosecond resolution, and memory with shared pages counted once. Linux only."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from bench.house import NotMeasured

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_GONE = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)


def tree(top: psutil.Process) -> list[psutil.Process]:
    return [top, *top.children(recursive=True)]


def own_seconds(process: psutil.Process) -> float:
    """CPU seconds of all threads of a process."""
    total = 0
    with suppress(*_GONE):
        for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            total += int(thread.read_text().split()[0])
    return total / 1e9


def tree_seconds(top: psutil.Process) -> float:
    """CPU seconds of a process and its descendants, including ended ones, whose time is added to their parent's."""
    total = 0.0
    for process in tree(top):
        with suppress(*_GONE):
            times = process.cpu_times()
            total += own_seconds(process) + times.children_user + times.children_system
    return total


def pss_bytes(top: psutil.Process) -> int:
    """Memory (PSS) of a process and its descendants."""
    total = 0
    for process in tree(top):
        try:
            found = _PSS.search(Path(f"/proc/{process.pid}/smaps_rollup").read_bytes())
        except _GONE:
            continue
        except PermissionError:
            raise NotMeasured(f"the memory of process {process.pid} cannot be read; run this as its owner") from None
        total += int(found[1]) * 1024 if found else 0
    return total
