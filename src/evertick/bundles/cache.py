"""The cache of unpacked bundles on this machine: kept while in use, removed after a long time without use.

Never removes one in use: each lookup updates its timestamp, and a fork server's reaper holds a lock on it while it
lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAKING, REMOVING = ".making-", ".removing-"
# Code that was not used for a week is fetched again when needed. And the interval of the check.
UNUSED_SECONDS, LOOK_SECONDS = 7 * 86_400.0, 3600.0
# Unpacking takes seconds. A half-made folder this old was left by a process that died.
ABANDONED_SECONDS = 86_400.0


def keep(place: Path) -> bool:
    """Whether the folder exists; then it is kept for as long as unused ones are."""
    try:
        with _locked(place.parent, fcntl.LOCK_SH):
            os.utime(place)
    except FileNotFoundError:
        return False
    except OSError:
        return place.is_dir()  # another user's folder: its timestamp cannot be updated, and it cannot be removed
    return True


def hold(place: str) -> None:
    """Keep it for as long as this process lives."""
    with suppress(OSError):
        fcntl.flock(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)


def remove_unused(folder: Path, *, in_use: Iterable[str], unused_seconds: float) -> list[str]:
    """Remove bundles without use for this long, and half-made folders. Returns the names of the removed ones."""
    if not folder.is_dir():
        return []
    for name in in_use:
        keep(folder / name)
    gone = []
    for place in sorted(folder.iterdir()):
        is_half = place.name.startswith((MAKING, REMOVING))
        if is_half and _is_older(place, ABANDONED_SECONDS):
            shutil.rmtree(place, ignore_errors=True)
            gone.append(place.name)
        elif not place.name.startswith(".") and _is_older(place, unused_seconds) and remove(place, unused_seconds):
            gone.append(place.name)
    return gone


def remove(place: Path, unused_seconds: float) -> bool:
    """Unless it is in use or was used within this time. Rename it first, in one step and under a lock, so that no process
    ever finds half of it."""
    away = place.with_name(REMOVING + place.name)
    try:
        with _locked(place.parent, fcntl.LOCK_EX), _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if not _is_older(place, unused_seconds):
                return False
            place.rename(away)
    except OSError:
        return False  # it is in use, or another process removed it first
    shutil.rmtree(away, ignore_errors=True)
    return True


def _is_older(place: Path, seconds: float) -> bool:
    try:
        return time.time() - place.stat(follow_symlinks=False).st_mtime > seconds
    except OSError:
        return False


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
