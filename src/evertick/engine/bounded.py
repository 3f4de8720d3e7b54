"""A bound on pure computing: a decision that does not come to an end is broken off, so that the loop goes on (A1).

Works by the kernel's timer, because nothing else can interrupt code that never waits. It counts the processor's time: a machine
that stands still or is busy with others is no fault of what is computed. Only in the main thread, which is where the scheduler
runs; elsewhere there is no bound.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLongError(Exception):
    """What was computed did not come to an end in time."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise within the block once this process has computed for so long."""
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
