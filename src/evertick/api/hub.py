"""Who watches, and what they are told: one tail for all, one ring of the latest events, and each watcher a place in it.

So a slow watcher holds nothing but its place: who falls out of the ring is told to read everything again. Nothing is asked of
the database while nobody watches.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import psycopg

from evertick.api.event_stream import HEARTBEAT_SECONDS, Seats, event, heartbeat
from evertick.api.tail import Change, Facts, Interest, Tail, TooMuch
from evertick.domain.access import Permission, Principal
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.accounts import still_valid
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.loop import run_loop
from evertick.services.pulse import Pulse
from evertick.store import changes
from evertick.store.db import Purpose

RING_EVENTS = 20_000
MOST_STREAMS, MOST_STREAMS_OF_USER = 100, 20
LOOK_SECONDS = 0.4
# The database rests so many times as long as a look took: watching takes at most a twentieth of one connection (H4).
REST_FACTOR = 19.0
# How soon a session that was revoked loses its streams.
CHECK_SECONDS = 5.0
# So long the tail goes on for nobody: a page that is left for another, or a line that broke, finds its place again.
LINGER_SECONDS = 60.0
START_SECONDS, IDLE_SECONDS = 5.0, 3600.0
_PER_PART = 500

# A run, a DAG, or everything.
Key = int | str | None

_NEEDS = {"pool": Permission.READ_GATES, "runner": Permission.READ_RUNNERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    number: int
    change: Change
    tags: list[str]
    dag: str | None
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class Watcher:
    """`runs` and `dags` as they were asked for; neither means everything."""

    principal: Principal
    runs: frozenset[int]
    dags: frozenset[str]
    # The number of the event that it was told last.
    place: int = 0
    ended: str | None = None

    @property
    def keys(self) -> list[Key]:
        """What the tail must look at for it."""
        return [*self.runs, *self.dags] or [None]

    def wants(self, found: Event) -> bool:
        if found.dag is None:
            permission = _NEEDS[found.change.name]
            return not self.runs and not self.dags and self.principal.may(permission)
        is_named = found.dag in self.dags or found.change.run_id in self.runs
        return (is_named or not (self.runs or self.dags)) and self.principal.sees(found.tags)


class Hub:
    def __init__(self, url: str, log: Log) -> None:
        self.log = log
        self.watchers: set[Watcher] = set()
        self._seats = Seats(most=MOST_STREAMS, most_of_user=MOST_STREAMS_OF_USER)
        self._link, self._tail = Link(url, Purpose.API_READ), Tail()
        # Changes whenever the numbers begin anew, so that an old id is known to be one. Empty while nothing is looked at.
        self._token, self._number = "", 0
        self._ring: deque[Event] = deque(maxlen=RING_EVENTS)
        # From which event on something is looked at; and until when, though nobody watches it any more.
        self._since: dict[Key, int] = {}
        self._until: dict[Key, float] = {}
        self._checked_at = 0.0
        self._wake, self._news, self.is_over = asyncio.Event(), asyncio.Event(), False

    def join(self, principal: Principal, *, runs: Iterable[int] = (), dags: Iterable[str] = ()) -> Watcher:
        """A place for one more, or TooMany."""
        self._seats.take(principal.name)
        made = Watcher(principal=principal, runs=frozenset(runs), dags=frozenset(dags))
        self.watchers.add(made)
        for key in made.keys:
            self._since.setdefault(key, self._number)
        if not self._token:
            self._wake.set()
        return made

    def leave(self, watcher: Watcher) -> None:
        self.watchers.remove(watcher)
        self._seats.leave(watcher.principal.name)
        for key in watcher.keys:
            self._until[key] = time.monotonic() + LINGER_SECONDS

    async def started(self) -> None:
        """Until the tail looks at what happens; PostgresUnavailable if that takes too long."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._token and not self.is_over:
                    await self._news.wait()
        except TimeoutError:
            raise PostgresUnavailable("What happens cannot be watched now: the database does not answer.") from None

    async def events(self, watcher: Watcher, *, after: str | None) -> AsyncGenerator[str, None]:
        """What the watcher is told, from the event with the id `after` on; or from now."""
        reason = self._take_place(watcher, after)
        token, spoke_at = self._token, time.monotonic()
        # With the id of its place: were it that of the newest event, whoever loses the line now would miss what lies between.
        hello: Facts = {"cursor": self._id(watcher.place), "heartbeat_seconds": HEARTBEAT_SECONDS}
        yield event("hello", hello, id=self._id(watcher.place))
        if reason is not None:
            yield event("reset", {"reason": reason}, id=self._id(watcher.place))
        while watcher.ended is None and not self.is_over:
            news = self._news
            if self._token and (token != self._token or watcher.place < self._number - len(self._ring)):
                reason = "the database was away" if token != self._token else "more has happened than you were told"
                token, watcher.place = self._token, self._number
                yield event("reset", {"reason": reason}, id=self._id(watcher.place))
            part = "".join(found.text for found in self._next_part(watcher) if watcher.wants(found))
            rest_seconds = spoke_at + HEARTBEAT_SECONDS - time.monotonic()
            if part or rest_seconds <= 0:
                spoke_at = time.monotonic()
                yield part or heartbeat(id=f"{token}-{watcher.place}")
            elif watcher.place >= self._number or not self._token:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest_seconds):
                        await news.wait()
        if watcher.ended is not None:
            yield event("end", {"reason": watcher.ended}, id=f"{token}-{watcher.place}")

    async def run(self) -> None:
        """Until canceled."""
        pulse = Pulse("events", longest_tick_seconds=60.0, is_essential=False)
        try:
            await run_loop(self.tick, wake=self._wake, stop=asyncio.Event(), name="events", log=self.log, pulse=pulse)
        finally:
            self.close()
            await self._link.close()

    async def tick(self) -> float:
        """One look, while somebody watches. After a failure everything begins anew: another server may answer."""
        if not self._keys():
            self._begin("")
            await self._link.close()
            return IDLE_SECONDS
        began = time.monotonic()
        try:
            conn = await self._link.get()
            if not self._token:
                await self._tail.begin(conn)
                self._begin(secrets.token_hex(4))
            try:
                await self._add(conn, await self._tail.look(conn, self._interest))
            except TooMuch:
                self._add_flood()
            if began - self._checked_at >= CHECK_SECONDS:
                self._checked_at = began
                await self._end_revoked(conn)
        except BaseException:
            self._begin("")
            raise
        return max(LOOK_SECONDS, REST_FACTOR * (time.monotonic() - began))

    def close(self) -> None:
        """End all streams: the process ends."""
        self.is_over = True
        self._tell()

    def _begin(self, token: str) -> None:
        """With a token the numbers begin anew, without one nothing is looked at."""
        self._token, self._number = token, 0
        self._ring.clear()
        self._since = dict.fromkeys(self._keys(), 0)
        if token:
            self._tell()

    def _keys(self) -> set[Key]:
        """What is looked at: for somebody, or because somebody may come back to it."""
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return {*self._until, *(key for watcher in self.watchers for key in watcher.keys)}

    def _interest(self) -> Interest:
        keys = self._keys()
        self._since = {key: since for key, since in self._since.items() if key in keys}
        return Interest(
            runs=frozenset(key for key in keys if isinstance(key, int)),
            dags=frozenset(key for key in keys if isinstance(key, str)),
            is_all=None in keys,
        )

    async def _add(self, conn: psycopg.AsyncConnection, found: list[Change]) -> None:
        if not found:
            return
        dag_ids = sorted({change.dag_id for change in found if change.dag_id is not None})
        dags = {dag.dag_id: dag for dag in await changes.tagged_dags(conn, dag_ids)}
        for change in found:
            dag = dags.get(change.dag_id) if change.dag_id is not None else None
            if change.dag_id is not None and dag is None:
                continue
            self._number += 1
            facts = change.facts if dag is None else {"dag": dag.name, **change.facts}
            self._ring.append(
                Event(
                    number=self._number,
                    change=change,
                    tags=dag.tags if dag else [],
                    dag=dag.name if dag else None,
                    text=event(change.name, facts, id=self._id(self._number)),
                )
            )
        self._tell()

    def _add_flood(self) -> None:
        """Everybody falls out of the ring."""
        self._number += 1
        self._ring.clear()
        self._since = dict.fromkeys(self._since, self._number)
        self._tell()

    async def _end_revoked(self, conn: psycopg.AsyncConnection) -> None:
        """Whoever signed out, was disabled or may less than before comes again, and is asked at the door."""
        known = {each.principal.credential_id for each in self.watchers if each.principal.credential_id is not None}
        valid = {each.credential_id: each for each in await still_valid(conn, sorted(known))}
        for watcher in self.watchers:
            credential_id = watcher.principal.credential_id
            if credential_id in known and valid.get(credential_id) != watcher.principal:
                watcher.ended = "signed out, or other rights: sign in again"
        self._tell()

    def _take_place(self, watcher: Watcher, after: str | None) -> str | None:
        """Where it begins; and why it has to read everything again, if it has to."""
        watcher.place = self._number
        if after is None:
            return None
        token, _, number = after.rpartition("-")
        is_ours = token == self._token and number.isascii() and number.isdigit() and len(number) < 19
        if not is_ours or int(number) > self._number:
            return "this id is not of this process"
        place = int(number)
        # A key that nobody watched in between was not looked at.
        looked_at_since = max(self._since.get(key, self._number) for key in watcher.keys)
        if place < max(looked_at_since, self._number - len(self._ring)):
            return "this id is too old"
        watcher.place = place
        return None

    def _next_part(self, watcher: Watcher) -> list[Event]:
        skipped = max(watcher.place - (self._number - len(self._ring)), 0)
        part = list(islice(self._ring, skipped, skipped + _PER_PART))
        watcher.place += len(part)
        return part

    def _id(self, number: int) -> str:
        return f"{self._token}-{number}"

    def _tell(self) -> None:
        """Wake everybody who waits, once."""
        news, self._news = self._news, asyncio.Event()
        news.set()
