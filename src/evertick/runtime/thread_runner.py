"""Runs blocking work in dedicated threads, with a limit on their number.

The standard library's pools join their threads when the process exits. A thread that waits for an unresponsive storage
must not delay the exit: these threads are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class ThreadRunner:
    def __init__(self, name: str, *, most: int) -> None:
        self._name, self._room = name, asyncio.Semaphore(most)

    async def do(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread. If the caller is canceled, the thread continues, and its slot is free when it ends."""
        loop = asyncio.get_running_loop()
        await self._room.acquire()
        answer: asyncio.Future[T] = loop.create_future()

        def go() -> None:
            try:
                tell = partial(answer.set_result, work())
            except BaseException as error:
                tell = partial(answer.set_exception, error)
            # The event loop is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._over, answer, tell)

        threading.Thread(target=go, name=self._name, daemon=True).start()
        return await answer

    def _over(self, answer: asyncio.Future[T], tell: Callable[[], None]) -> None:
        self._room.release()
        if not answer.done():
            tell()
