"""A second connection of the leader, in addition to the connection that renews its lease: to the same server, with timeouts
bounded by the lease."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.errors import NotLeader
from evertick.services.lead import Lead
from evertick.services.link import Link
from evertick.store import shards
from evertick.store.db import Purpose
from evertick.store.line import keeps_session


class LedLink:
    """`lock_share`: the share of a job's time that may be spent waiting for a lock."""

    def __init__(self, url: str, lead: Lead, settings: Settings, *, lock_share: float) -> None:
        self._lead, self._settings, self._lock_share = lead, settings, lock_share
        self._link = Link(url, Purpose.PLANNING)
        self._bounded: AsyncConnection | None = None

    async def get(self) -> AsyncConnection:
        """Raises NotLeader if this connection reaches another server than the lease was acquired on."""
        conn = await self._link.get()
        if self._link.server != self._lead.led_on:
            raise NotLeader(f"shard {self._lead.shard} was led on another server ({self._lead.led_on})")
        if conn is not self._bounded:
            if keeps_session(conn):
                seconds = self._settings.step_seconds
                await shards.bound_session(
                    conn,
                    statement_seconds=seconds,
                    lock_seconds=seconds * self._lock_share,
                    transaction_seconds=self._settings.leader_lease_seconds,
                )
            self._bounded = conn
        return conn

    async def close(self) -> None:
        await self._link.close()
