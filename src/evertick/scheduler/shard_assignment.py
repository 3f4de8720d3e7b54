"""Shard assignment: which shards this scheduler acquires, and which it transfers, when there are several.

With one shard it queries nothing: the first shard leader stands by on its own. With more, one statement per tick reads
the assignment and records that this scheduler is alive. It decides nothing about safety: the lease and the fence do
that for each shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.connection import has_own_session
from evertick.db.queries import shards
from evertick.domain.errors import PostgresUnavailable
from evertick.domain.shards import ShardDecision, ShardStatus, decide
from evertick.engine.maintenance import choose_shards
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import boot_seconds
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop
from evertick.scheduler.shard_leader import ShardLeader

# Shares of a tick: how long a free shard beyond this scheduler's share is left to the others, and how soon to check
# again while one is free.
PATIENCE_SHARE, AGAIN_SHARE = 0.25, 0.1
# A shard that its successor did not acquire is not offered to the same one again at once: it is counted as alive, yet
# cannot lead.
OFFER_AGAIN_TICKS = 10
# A scheduler that leads all shards alone has nothing to acquire, and checks less often for new schedulers.
ALONE_TICKS = 3


class ShardAssignment:
    def __init__(
        self, settings: Settings, *, url: str, owner: str, leader_of: Callable[[int], ShardLeader], log: Log
    ) -> None:
        self._settings, self._owner, self._leader_of, self._log = settings, owner, leader_of, log
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._of_shards = 1
        self._wanted: set[int] = set()
        self._free_since: dict[int, float] = {}
        self._offered: dict[tuple[int, str], float] = {}
        self._is_counted = False
        self._is_count_set = settings.shards is None
        self.wake = asyncio.Event()

    def may_acquire(self, shard: int) -> bool:
        return shard in self._wanted if self._of_shards > 1 else shard == 0

    def note_shard_count(self, of_shards: int) -> None:
        """The number of shards with a leader; known from every renewal, so that an installation with one shard needs no
        query."""
        if of_shards != self._of_shards:
            self._of_shards = of_shards
            self.wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        never = asyncio.Event()
        await run_loop(self.tick, wake=self.wake, stop=never, name="roster", log=self._log)

    async def tick(self) -> float:
        if not self._is_count_set and self._settings.shards is not None:
            conn = await self._link.get()
            await choose_shards(conn, shards=self._settings.shards, actor=self._owner)
            self._is_count_set = True
        if self._of_shards <= 1:
            await self._leave()
            return self._settings.tick_seconds
        conn = await self._link.get()
        self._is_counted = True
        shares = await shards.survey(
            conn, owner=self._owner, seconds=self._settings.leader_lease_seconds, watches=has_own_session(conn)
        )
        self._of_shards = len(shares)
        now = boot_seconds()
        for each in shares:
            # The successor has acquired it.
            self._offered.pop((each.shard, each.owner or ""), None)
        patience = self._settings.tick_seconds * PATIENCE_SHARE
        overdue = {shard for shard, since in self._free_since.items() if now - since >= patience}
        decision = decide(self._owner, shares, overdue=overdue)
        self._act(decision, now)
        return self._pause(shares, decision)

    async def close(self) -> None:
        try:
            await self._leave()
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            self._log.warning("deregister_failed", error=error)
        await self._link.close()

    async def _leave(self) -> None:
        self._wanted, self._free_since = set(), {}
        if self._is_counted:
            await shards.announce_leave(await self._link.get(), owner=self._owner)
            self._is_counted = False

    def _act(self, decision: ShardDecision, now: float) -> None:
        self._free_since = {shard: self._free_since.get(shard, now) for shard in decision.leave}
        self._wanted = set(decision.take)
        for shard in decision.take:
            self._leader_of(shard).wake.set()
        if decision.give is None or now < self._offered.get(decision.give, 0.0):
            return
        shard, successor = decision.give
        self._offered[decision.give] = now + OFFER_AGAIN_TICKS * self._settings.tick_seconds
        self._leader_of(shard).transfer_to(successor)

    def _pause(self, shares: list[ShardStatus], decision: ShardDecision) -> float:
        tick = self._settings.tick_seconds
        if decision.take or decision.leave:
            return tick * AGAIN_SHARE
        if all(each.owner == self._owner and each.live == [self._owner] for each in shares):
            return min(tick * ALONE_TICKS, self._settings.leader_lease_seconds / 2)
        ends = [each.free_in for each in shares if each.free_in is not None and each.free_in > 0]
        return min([tick, *ends])
