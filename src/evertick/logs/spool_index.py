"""The spool files of a fork server's children. A small file is reused by a later child, which appends to it.

The more files were removed recently, the longer a file system searches for a place for a new one: with a file per
attempt that took 0.2 ms at 400 attempts per second. Never reuses a file whose process tree is not known to be gone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from evertick.logs.spool import open_spool

# Limits the attempts per file: after a runner's death, each of them is looked up in the database.
_MOST_USES = 32
_LONGEST_REUSED_BYTES = 64 * 1024


class OpenSpool(NamedTuple):
    """A file to write to from `start` on; an empty path where none could be opened."""

    path: str
    fd: int
    start: int


class SpoolIndex:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._made = 0
        self._uses: dict[str, int] = {}
        self._free: list[str] = []

    def open(self) -> OpenSpool:
        """A full disk costs the log, not the task."""
        while self._free:
            path = self._free.pop()
            with suppress(OSError):
                fd = open_spool(path, is_new=False)
                return OpenSpool(path, fd, os.lseek(fd, 0, os.SEEK_END))
            del self._uses[path]
        self._made += 1
        path = f"{self._prefix}{self._made}.log"
        try:
            fd = open_spool(path)
        except OSError:
            return OpenSpool("", open_nowhere(), 0)
        self._uses[path] = 0
        return OpenSpool(path, fd, 0)

    def put_back(self, path: str) -> bool:
        """Every process that could write to it is gone. Returns whether the file will not be reused."""
        uses = self._uses.pop(path, _MOST_USES) + 1
        if uses >= _MOST_USES or _size(path) > _LONGEST_REUSED_BYTES:
            return True
        self._uses[path] = uses
        self._free.append(path)
        return False


def open_nowhere() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return _LONGEST_REUSED_BYTES + 1
