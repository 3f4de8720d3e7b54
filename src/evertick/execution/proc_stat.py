"""What the kernel says of a process, so that it can be told from a later one with its number."""

from __future__ import annotations

from pathlib import Path

# Fields of /proc/<pid>/stat, counted after the command's closing bracket.
STATE, SESSION, START_TICKS = 0, 3, 19


def stat_of(which: str) -> list[str]:
    """Of that number, or of `self`. OSError if there is none."""
    return Path(f"/proc/{which}/stat").read_text().rpartition(")")[2].split()


def boot_id() -> str:
    """A start time is counted from the boot: only within the same one it tells two apart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
