"""An actor that keeps what was taken away: it goes on writing with old epochs, old sessions and an old leadership.

Every such write is on purpose, and noted: none may be accepted. Nothing here ever uses a claim that is still valid.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psycopg
from psycopg import AsyncConnection

from evertick.db.connect import Purpose
from evertick.db.queries import logs
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import EvertickError, NotLeader, PostgresUnavailable
from evertick.engine.finish_and_claim import finish_and_claim
from evertick.engine.fire_schedules import _fire_schedules
from evertick.engine.maintenance import admit_queued_runs, promote_due_tasks, reconcile_runs, time_out_queued_tasks
from evertick.engine.runners import extend, reap_runner
from evertick.engine.shards import observe_heartbeats, poll_work, rebalance_shard, renew_shard
from evertick.engine.verbs import NOT_LEADER
from evertick.runtime.connections import ReconnectingConnection
from tests.chaos.cluster import Cluster
from tests.chaos.record import Answer, Fault
from tests.chaos.watch import Led
from tests.waiting import elapse

# Attempts that were replaced, and running ones that somebody else pretends to own.
_OLD_CLAIMS = """
(select a.run_id, a.idx, a.map_index, a.epoch, coalesce(a.session, 1) from attempt a
   join task k using (run_id, idx, map_index) where k.epoch > a.epoch order by a.finished_at desc limit 20)
union all
(select k.run_id, k.idx, k.map_index, k.epoch, -k.session from task k where k.state = 'running' limit 10)
union all
(select k.run_id, k.idx, k.map_index, k.epoch - 1, k.session from task k where k.state = 'running' limit 10)
"""

Claim = tuple[TaskKey, int, int]

# What leaders write, each in the smallest form: what is refused must be so whatever there is to do. Nobody has session 1.
_LEADERS_VERBS: dict[str, Callable[[AsyncConnection, int, int], Awaitable[object]]] = {
    "renew": lambda conn, shard, epoch: renew_shard(conn, shard=shard, epoch=epoch, seconds=5.0),
    "look": lambda conn, shard, epoch: poll_work(conn, shard=shard, epoch=epoch, lost_after=3600.0),
    "fire": lambda conn, shard, epoch: _fire_schedules(conn, shard=shard, epoch=epoch, plans=[]),
    "promote": lambda conn, shard, epoch: promote_due_tasks(conn, shard=shard, epoch=epoch, limit=1),
    "listen": lambda conn, shard, epoch: observe_heartbeats(
        conn, shard=shard, epoch=epoch, elapsed=0.0, lost_after=3600.0
    ),
    "reap": lambda conn, shard, epoch: reap_runner(
        conn, shard=shard, epoch=epoch, session=1, lost_after=3600.0, infra_retries=3
    ),
    "time_out": lambda conn, shard, epoch: time_out_queued_tasks(conn, shard=shard, epoch=epoch, limit=1),
    "admit": lambda conn, shard, epoch: admit_queued_runs(conn, shard=shard, epoch=epoch),
    "move_out": lambda conn, shard, epoch: rebalance_shard(conn, shard=shard, epoch=epoch, limit=1),
    "reconcile": lambda conn, shard, epoch: reconcile_runs(conn, shard=shard, epoch=epoch, limit=1),
}


@dataclass(slots=True, kw_only=True)
class Zombie:
    """Tries until it is stopped. Every write that was tried is counted once: `refused` and `accepted` by its kind, `unanswered`
    by what came instead of an answer (an outage, a cut, the end of the scenario)."""

    cluster: Cluster
    dice: random.Random
    per_second: float = 4.0
    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def run(self) -> None:
        link = ReconnectingConnection(self.cluster.client_url, Purpose.SCHEDULER)
        try:
            while True:
                try:
                    async with asyncio.timeout(10):
                        await self._round(await link.get())
                except (psycopg.OperationalError, psycopg.InterfaceError, PostgresUnavailable, OSError, TimeoutError):
                    await link.close()
                await elapse(1.0)
        finally:
            await link.close()

    async def _round(self, conn: AsyncConnection) -> None:
        cursor = await conn.execute(_OLD_CLAIMS)
        claims = [(TaskKey(r, i, m), e, s) for r, i, m, e, s in await cursor.fetchall()]
        cursor = await conn.execute("select shard, epoch from shard order by shard")
        led = await cursor.fetchall()
        for _ in range(int(self.per_second)):
            shard, epoch = self.dice.choice(led) if len(led) > 1 else led[0]
            if epoch > 1 and self.dice.random() < 0.3:
                await self.plan_with(conn, shard, self.dice.randrange(1, epoch))
            elif claims:
                claim = self.dice.choice(claims)
                # A claim of the current epoch shares its log with the true owner.
                verbs = (self.finish, self.extend, self.log) if claim[2] > 0 else (self.finish, self.extend)
                await self.dice.choice(verbs)(conn, claim)

    async def finish(self, conn: AsyncConnection, claim: Claim) -> None:
        """Report a result for an attempt that is somebody else's."""
        key, epoch, session = claim
        report = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": epoch, "kind": "success", "result": "stale"}

        async def attempt() -> bool:
            done = await finish_and_claim(
                conn, session=session, reports=[json.dumps(report)], queues=[], free=0, infra_retries=3
            )
            return (key, epoch) not in done.refused

        await self.try_it("stale_finish", attempt, run_id=key.run_id, task=key.idx, epoch=epoch, session=session)

    async def extend(self, conn: AsyncConnection, claim: Claim) -> None:
        """Hold on to an attempt that is somebody else's."""
        key, epoch, session = claim

        async def attempt() -> bool:
            # Never as a session that lives: that would be its heartbeat.
            reply = await extend(conn, session=-abs(session), held=[(key, epoch)])
            return (key, epoch) not in reply.lost and not reply.is_gone

        await self.try_it("stale_extend", attempt, run_id=key.run_id, task=key.idx, epoch=epoch)

    async def log(self, conn: AsyncConnection, claim: Claim) -> None:
        """Send log lines for an attempt that was replaced. These are taken, and must be marked as late."""
        key, epoch, session = claim
        # Before the first line and of no length, so that it never hides where the real lines go on.
        seq = -next(self._numbers)
        chunk = logs.NewChunk(key=key, epoch=epoch, seq=seq, until=0, content="stale")

        async def attempt() -> bool:
            await logs.append(conn, session=session, chunks=[chunk])
            cursor = await conn.execute(
                "select is_late from log_chunk where run_id = %s and idx = %s and map_index = %s and epoch = %s and seq = %s",
                [*key, epoch, seq],
            )
            row = await cursor.fetchone()
            return row is not None and not row[0]

        await self.try_it("stale_log", attempt, run_id=key.run_id, task=key.idx, epoch=epoch, session=session)

    async def plan_with(self, conn: AsyncConnection, shard: int, epoch: int) -> None:
        """Plan as the leader of an epoch that is over, once."""
        await self._plan(conn, shard, epoch, self.dice.choice(list(_LEADERS_VERBS)))

    async def plan_everything(self, conn: AsyncConnection, led: Led) -> None:
        """All that a leader of epochs that are over may have sent before it froze, and that arrives now."""
        for shard, epoch in led.items():
            for verb in _LEADERS_VERBS:
                await self._plan(conn, shard, epoch, verb)

    async def _plan(self, conn: AsyncConnection, shard: int, epoch: int, verb: str) -> None:
        async def attempt() -> bool:
            try:
                return await _LEADERS_VERBS[verb](conn, shard, epoch) is not False
            except NotLeader:
                return False
            except psycopg.Error as error:
                if error.sqlstate == NOT_LEADER:
                    return False
                raise

        await self.try_it("stale_leader", attempt, shard=shard, epoch=epoch, verb=verb)

    async def try_it(self, op: str, attempt: Callable[[], Awaitable[bool]], **detail: object) -> None:
        """One write. `attempt` says whether it was taken."""
        request = f"zombie-{next(self._numbers)}"
        self.cluster.clients.asked(op, request=request, **detail)
        try:
            was_taken = await attempt()
        except (psycopg.Error, EvertickError, OSError, asyncio.CancelledError) as error:
            self.cluster.clients.answered(request, Answer.UNKNOWN, error=f"{type(error).__name__}: {error}")
            self.unanswered[type(error).__name__] += 1
            raise
        self.cluster.clients.answered(request, Answer.OK if was_taken else Answer.ERROR)
        (self.accepted if was_taken else self.refused)[op] += 1


@asynccontextmanager
async def haunted(cluster: Cluster, dice: random.Random, per_second: float = 4.0) -> AsyncIterator[Zombie]:
    """A zombie at work for the length of the block."""
    zombie = Zombie(cluster=cluster, dice=dice, per_second=per_second)
    number = cluster.record.began(Fault.STALE_WRITER, "all")
    working = asyncio.create_task(zombie.run())
    try:
        yield zombie
    finally:
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        cluster.record.ended(number)
