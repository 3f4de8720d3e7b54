"""The continuous proof: the leader of shard 0 checks the guarantees on its live database, round after round.

On the connection of the maintenance, and at most one hundredth of its time. A violation is logged, counted, sent to the
default destinations of notifications, and kept until a later check no longer finds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from psycopg import AsyncConnection

from evertick.db.queries import proofs
from evertick.engine.proofs import Slice, positions_since, record_slice, resolved, round_of
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.scheduler.leadership import LeaderKey
from evertick.scheduler.maintenance_jobs import Rerun

FIRST_SECONDS = 30.0
ROUND_SECONDS = 60.0
# The pause after a slice, as a multiple of its duration: at most 1 % of one connection.
PAUSE_FACTOR = 99
MOST_KNOWN = 100


class Prover:
    """One slice per call. A leader that is replaced leaves its positions behind, and the next one continues there."""

    def __init__(self, *, log: Log) -> None:
        self._log = log
        self._round: AsyncIterator[Slice] | None = None
        self._connection: AsyncConnection | None = None
        self._began_at = 0.0

    async def run_slice(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        if leader["shard"] != 0:
            return Rerun()
        started_at = boot_seconds()
        try:
            done = await self._next(conn)
            if done is not None:
                await self._record(conn, leader, done)
        except BaseException:
            self._round = None
            raise
        now = boot_seconds()
        pause = (now - started_at) * PAUSE_FACTOR
        if done is None:
            pause = max(pause, self._began_at + ROUND_SECONDS - now)
        return Rerun(in_seconds=pause)

    async def _next(self, conn: AsyncConnection) -> Slice | None:
        """The next slice; None at the end of a round."""
        if self._round is None or self._connection is not conn:
            self._began_at, self._connection = boot_seconds(), conn
            self._round = round_of(conn, await positions_since(conn, None))
        done = await anext(self._round, None)
        if done is None:
            self._round = None
        return done

    async def _record(self, conn: AsyncConnection, leader: LeaderKey, done: Slice) -> None:
        known = [
            each
            for each in await proofs.found(conn, with_ended=False, limit=MOST_KNOWN)
            if each.check_name in done.checked
        ]
        ended = await resolved(conn, known) if known else []
        for each in await record_slice(conn, done, ended, **leader):
            metrics.VIOLATIONS.labels(guarantee=each.check_name).inc()
            self._log.error(
                "guarantee_violated",
                guarantee=each.check_name,
                subject=each.subject,
                run=each.run_id,
                detail=each.detail,
            )
        if ended:
            self._log.info("violations_ended", count=len(ended))
