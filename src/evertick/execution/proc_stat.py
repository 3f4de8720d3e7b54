"""Facts from /proc that distinguish a process from a later one with the same pid."""

from __future__ import annotations

from pathlib import Path

# Fields of /proc/<pid>/stat, counted after the command's closing bracket.
STATE, SESSION, START_TICKS = 0, 3, 19


def stat_of(which: str) -> list[str]:
    """The fields for a pid or `self`. OSError if there is no such process."""
    return Path(f"/proc/{which}/stat").read_text().rpartition(")")[2].split()


def boot_id() -> str:
    """A start time counts from boot: it distinguishes two processes only within the same boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
