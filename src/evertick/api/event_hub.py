"""Live updates: server-sent events, the streams of connected clients, and the hub that distributes changes to them.

One change feed serves all clients. A client that does not read is disconnected; it never delays another.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import islice

import psycopg
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from evertick.api.change_feed import Change, ChangeFeed, Facts, Interest, TooManyChanges
from evertick.db.connect import Purpose
from evertick.db.queries import changes
from evertick.domain.access import Permission, Principal
from evertick.domain.errors import PostgresUnavailable, RateLimited
from evertick.engine.accounts import still_valid
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop

HEARTBEAT_SECONDS = 15.0


# A client that accepts no data for this long is considered disconnected.
PATIENCE_SECONDS = 60.0


def event(name: str, facts: dict[str, object], *, id: str) -> str:
    """Encode an event. JSON contains no line break, so one data line is enough."""
    return f"id: {id}\nevent: {name}\ndata: {json.dumps(facts, separators=(',', ':'))}\n\n"


def heartbeat(*, id: str) -> str:
    """Encode a comment that only updates the client's last event id. Browsers dispatch no event for it."""
    return f": still here\nid: {id}\n\n"


class StreamLimit:
    """The limit of open streams of one kind, per process and per user."""

    def __init__(self, *, most: int, most_of_user: int) -> None:
        self._most, self._most_of_user, self._taken = most, most_of_user, Counter[str]()

    def take(self, user: str) -> None:
        if self._taken.total() >= self._most or self._taken[user] >= self._most_of_user:
            raise RateLimited(
                f"Too many open streams: {self._taken[user]} of {user}, {self._taken.total()} in total."
                " Close some or retry later.",
                retry_after_seconds=HEARTBEAT_SECONDS,
            )
        self._taken[user] += 1

    def leave(self, user: str) -> None:
        self._taken[user] -= 1
        if not self._taken[user]:
            del self._taken[user]


class EventStream(StreamingResponse):
    """`on_close` is called exactly once. Never compressed: gzip would buffer events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], *, on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Content-Encoding": "identity", "X-Accel-Buffering": "no"})
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        async def patiently(message: object) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await send(message)  # type: ignore[arg-type]

        with suppress(TimeoutError):
            await super().stream_response(patiently)


class TextStream(EventStream):
    """Plain text lines, sent as they become available."""

    media_type = "text/plain; charset=utf-8"


RING_EVENTS = 20_000


MOST_STREAMS, MOST_STREAMS_OF_USER = 100, 20


LOOK_SECONDS = 0.4


# The feed pauses this many times as long as a poll took, so it uses at most a twentieth of one connection (H4).
REST_FACTOR = 19.0


# Interval of the check that ends streams of revoked sessions.
CHECK_SECONDS = 5.0


# Polling continues this long without watchers, so that a client can resume after a page change or a broken connection.
LINGER_SECONDS = 60.0


START_SECONDS, IDLE_SECONDS = 5.0, 3600.0


_PER_PART = 500


# The scope of a watcher: a run, a DAG, or everything.
Key = int | str | None


_NEEDS = {"pool": Permission.READ_GATES, "runner": Permission.READ_RUNNERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    change: Change
    tags: list[str]
    dag: str | None
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class Watcher:
    """One subscriber. `runs` and `dags` are its filters; without both it receives everything."""

    principal: Principal
    runs: frozenset[int]
    dags: frozenset[str]
    # The number of the last event sent to it.
    place: int = 0
    ended: str | None = None

    @property
    def keys(self) -> list[Key]:
        """The scopes that the feed must poll for it."""
        return [*self.runs, *self.dags] or [None]

    def wants(self, found: StreamEvent) -> bool:
        if found.dag is None:
            permission = _NEEDS[found.change.name]
            return not self.runs and not self.dags and self.principal.may(permission)
        is_named = found.dag in self.dags or found.change.run_id in self.runs
        return (is_named or not (self.runs or self.dags)) and self.principal.sees(found.tags)


class EventHub:
    def __init__(self, url: str, log: Log) -> None:
        self.log = log
        self.watchers: set[Watcher] = set()
        self._limit = StreamLimit(most=MOST_STREAMS, most_of_user=MOST_STREAMS_OF_USER)
        self._link, self._feed = ReconnectingConnection(url, Purpose.API_READ), ChangeFeed()
        # Changes whenever event numbers restart, so that old ids are recognized. Empty while the feed is not polling.
        self._token, self._number = "", 0
        self._ring: deque[StreamEvent] = deque(maxlen=RING_EVENTS)
        # Per scope: the first event number it covers, and until when it is polled without a watcher.
        self._since: dict[Key, int] = {}
        self._until: dict[Key, float] = {}
        self._checked_at = 0.0
        self._wake, self._news, self.is_over = asyncio.Event(), asyncio.Event(), False

    def join(self, principal: Principal, *, runs: Iterable[int] = (), dags: Iterable[str] = ()) -> Watcher:
        """Add a watcher. Raises TooMany."""
        self._limit.take(principal.name)
        made = Watcher(principal=principal, runs=frozenset(runs), dags=frozenset(dags))
        self.watchers.add(made)
        for key in made.keys:
            self._since.setdefault(key, self._number)
        if not self._token:
            self._wake.set()
        return made

    def leave(self, watcher: Watcher) -> None:
        self.watchers.remove(watcher)
        self._limit.leave(watcher.principal.name)
        for key in watcher.keys:
            self._until[key] = time.monotonic() + LINGER_SECONDS

    async def started(self) -> None:
        """Wait until the feed is polling. Raises PostgresUnavailable if that takes too long."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._token and not self.is_over:
                    await self._news.wait()
        except TimeoutError:
            raise PostgresUnavailable(
                "Events are not available because the database is unreachable. Retry later."
            ) from None

    async def events(self, watcher: Watcher, *, after: str | None) -> AsyncGenerator[str, None]:
        """Yield the watcher's events after the event id `after`, or from now on."""
        reason = self._take_place(watcher, after)
        token, spoke_at = self._token, time.monotonic()
        # Send the id of the watcher's position: with the newest id, a client that reconnects now would miss the events between.
        hello: Facts = {"cursor": self._id(watcher.place), "heartbeat_seconds": HEARTBEAT_SECONDS}
        yield event("hello", hello, id=self._id(watcher.place))
        if reason is not None:
            yield event("reset", {"reason": reason}, id=self._id(watcher.place))
        while watcher.ended is None and not self.is_over:
            news = self._news
            if self._token and (token != self._token or watcher.place < self._number - len(self._ring)):
                reason = "the database was unreachable" if token != self._token else "some events were skipped"
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
        pulse = LoopHealth("events", longest_tick_seconds=60.0, is_essential=False)
        try:
            await run_loop(self.tick, wake=self._wake, stop=asyncio.Event(), name="events", log=self.log, pulse=pulse)
        finally:
            self.close()
            await self._link.close()

    async def tick(self) -> float:
        """Poll once if there are watchers. After an error the feed restarts, because another server may be the primary now."""
        if not self._keys():
            self._begin("")
            await self._link.close()
            return IDLE_SECONDS
        began = time.monotonic()
        try:
            conn = await self._link.get()
            if not self._token:
                await self._feed.begin(conn)
                self._begin(secrets.token_hex(4))
            try:
                await self._add(conn, await self._feed.look(conn, self._interest))
            except TooManyChanges:
                self._add_flood()
            if began - self._checked_at >= CHECK_SECONDS:
                self._checked_at = began
                await self._end_revoked(conn)
        except BaseException:
            self._begin("")
            raise
        return max(LOOK_SECONDS, REST_FACTOR * (time.monotonic() - began))

    def close(self) -> None:
        """End all streams, because the process shuts down."""
        self.is_over = True
        self._tell()

    def _begin(self, token: str) -> None:
        """Restart event numbers with a new token, or stop the feed with an empty one."""
        self._token, self._number = token, 0
        self._ring.clear()
        self._since = dict.fromkeys(self._keys(), 0)
        if token:
            self._tell()

    def _keys(self) -> set[Key]:
        """The scopes to poll: those of watchers, and recent ones that a client may resume."""
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
                StreamEvent(
                    change=change,
                    tags=dag.tags if dag else [],
                    dag=dag.name if dag else None,
                    text=event(change.name, facts, id=self._id(self._number)),
                )
            )
        self._tell()

    def _add_flood(self) -> None:
        """Move all watchers out of the ring, so that each receives a reset event."""
        self._number += 1
        self._ring.clear()
        self._since = dict.fromkeys(self._since, self._number)
        self._tell()

    async def _end_revoked(self, conn: psycopg.AsyncConnection) -> None:
        """End the streams of users who signed out, were disabled or lost permissions. They must authenticate again."""
        known = {each.principal.credential_id for each in self.watchers if each.principal.credential_id is not None}
        valid = {each.credential_id: each for each in await still_valid(conn, sorted(known))}
        for watcher in self.watchers:
            credential_id = watcher.principal.credential_id
            if credential_id in known and valid.get(credential_id) != watcher.principal:
                watcher.ended = "the session ended or its permissions changed: sign in again"
        self._tell()

    def _take_place(self, watcher: Watcher, after: str | None) -> str | None:
        """Set the watcher's first position. Returns why it needs a reset, if it needs one."""
        watcher.place = self._number
        if after is None:
            return None
        token, _, number = after.rpartition("-")
        is_ours = token == self._token and number.isascii() and number.isdigit() and len(number) < 19
        if not is_ours or int(number) > self._number:
            return "the event id is from another process"
        place = int(number)
        # A scope without watchers in the meantime was not polled.
        looked_at_since = max(self._since.get(key, self._number) for key in watcher.keys)
        if place < max(looked_at_since, self._number - len(self._ring)):
            return "the event id is too old"
        watcher.place = place
        return None

    def _next_part(self, watcher: Watcher) -> list[StreamEvent]:
        skipped = max(watcher.place - (self._number - len(self._ring)), 0)
        part = list(islice(self._ring, skipped, skipped + _PER_PART))
        watcher.place += len(part)
        return part

    def _id(self, number: int) -> str:
        return f"{self._token}-{number}"

    def _tell(self) -> None:
        """Wake all waiting watchers."""
        news, self._news = self._news, asyncio.Event()
        news.set()
