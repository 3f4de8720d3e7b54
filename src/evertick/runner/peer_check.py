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

from evertick.config import Settings
from evertick.db.queries.runners import ListedRunner
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.identity import ProcessPlace, is_provably_gone, this_process
from evertick.processes.tree import kill_orphans
from evertick.runner.access import Peers
from evertick.runner.events import PeerDied
from evertick.runtime.loop import run_loop

# Checking a process costs 20 µs and no statement.
CHECK_SECONDS = 0.2
# Killed processes are gone within milliseconds; one that hangs in the kernel is checked again in the next tick.
KILL_ORPHANS_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPeer:
    """A runner that was declared dead now, and the number of attempts it held."""

    runner: ListedRunner
    attempts: int


async def declare_dead_peers(peers: Peers) -> list[DeadPeer]:
    """Declare dead the runners of this machine that are provably gone, after killing their orphaned processes."""
    place = this_process()
    return await _declare_gone(peers, await peers.peers(place), place)


async def _declare_gone(peers: Peers, candidates: Iterable[ListedRunner], place: ProcessPlace) -> list[DeadPeer]:
    dead = []
    for runner in candidates:
        if not is_provably_gone(runner, place):
            continue
        if not await asyncio.to_thread(kill_orphans, runner.session, within_seconds=KILL_ORPHANS_SECONDS):
            continue
        held = await peers.declare_dead(runner)
        metrics.AGENT_LOST.inc(held)
        dead.append(DeadPeer(runner=runner, attempts=held))
    return dead


class PeerCheck:
    """Checks the other runners of this machine."""

    def __init__(self, settings: Settings, *, peers: Peers, put: Callable[[PeerDied], None], log: Log) -> None:
        self._settings, self._source, self._put, self._log = settings, peers, put, log
        self._place = this_process()
        self._peers: list[ListedRunner] = []
        self._listed_at = -inf

    def list_soon(self) -> None:
        """A runner has registered: read the list, so that it is known before it can die."""
        self._listed_at = -inf

    async def run(self) -> None:
        """Run until canceled."""
        await run_loop(self.tick, name="neighbours", log=self._log, is_essential=False)

    async def tick(self) -> float:
        if (began := time.monotonic()) - self._listed_at >= self._source.list_seconds:
            # Set before the query: a runner that registers meanwhile triggers another one.
            self._listed_at = began
            self._peers = await self._list()
        if any(is_provably_gone(runner, self._place) for runner in self._peers):
            await self._declare_dead()
        return min(CHECK_SECONDS, self._settings.tick_seconds)

    async def _list(self) -> list[ListedRunner]:
        try:
            return await self._source.peers(self._place)
        except BaseException:
            self.list_soon()
            raise

    async def _declare_dead(self) -> None:
        dead = await _declare_gone(self._source, self._peers, self._place)
        for each in dead:
            self._log.warning(
                "runner_declared_dead", gone=each.runner.runner_id, pid=each.runner.pid, attempts=each.attempts
            )
            self._peers.remove(each.runner)
        if dead:
            self._put(PeerDied())
