"""Watches an event loop from a thread of its own: a coroutine that blocks delays all others, and says nothing itself.

Never waits for the loop without a limit.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

CHECK_SECONDS = 0.5
# As long as Airflow's triggerer allows.
BLOCKED_SECONDS = 0.2
REPORT_AGAIN_SECONDS = 30.0

# Receives the task that blocks, for how long so far, and where it is; or that it has ended, with None.
Blocked = Callable[[asyncio.Task[Any] | None, float, str | None], None]


def watch_loop(loop: asyncio.AbstractEventLoop, on_blocked: Blocked) -> None:
    """Start to watch the loop of this thread, as long as the process lives. `on_blocked` is called in another thread."""
    thread = threading.get_ident()
    threading.Thread(target=_watch, args=(loop, thread, on_blocked), name="evertick-loop-watch", daemon=True).start()


def _watch(loop: asyncio.AbstractEventLoop, thread: int, on_blocked: Blocked) -> None:
    while True:
        beat = threading.Event()
        try:
            loop.call_soon_threadsafe(beat.set)
        except RuntimeError:
            return
        began, limit, task = time.monotonic(), BLOCKED_SECONDS, None
        while not beat.wait(limit):
            task = asyncio.current_task(loop) or task
            on_blocked(task, time.monotonic() - began, _place_of(thread))
            limit = REPORT_AGAIN_SECONDS
        if limit == REPORT_AGAIN_SECONDS:
            on_blocked(task, time.monotonic() - began, None)
        time.sleep(CHECK_SECONDS)


def _place_of(thread: int) -> str:
    frames = traceback.extract_stack(sys._current_frames().get(thread), 6) if thread in sys._current_frames() else []
    return "".join(traceback.format_list(frames[-3:])).rstrip()
