"""A session's spool files in the runner: open while they are read, kept until they are stored."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class SpoolFolder:
    """A session's spool. Files are removed in bulk: where a database syncs the same disk, one removal may wait for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._holders: dict[str, int] = {}
        self._finished: set[str] = set()
        self._stored: list[str] = []

    def file(self, path: str, fd: int, *, is_finished: bool = False) -> SpoolFile:
        """One user of a file, which may have others. `is_finished`: no further users will follow."""
        self._holders[path] = self._holders.get(path, 0) + 1
        if is_finished:
            self._finished.add(path)
        return SpoolFile(self, path, fd)

    def release(self, path: str) -> None:
        """All lines of one user are stored."""
        self._holders[path] -= 1
        if self._holders[path] == 0:
            del self._holders[path]
            if path in self._finished:
                self.finish(path)

    def finish(self, path: str) -> None:
        """No process will write to it any more: it is deleted when all of it is stored."""
        if path in self._holders:
            self._finished.add(path)
        else:
            self._finished.discard(path)
            self._stored.append(path)

    def take_stored(self) -> list[str]:
        stored, self._stored = self._stored, []
        return stored

    def abandon(self, prefix: str) -> None:
        """A fork server is gone, and no process writes to its files."""
        for path in self.path.glob(f"{prefix}*"):
            self.finish(str(path))


def remove_files(paths: list[str]) -> None:
    """Files that cannot be removed are found again as orphaned logs."""
    for path in paths:
        with suppress(OSError):
            Path(path).unlink()


class SpoolFile:
    """A spool file and its users. The descriptor is closed when it has no reader, the file is deleted when all of it is
    stored."""

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
        if self._keepers == 0:
            self._folder.release(self.path)
