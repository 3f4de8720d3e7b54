"""A session's spool files as the runner holds them: open while they are read, kept until they are stored."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class SpoolFolder:
    """A session's spool. Files are removed in bulk: where a database syncs the same disk, one removal may wait for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: set[str] = set()
        self._stored: list[str] = []

    def file(self, path: str, fd: int) -> SpoolFile:
        self._kept.add(path)
        return SpoolFile(self, path, fd)

    def note_stored(self, path: str) -> None:
        self._kept.discard(path)
        self._stored.append(path)

    def take_stored(self) -> list[str]:
        stored, self._stored = self._stored, []
        return stored

    def abandon(self, prefix: str) -> None:
        """Files of a warm parent that is gone and that nobody heard of."""
        unknown = (str(path) for path in self.path.glob(f"{prefix}*"))
        self._stored += [path for path in unknown if path not in self._kept]


def remove_files(paths: list[str]) -> None:
    """What cannot be removed is found again as a leftover."""
    for path in paths:
        with suppress(OSError):
            Path(path).unlink()


class SpoolFile:
    """A spool file and who still needs it. Its descriptor goes when nobody reads, the file when all of it is stored."""

    __slots__ = ("_folder", "_keepers", "_readers", "fd", "path")

    def __init__(self, folder: SpoolFolder, path: str, fd: int) -> None:
        self._folder = folder
        self.path = path
        self.fd = fd
        self._readers = 0
        self._keepers = 0

    def acquire(self) -> None:
        self._readers += 1
        self._keepers += 1

    def stop_reading(self) -> None:
        self._readers -= 1
        if self._readers == 0:
            os.close(self.fd)

    def stop_keeping(self) -> None:
        self._keepers -= 1
        if self._keepers == 0 and self.path:
            self._folder.note_stored(self.path)
