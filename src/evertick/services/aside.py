"""Blocking work in threads of its own, at most so many at once.

The pools of the standard library wait for their threads when the process ends. What waits for a storage that does not answer must
hold up nobody's end: these threads do not outlive the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Aside:
    def __init__(self, name: str, *, most: int) -> None:
        self._name, self._room = name, asyncio.Semaphore(most)

    async def do(self, work: Callable[[], T]) -> T:
        """Whoever is canceled meanwhile leaves the thread at work: its place is free when it has come to an end."""
        loop = asyncio.get_running_loop()
        await self._room.acquire()
        answer: asyncio.Future[T] = loop.create_future()

        def go() -> None:
            try:
                tell = partial(answer.set_result, work())
            except BaseException as error:
                tell = partial(answer.set_exception, error)
            # Nobody is there any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._over, answer, tell)

        threading.Thread(target=go, name=self._name, daemon=True).start()
        return await answer

    def _over(self, answer: asyncio.Future[T], tell: Callable[[], None]) -> None:
        self._room.release()
        if not answer.done():
            tell()
