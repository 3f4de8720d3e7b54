"""Waiting runners: each holds one request open until it has something to do. One notification and one query serve all of
them, so that an idle runner costs the database nothing.

A reply says only that there is work; the claim is a request of its own, so a lost reply loses nothing. As many runners are
woken as the queued tasks need, in the order in which they began to wait. If tasks are still queued a moment later, the next are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import runner_tokens, runners
from evertick.domain.errors import PostgresUnavailable
from evertick.observability.logging import Log
from evertick.runtime.connections import listen_forever
from evertick.runtime.pool import Pool

# Queues are counted up to here, for one round of waking.
MOST_COUNTED, MOST_QUEUES = 1000, 10_000
# Several notifications arrive together; and the time that a woken runner needs for its claim, at first.
COALESCE_SECONDS, FIRST_PAUSE_SECONDS = 0.005, 0.05


@dataclass(slots=True, kw_only=True)
class Waiter:
    """One waiting runner. `request`: the drain request that it knows; `free`: its free slots when it began to wait."""

    session: int
    queues: frozenset[str]
    has_patterns: bool
    free: int
    request: str
    found: set[Channel] = field(default_factory=set)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


def chosen(waiting: Mapping[int, Waiter], depths: Mapping[str, int]) -> list[Waiter]:
    """The waiters to wake for the queued tasks, in the order in which they came. A runner with patterns may serve none of
    them, so it does not count."""
    left, woken = dict(depths), list[Waiter]()
    for waiter in waiting.values():
        mine = [queue for queue in waiter.queues if left.get(queue, 0) > 0]
        if not mine or waiter.free <= 0:
            continue
        woken.append(waiter)
        room = 0 if waiter.has_patterns else waiter.free
        for queue in mine:
            taken = min(room, left[queue])
            left[queue], room = left[queue] - taken, room - taken
        if not any(depth > 0 for depth in left.values()):
            break
    return woken


class WaitingRunners:
    """The waiting runners of one API process."""

    def __init__(self, settings: Settings, *, url: str, pool: Pool, log: Log) -> None:
        self._settings, self._url, self._pool, self._log = settings, url, pool, log
        self._waiting: dict[int, Waiter] = {}
        self._wake, self._are_there = asyncio.Event(), asyncio.Event()
        # Sessions whose requests were not looked up since they began to wait; and whether all are looked up again.
        self._unchecked, self._checks_all = set[int](), False
        # Whether tasks may have been queued since the last look.
        self._has_new_tasks = True
        self._is_closed = False

    @property
    def count(self) -> int:
        return len(self._waiting)

    async def wait(self, waiter: Waiter, seconds: float) -> set[Channel]:
        """Why the runner was woken; nothing after `seconds`."""
        if self._is_closed:
            return set()
        self._waiting[waiter.session] = waiter
        # A request may have been announced while it was away.
        self._unchecked.add(waiter.session)
        self._are_there.set()
        self._wake.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiter.is_over.wait()
        finally:
            # A newer request of the same session may have replaced the entry.
            if self._waiting.get(waiter.session) is waiter:
                del self._waiting[waiter.session]
        return waiter.found

    def close(self) -> None:
        """Release all, because the server shuts down."""
        self._is_closed = True
        for waiter in list(self._waiting.values()):
            waiter.is_over.set()

    async def run(self) -> None:
        """Until canceled. Does nothing until the first runner comes."""
        await self._are_there.wait()
        async with asyncio.TaskGroup() as group:
            if self._settings.listen_notify:
                channels = [Channel.TASKS, Channel.STOP]
                group.create_task(listen_forever(self._url, channels, self._on_notification, log=self._log))
            await self._serve()

    def _on_notification(self, channel: Channel) -> None:
        self._has_new_tasks = self._has_new_tasks or channel is Channel.TASKS
        self._checks_all = self._checks_all or channel is Channel.STOP
        self._wake.set()

    async def _serve(self) -> None:
        pause, tick_seconds = FIRST_PAUSE_SECONDS, self._settings.tick_seconds
        while True:
            if not self._waiting:
                self._are_there.clear()
                await self._are_there.wait()
            self._wake.clear()
            is_new, self._has_new_tasks = self._has_new_tasks, False
            try:
                are_queued = await self._check()
            except (psycopg.Error, PostgresUnavailable, OSError):
                self._checks_all = are_queued = True
            pause = FIRST_PAUSE_SECONDS if is_new else min(2 * pause, tick_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause if are_queued else tick_seconds):
                    await self._wake.wait()
                await asyncio.sleep(COALESCE_SECONDS)

    async def _check(self) -> bool:
        """Wake the runners that have something to do. Returns whether tasks were queued."""
        is_polled = not self._settings.listen_notify
        asked = set(self._waiting) if self._checks_all or is_polled else self._unchecked & self._waiting.keys()
        self._checks_all, self._unchecked, called = False, set(), set[int]()
        async with self._pool.lent() as conn:
            depths = await runners.depths(conn, cap=MOST_COUNTED, most=MOST_QUEUES)
            if waiters := [self._waiting[session] for session in asked if session in self._waiting]:
                sessions, requests = [each.session for each in waiters], [each.request for each in waiters]
                called = await runner_tokens.called(conn, sessions=sessions, requests=requests)
        for session in called & self._waiting.keys():
            self._release(self._waiting[session], Channel.STOP)
        for waiter in chosen(self._waiting, depths):
            self._release(waiter, Channel.TASKS)
        return bool(depths)

    def _release(self, waiter: Waiter, channel: Channel) -> None:
        waiter.found.add(channel)
        waiter.is_over.set()
        # The next round wakes others: this one is about to claim.
        self._waiting.pop(waiter.session, None)
