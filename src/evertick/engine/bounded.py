"""A time limit for pure computation: a decision that does not finish is interrupted, so that the loop continues (A1).

Uses the kernel's timer, because nothing else can interrupt code that never waits. It measures CPU time: a machine
that is suspended or busy with other processes is not the computation's fault. Works only in the main thread, where the scheduler
runs; in other threads there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLongError(Exception):
    """The computation did not finish in time."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise within the block once this process has used that much CPU time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
