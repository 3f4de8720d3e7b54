"""Declares dead the runners of this machine whose processes are gone: in a second, instead of after the long silence
that other machines need.

Every runner and scheduler checks the processes of its peers. Never declares a runner dead unless its process is provably gone and
none of its attempts may still run (V5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import runners
from evertick.db.queries.runners import ListedRunner
from evertick.engine.runners import mark_runner_dead
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.identity import ProcessPlace, is_provably_gone, this_process
from evertick.processes.tree import kill_orphans
from evertick.runner.events import PeerDied
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop

# Checking a process costs 20 µs and no statement. The list of peers is read when one registers, and periodically in
# case that notification was lost; without notifications, in every tick.
CHECK_SECONDS, LIST_TICKS = 0.2, 10
# Killed processes are gone within milliseconds; one that hangs in the kernel is checked again in the next tick.
KILL_ORPHANS_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPeer:
    """A runner that was declared dead now, and the number of attempts it held."""

    runner: ListedRunner
    attempts: int


async def declare_dead_peers(conn: AsyncConnection, *, infra_retries: int) -> list[DeadPeer]:
    """Declare dead the runners of this machine that are provably gone, after killing their orphaned processes."""
    place = this_process()
    return await _declare_gone(conn, await _peers(conn, place), place, infra_retries)


async def _peers(conn: AsyncConnection, place: ProcessPlace) -> list[ListedRunner]:
    return await runners.peers(conn, host=place.host, boot_id=place.boot_id, pid_namespace=place.pid_namespace)


async def _declare_gone(
    conn: AsyncConnection, candidates: Iterable[ListedRunner], place: ProcessPlace, infra_retries: int
) -> list[DeadPeer]:
    dead = []
    for runner in candidates:
        if not is_provably_gone(runner, place):
            continue
        if not await asyncio.to_thread(kill_orphans, runner.session, within_seconds=KILL_ORPHANS_SECONDS):
            continue
        reason = f"agent_lost: runner {runner.runner_id} died"
        held = await mark_runner_dead(conn, session=runner.session, reason=reason, infra_retries=infra_retries)
        metrics.AGENT_LOST.inc(held)
        dead.append(DeadPeer(runner=runner, attempts=held))
    return dead


class PeerCheck:
    """Checks the other runners of this machine, on a connection that it shares with other work that can wait."""

    def __init__(
        self, settings: Settings, *, link: ReconnectingConnection, put: Callable[[PeerDied], None], log: Log
    ) -> None:
        self._settings, self._link, self._put, self._log = settings, link, put, log
        self._place = this_process()
        self._peers: list[ListedRunner] = []
        self._list_seconds = settings.tick_seconds * (LIST_TICKS if settings.listen_notify else 1)
        self._listed_at = -inf

    def list_soon(self) -> None:
        """A runner has registered: read the list, so that it is known before it can die."""
        self._listed_at = -inf

    async def run(self) -> None:
        """Run until canceled."""
        await run_loop(self.tick, name="neighbours", log=self._log, is_essential=False)

    async def tick(self) -> float:
        if (began := time.monotonic()) - self._listed_at >= self._list_seconds:
            # Set before the query: a runner that registers meanwhile triggers another one.
            self._listed_at = began
            self._peers = await self._list()
        if any(is_provably_gone(runner, self._place) for runner in self._peers):
            await self._declare_dead()
        return min(CHECK_SECONDS, self._settings.tick_seconds)

    async def _list(self) -> list[ListedRunner]:
        try:
            return await _peers(await self._link.get(), self._place)
        except BaseException:
            self.list_soon()
            raise

    async def _declare_dead(self) -> None:
        dead = await _declare_gone(await self._link.get(), self._peers, self._place, self._settings.infra_retries)
        for each in dead:
            self._log.warning(
                "runner_declared_dead", gone=each.runner.runner_id, pid=each.runner.pid, attempts=each.attempts
            )
            self._peers.remove(each.runner)
        if dead:
            self._put(PeerDied())
