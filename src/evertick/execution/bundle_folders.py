"""Unpacked bundles on this machine: kept while somebody uses them, removed when nobody has for long.

Never removes one in use: whoever looks one up dates it anew, and a warm parent's keeper holds a lock on it while it lives.
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
# Code that nobody has used for a week is fetched again when it is needed. How often somebody looks for that.
UNUSED_SECONDS, LOOK_SECONDS = 7 * 86_400.0, 3600.0
# Unpacking takes seconds. What is that old was left by a process that died over it.
ABANDONED_SECONDS = 86_400.0


def keep(place: Path) -> bool:
    """Whether the folder is there; then nobody removes it for as long as unused ones are kept."""
    try:
        with _locked(place.parent, fcntl.LOCK_SH):
            os.utime(place)
    except FileNotFoundError:
        return False
    except OSError:
        return place.is_dir()  # not ours to date: then not ours to remove, either
    return True


def hold(place: str) -> None:
    """Keep it for as long as this process lives."""
    with suppress(OSError):
        fcntl.flock(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)


def remove_unused(folder: Path, *, in_use: Iterable[str], unused_seconds: float) -> list[str]:
    """Remove the bundles that nobody has used for so long, and what was left half made. The names of what is gone."""
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
        elif not place.name.startswith(".") and _is_older(place, unused_seconds) and _remove(place, unused_seconds):
            gone.append(place.name)
    return gone


def _remove(place: Path, unused_seconds: float) -> bool:
    """First out of the way, at once and under a lock, so that nobody ever finds half of it."""
    away = place.with_name(REMOVING + place.name)
    try:
        with _locked(place.parent, fcntl.LOCK_EX), _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if not _is_older(place, unused_seconds):
                return False
            place.rename(away)
    except OSError:
        return False  # somebody holds it, or was faster
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
