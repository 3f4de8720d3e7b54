"""What a process uses, read from /proc: file descriptors, threads, descendants, memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError)


def usage_of(pid: int) -> dict[str, int] | None:
    """Nothing if the process is gone, or about to be."""
    process = Path(f"/proc/{pid}")
    try:
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        fds = sum(1 for _ in (process / "fd").iterdir())
    except (*_GONE, PermissionError):
        return None
    if "VmRSS" not in fields:
        return None
    return {
        "fds": fds,
        "threads": int(fields["Threads"]),
        "children": len(descendants(pid)),
        "rss_kb": int(fields["VmRSS"].split()[0]),
    }


def descendants(pid: int) -> list[int]:
    """Every process below it; what ends while we look is left out."""
    found: list[int] = []
    look_at = [pid]
    while look_at:
        with suppress(*_GONE):
            for thread in Path(f"/proc/{look_at.pop()}/task").iterdir():
                with suppress(*_GONE):
                    children = [int(child) for child in (thread / "children").read_text().split()]
                    found += children
                    look_at += children
    return found
