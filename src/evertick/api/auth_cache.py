"""Cache of authenticated callers. The lookup in the database was a fifth of the cost of a small request.

Any change of an account or credential clears the cache: directly in this process, by NOTIFY in all others. Without a working
LISTEN connection nothing is cached, and entries expire after a few seconds in case a notification is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psycopg

from evertick.db.connect import Purpose
from evertick.db.connection import has_own_session
from evertick.db.notify import Channel, listen
from evertick.domain.access import Principal
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.accounts import CHECK_AFTER_SECONDS, Authenticated, authenticate, hash_of
from evertick.runtime.connections import POOLED_PAUSE_SECONDS, ReconnectingConnection
from evertick.runtime.loop import back_off
from evertick.runtime.pool import Pool

# The same time within which the stream of a revoked session ends.
KEPT_SECONDS = 5.0
# Without requests for this long, the LISTEN connection is closed.
IDLE_SECONDS = 30.0
_MOST = 10_000


class AuthCache:
    def __init__(self, url: str, *, is_enabled: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._url, self._is_enabled, self._now = url, is_enabled, now
        # The owner and the end of each entry. Keyed by hash, so that no secret stays in memory.
        self._kept: dict[bytes, tuple[Principal, float]] = {}
        self._is_told, self._times_forgotten = False, 0
        self._asked, self._asked_at = asyncio.Event(), 0.0

    async def authenticate(self, readers: Pool, secret: str) -> Authenticated | None:
        """The owner of the secret, or None if it is wrong, revoked or expired."""
        secret_hash, now = hash_of(secret), self._now()
        self._asked_at = now
        principal, until = self._kept.get(secret_hash, (None, 0.0))
        if principal is not None and now < until:
            return Authenticated(
                principal=principal, account_id=0, is_use_old=False, seconds_left=until - now, check_age_seconds=None
            )
        self._asked.set()
        times = self._times_forgotten
        async with readers.lent() as conn:
            found = await authenticate(conn, secret)
        # If something changed during the query, its result may be out of date: do not cache it.
        if found is not None and self._is_told and times == self._times_forgotten:
            seconds = KEPT_SECONDS if found.seconds_left is None else min(KEPT_SECONDS, found.seconds_left)
            if found.check_age_seconds is not None:
                seconds = min(seconds, CHECK_AFTER_SECONDS - found.check_age_seconds)
            if len(self._kept) >= _MOST:
                self._kept.clear()
            self._kept[secret_hash] = (found.principal, now + seconds)
        return found

    def forget(self) -> None:
        """Clear the cache after a change that may affect permissions."""
        self._times_forgotten += 1
        self._kept.clear()

    async def run(self) -> None:
        """Listen for changes while there are requests, until canceled."""
        failures = 0
        while self._is_enabled:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self._listen()
                failures = 0
            except (psycopg.Error, PostgresUnavailable, OSError):
                # Until then each request queries the database, and reports its own errors.
                failures += 1
                await asyncio.sleep(back_off(failures))

    async def _listen(self) -> None:
        link = ReconnectingConnection(self._url, Purpose.LISTEN)
        try:
            conn = await link.get()
            if not has_own_session(conn):
                await asyncio.sleep(POOLED_PAUSE_SECONDS)
                return
            await listen(
                conn, [Channel.ACCOUNTS], self._on_notification, is_wanted=lambda: link.is_good() and self._is_used()
            )
        finally:
            self._is_told = False
            self.forget()
            await link.close()

    def _on_notification(self, channel: Channel) -> None:
        """Handle a notification. The first one confirms that LISTEN works."""
        self._is_told = True
        self.forget()

    def _is_used(self) -> bool:
        return self._now() - self._asked_at < IDLE_SECONDS
