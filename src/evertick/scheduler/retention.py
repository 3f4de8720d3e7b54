"""Retention at a pace that does not disturb other work: continuous rounds in the leader, or one round on request.

A round is many small transactions with pauses. It may be abandoned at any moment: the next round starts over.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import retention, server, shards
from evertick.domain.access import Actor
from evertick.domain.errors import NotLeader
from evertick.domain.retention import Pace, rest_seconds
from evertick.engine.retention import (
    Kind,
    PendingCleanup,
    PruneGrant,
    Walked,
    prune_journal,
    prune_kind,
    prune_runs,
    sweep,
)
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection

SHARD = 0
# A round that finds nothing takes a handful of statements; runs that end later are found by the next one.
ROUND_SECONDS = 3600.0
# With a short retention, rounds are more frequent.
ROUNDS_PER_RETENTION = 24
# How soon a new leader begins, and how often a standby checks whether it leads.
FIRST_SECONDS, LOOK_SECONDS = 10.0, 1.0
# Operators need the rows of dead runners for a while, whatever the retention.
RUNNERS_KEPT = timedelta(days=7)
# A publish in progress has stored the code but not yet the version, or restores an old version.
CODE_KEPT = timedelta(days=1)

# Kinds that are pruned by their age alone.
HISTORY = [kind for kind in Kind if kind not in (Kind.RUNS, Kind.JOURNAL, Kind.RUNNERS, Kind.VERSIONS, Kind.BUNDLES)]

Stage = Callable[[AsyncConnection, PruneGrant], Awaitable[bool]]
Walk = Callable[..., Awaitable[Walked]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """The cutoff time of each kind of row. `now` is the database's time."""

    now: datetime
    history: datetime
    runners: datetime
    code: datetime


def limits_of(now: datetime, kept: timedelta) -> RetentionLimits:
    before = now - kept
    return RetentionLimits(now=now, history=before, runners=now - RUNNERS_KEPT, code=min(before, now - CODE_KEPT))


class PruneRound:
    """Prune everything that is old, once. Each step is one bounded transaction. `is_sweep`: only the rows that deleted
    runs left behind."""

    def __init__(self, limits: RetentionLimits, *, actor: Actor, is_sweep: bool = False) -> None:
        self._limits, self._actor = limits, actor
        self._after: Counter[str] = Counter()
        self._entry: int | None = None
        self._sweep_runs = partial(self._sweep, PendingCleanup.RUN)
        self._stages: deque[Stage] = deque([self._sweep_runs])
        if not is_sweep:
            self._stages += [
                partial(self._walk, Kind.RUNS, prune_runs),
                partial(self._walk, Kind.JOURNAL, prune_journal),
                *(partial(self._prune, kind, limits.history) for kind in HISTORY),
                partial(self._prune, Kind.RUNNERS, limits.runners),
                partial(self._prune, Kind.VERSIONS, limits.code),
                partial(self._sweep, PendingCleanup.VERSION),
                partial(self._prune, Kind.BUNDLES, limits.code),
            ]
        self.pace = Pace()
        self.counts: Counter[Kind] = Counter()
        self.refused: list[int] = []

    @property
    def is_over(self) -> bool:
        return not self._stages

    @property
    def last_run_id(self) -> int:
        """The cursor of the walk over the runs."""
        return self._after[Kind.RUNS]

    async def step(self, conn: AsyncConnection, *, epoch: int) -> bool:
        """Returns whether there may be more of the same."""
        started = time.monotonic()
        before = self._limits.history
        mandate = PruneGrant(shard=SHARD, epoch=epoch, before=before, actor=self._actor, entry=self._entry)
        stage = self._stages[0]
        if is_over := await stage(conn, mandate):
            self._stages.remove(stage)
        self.pace = self.pace.after(time.monotonic() - started)
        return not is_over

    async def _walk(self, kind: Kind, prune: Walk, conn: AsyncConnection, mandate: PruneGrant) -> bool:
        done = await prune(conn, mandate, after=self._after[kind], pace=self.pace, now=self._limits.now)
        if done.pruned and kind is Kind.RUNS:
            self._after[PendingCleanup.RUN] = 0
            self._stages.appendleft(self._sweep_runs)
        self._after[kind], self._entry = done.last, done.entry
        self.counts[kind] += done.pruned
        self.refused += done.refused
        return done.is_end

    async def _prune(self, kind: Kind, before: datetime, conn: AsyncConnection, mandate: PruneGrant) -> bool:
        done = await prune_kind(conn, replace(mandate, before=before), kind, pace=self.pace)
        self._entry = done.entry
        self.counts[kind] += done.pruned
        return done.pruned < self.pace.batch

    async def _sweep(self, kind: PendingCleanup, conn: AsyncConnection, mandate: PruneGrant) -> bool:
        done = await sweep(conn, mandate, kind, after=self._after[kind], pace=self.pace)
        self._after[kind] = done.last
        self.refused += done.refused
        return done.is_end


class Retention:
    """The leader's rounds. `epoch` returns the leader's epoch, or None while this process does not lead."""

    def __init__(
        self, settings: Settings, *, link: ReconnectingConnection, epoch: Callable[[], int | None], log: Log
    ) -> None:
        self._kept = timedelta(days=settings.retention_days)
        self._link, self._epoch, self._log = link, epoch, log
        each = self._kept.total_seconds() / ROUNDS_PER_RETENTION
        self._pause = min(ROUND_SECONDS, each) if self._kept else ROUND_SECONDS
        self._round: PruneRound | None = None
        self._begins_at: float | None = None

    async def tick(self) -> float:
        """One step of a round. Returns the pause after it."""
        epoch = self._epoch()
        if epoch is None:
            self._round = self._begins_at = None
            return LOOK_SECONDS
        if self._begins_at is None:
            self._begins_at = time.monotonic() + min(FIRST_SECONDS, self._pause)
        if (seconds := self._begins_at - time.monotonic()) > 0:
            return min(seconds, LOOK_SECONDS)
        try:
            return await self._step(await self._link.get(), epoch)
        except NotLeader:
            self._round = self._begins_at = None
            return LOOK_SECONDS
        except BaseException:
            self._round = None
            raise

    async def _step(self, conn: AsyncConnection, epoch: int) -> float:
        if self._round is None:
            limits = limits_of(await shards.read_clock(conn), self._kept)
            self._round = PruneRound(limits, actor=Actor("evertick"), is_sweep=not self._kept)
        round_ = self._round
        before, started = round_.counts.copy(), time.monotonic()
        has_more = await round_.step(conn, epoch=epoch)
        took = time.monotonic() - started
        for kind, count in (round_.counts - before).items():
            metrics.PRUNED.labels(kind=kind.value).inc(count)
        if round_.is_over:
            self._tell(round_)
            self._round, self._begins_at = None, time.monotonic() + self._pause
            return LOOK_SECONDS
        # The backlog is worth a query only between steps of long work.
        return rest_seconds(took, is_behind=has_more and await server.is_behind(conn))

    def _tell(self, done: PruneRound) -> None:
        if counts := {kind.value: count for kind, count in done.counts.items() if count}:
            self._log.info("history_pruned", **counts)
        if done.refused:
            metrics.QUARANTINED.labels(kind="prune").inc(len(done.refused))
            self._log.error("prune_failed", ids=done.refused[:10], count=len(done.refused))


async def old_run_ids(conn: AsyncConnection, *, before: datetime) -> range:
    """The range of ids of runs that began before that time; about as many as will be deleted. Found by bisection."""
    oldest = await retention.run_at_or_above(conn, 0)
    if oldest is None:
        return range(0)
    low, high = oldest.id, (await retention.newest_run_id(conn) or 0) + 1
    while low < high:
        middle = (low + high) // 2
        found = await retention.run_at_or_above(conn, middle)
        if found is None or found.created_at >= before:
            high = middle
        else:
            low = found.id + 1
    return range(oldest.id, low)
