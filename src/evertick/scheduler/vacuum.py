"""Database upkeep by the leader: vacuums hot tables, prunes old rows, archives logs, and reports snapshots that block
vacuum.

On its own connection, in the background, with a small share of the time. Nothing waits for it: it may be slow, fail or
be skipped, and the only cost is disk space.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.queries import server
from evertick.db.queries.server import Holder
from evertick.domain.retention import rest_seconds
from evertick.logs.archive import LogArchiver
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop
from evertick.scheduler.retention import LOOK_SECONDS, Retention
from evertick.storage.object_store import open_store

# Small tables that every task or fire writes to. An external server's autovacuum may visit them only once a minute.
QUICK_TABLES = ["ready_task", "lease", "task_timer", "retry_queue", "retry_slot", "schedule_state", "pending_cleanup"]
# Vacuuming a thousand dead rows takes about 2 ms; fewer are not worth a transaction.
MANY_DEAD_ROWS = 1000
VACUUM_SECONDS = 5.0
# While nothing happens, check less often, so that an idle installation causes hardly any load.
IDLE_VACUUM_SECONDS = 10.0

SNAPSHOT_SECONDS = 60.0
OLD_SNAPSHOT_SECONDS = 600.0

Epoch = Callable[[], int | None]


class Vacuum:
    """`epoch` returns the leader's epoch, or None while this process does not lead. It works only while it leads."""

    def __init__(self, settings: Settings, *, url: str, epoch: Epoch, log: Log) -> None:
        self._settings, self._epoch, self._log = settings, epoch, log
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)

    async def run(self) -> None:
        """Run until canceled."""
        settings, link, epoch, log = self._settings, self._link, self._epoch, self._log
        snapshots = SnapshotMonitor(link=link, epoch=epoch, log=log)
        store = open_store(settings)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._loop("vacuum", TableVacuum(link=link, epoch=epoch).tick))
                group.create_task(self._loop("prune", Retention(settings, link=link, epoch=epoch, log=log).tick))
                group.create_task(self._loop("snapshots", snapshots.tick, snapshots.pulse))
                if store is not None:
                    archiver = LogArchiver(settings, store, link=link, epoch=epoch, log=log)
                    group.create_task(self._loop("log_moving", archiver.tick, archiver.pulse))
        finally:
            await link.close()

    async def _loop(self, name: str, tick: Callable[[], Awaitable[float]], pulse: LoopHealth | None = None) -> None:
        await run_loop(tick, name=name, log=self._log, pulse=pulse or LoopHealth(name, is_essential=False))


class TableVacuum:
    """Vacuums a table when enough rows have died since the last time.

    Rows that an old snapshot keeps are still dead afterwards: they alone are no reason to try again.
    """

    def __init__(self, *, link: ReconnectingConnection, epoch: Epoch) -> None:
        self._link, self._epoch = link, epoch
        self._left: dict[str, int] = {}

    async def tick(self) -> float:
        if self._epoch() is None:
            return LOOK_SECONDS
        conn = await self._link.get()
        dead = await server.dead_rows(conn, QUICK_TABLES)
        full = [name for name, count in dead.items() if count >= self._left.get(name, 0) * 1.2 + MANY_DEAD_ROWS]
        self._left = {name: min(count, self._left.get(name, 0)) for name, count in dead.items()}
        if not full:
            return IDLE_VACUUM_SECONDS
        started = time.monotonic()
        await server.vacuum(conn, full)
        took = time.monotonic() - started
        after = await server.dead_rows(conn, QUICK_TABLES)
        self._left |= {name: after[name] for name in full}
        return max(VACUUM_SECONDS, rest_seconds(took, is_behind=False))


class SnapshotMonitor:
    """Watches for a snapshot so old that vacuum is ineffective, and logs its owner."""

    def __init__(self, *, link: ReconnectingConnection, epoch: Epoch, log: Log) -> None:
        self._link, self._epoch, self._log = link, epoch, log
        self.pulse = LoopHealth("snapshots", is_essential=False)
        self._since: dict[tuple[str, str, str], float] = {}
        self._told: set[tuple[str, str, str]] = set()

    async def tick(self) -> float:
        if self._epoch() is None:
            self._forget()
            return LOOK_SECONDS
        holders = await server.snapshot_holders(await self._link.get())
        ages = self._ages(holders, time.monotonic())
        oldest = max(ages, key=lambda holder: ages[holder], default=None)
        metrics.OLDEST_SNAPSHOT.set(ages[oldest] if oldest is not None else 0.0)
        old = {holder: age for holder, age in ages.items() if age >= OLD_SNAPSHOT_SECONDS}
        self.pulse.blocked = described(oldest, ages[oldest]) if oldest is not None and oldest in old else None
        for holder, age in old.items():
            if _key(holder) not in self._told:
                self._log.warning(
                    "snapshot_too_old",
                    kind=holder.kind,
                    name=holder.name,
                    pid=holder.pid,
                    seconds=round(age),
                    transactions=holder.behind,
                    message="It prevents dead rows from being vacuumed, so tables grow. End it if it is not needed.",
                )
        self._told = {_key(holder) for holder in old}
        return SNAPSHOT_SECONDS

    def _ages(self, holders: list[Holder], now: float) -> dict[Holder, float]:
        """From the server; if it does not report one, since when the same holder was seen."""
        self._since = {_key(each): self._since.get(_key(each), now) for each in holders}
        return {
            each: now - self._since[_key(each)] if each.held_seconds is None else each.held_seconds for each in holders
        }

    def _forget(self) -> None:
        """Another scheduler watches now."""
        if self._since or self._told or self.pulse.blocked:
            self._since, self._told, self.pulse.blocked = {}, set(), None
            metrics.OLDEST_SNAPSHOT.set(0.0)


def described(holder: Holder, seconds: float) -> str:
    who = f"{holder.kind} {holder.name}" + (f" (pid {holder.pid})" if holder.pid is not None else "")
    return f"{who} has held a snapshot for {seconds / 60:.0f} minutes: dead rows cannot be vacuumed"


def _key(holder: Holder) -> tuple[str, str, str]:
    return holder.kind, f"{holder.name} {holder.pid}", holder.xmin
