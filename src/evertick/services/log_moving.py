"""Moves the logs of runs that have ended from the database to the object storage, and removes there what retention has deleted.

By the leader, in the background, with a small share of the database's time. Lines go only when the object that holds them was read
back as it was put. While the storage is away they stay where they are, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.errors import NotLeader, ResultLost, StorageUnavailable
from evertick.domain.log_pack import object_name, pack
from evertick.domain.retention import rest_seconds
from evertick.engine.fenced import is_poison
from evertick.engine.move_logs import dead_objects, forget_objects, leave_runs, list_object, move_lines, watch_runs
from evertick.services import metrics
from evertick.services.aside import Aside
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.object_store import ObjectStore
from evertick.services.pulse import Pulse
from evertick.store import log_moves, upkeep
from evertick.store.log_moves import BEFORE_ALL, ChunkKey, EndedRun, Leading

SHARD = 0
LOOK_SECONDS, ROUND_SECONDS = 1.0, 30.0
LONGEST_PAUSE_SECONDS = 60.0
# The longest that a step may take: an object put and read back by a storage that hardly answers.
STEP_SECONDS = 120.0
# So many objects are on their way at once; each has at most so many bytes of lines, and so many chunks.
AT_ONCE = 4
OBJECT_BYTES, OBJECT_CHUNKS = 4 * 1024 * 1024, 2000
# A log as small as this stays where it is: its rows are as large as its lines, and the storage has a price for each object.
SMALLEST_BYTES = 16 * 1024
_WALKED, _RUNS, _OBJECTS = 1000, 200, 100


class Epoch(Protocol):
    def __call__(self) -> int | None: ...


@dataclass(slots=True)
class _Move:
    """A run on its way, and how far it is. One that the database or the storage refuses alone is left for the next round, so that
    it holds up no other (V11)."""

    run: EndedRun
    after: ChunkKey = BEFORE_ALL
    is_over: bool = False
    is_left: bool = False


class LogMoving:
    """`epoch` says whether this process leads now, and by what right."""

    def __init__(self, settings: Settings, store: ObjectStore, *, link: Link, epoch: Epoch, log: Log) -> None:
        self._store, self._link, self._epoch, self._log = store, link, epoch, log
        self._is_moving, self._after_seconds = settings.storage_logs, settings.storage_logs_after_seconds
        self._aside = Aside("log_moving", most=AT_ONCE)
        self.pulse = Pulse("log_moving", is_essential=False, longest_tick_seconds=STEP_SECONDS)
        self._due: deque[_Move] = deque()
        # Of the round over all watched runs; 0 where it begins.
        self._last_run_id = 0
        self._has_walked_all = False
        self._failing_since: float | None = None
        self._failures = 0
        self._busy_seconds = 0.0
        self._turn = asyncio.Lock()

    async def tick(self) -> float:
        epoch = self._epoch()
        if epoch is None:
            self._forget()
            return LOOK_SECONDS
        self._busy_seconds = 0.0
        try:
            has_more = await self._step(Leading(SHARD, epoch))
        except NotLeader:
            self._forget()
            return LOOK_SECONDS
        except StorageUnavailable as error:
            return self._wait_out(error)
        self._is_back()
        if not has_more:
            return ROUND_SECONDS
        is_behind = await upkeep.is_behind(await self._link.get())
        return rest_seconds(self._busy_seconds, is_behind=is_behind)

    async def _step(self, leading: Leading) -> bool:
        """Whether there may be more to do at once."""
        if self._failing_since is not None:
            # Nothing is listed for a storage that is still away.
            await self._aside.do(lambda: self._store.has("logs/none"))
        if not self._due:
            if self._last_run_id == 0 and await self._remove_dead(leading):
                return True
            if not self._is_moving:
                return False
            if not await self._find(leading):
                self._last_run_id = 0
                return not self._has_walked_all
        some = [self._due.popleft() for _ in range(min(AT_ONCE, len(self._due)))]
        outcomes = await asyncio.gather(*(self._move(leading, each) for each in some), return_exceptions=True)
        self._judge(some, outcomes)
        self._due.extendleft(each for each in some if not each.is_over and not each.is_left)
        if over := [each.run for each in some if each.is_over]:
            async with self._database() as conn:
                await leave_runs(conn, leading, over)
        return True

    async def _find(self, leading: Leading) -> bool:
        """Fill the list of what is due. False at the end of a round over all that are watched."""
        async with self._database() as conn:
            if self._last_run_id == 0:
                self._has_walked_all = await watch_runs(conn, leading, batch=_WALKED) < _WALKED
            after, seconds = self._last_run_id, self._after_seconds
            found = await log_moves.ended(conn, after=after, seconds=seconds, batch=_RUNS)
            if not found:
                return False
            self._last_run_id = found[-1].run_id
            if small := [each for each in found if each.bytes < SMALLEST_BYTES]:
                await leave_runs(conn, leading, small)
        self._due += [_Move(each) for each in found if each.bytes >= SMALLEST_BYTES]
        return True

    async def _move(self, leading: Leading, moving: _Move) -> None:
        """One object's worth of a run's lines."""
        run_id = moving.run.run_id
        async with self._database() as conn:
            part = await log_moves.part(conn, run_id, after=moving.after, chunks=OBJECT_CHUNKS, bytes_=OBJECT_BYTES)
        if not part:
            moving.is_over = True
            return
        body, pieces = await self._aside.do(lambda: pack(content for _, content in part))
        async with self._database() as conn:
            object_id = await list_object(conn, leading, run_id=run_id, size=len(body))
        await self._aside.do(lambda: put_checked(self._store, object_name(run_id, object_id), body))
        keys = [key for key, _ in part]
        async with self._database() as conn:
            moved = await move_lines(conn, leading, object_id, list(zip(keys, pieces, strict=True)))
        if moved:
            metrics.LOGS_MOVED.inc(sum(len(content) for _, content in part))
        moving.after, moving.is_over = keys[-1], not moved

    def _judge(self, some: list[_Move], outcomes: list[BaseException | None]) -> None:
        """What one run alone is guilty of is told, and it is left for later; all else is raised."""
        failed = [(each, error) for each, error in zip(some, outcomes, strict=True) if error is not None]
        for _, error in failed:
            is_own_fault = isinstance(error, psycopg.Error) and is_poison(error.sqlstate)
            if not is_own_fault and not (isinstance(error, StorageUnavailable) and len(failed) < len(some)):
                self._due.clear()
                self._last_run_id = 0
                raise error
        for each, error in failed:
            each.is_left = True
            metrics.QUARANTINED.labels(kind="log_move").inc()
            self._log.error("log_move_refused", run_id=each.run.run_id, error=error)

    async def _remove_dead(self, leading: Leading) -> bool:
        """Whether there may be more of them."""
        async with self._database() as conn:
            dead = await dead_objects(conn, leading, batch=_OBJECTS)
        if dead:
            names = [object_name(each.run_id, each.object_id) for each in dead]
            await asyncio.gather(*(self._aside.do(partial(self._store.remove, name)) for name in names))
            async with self._database() as conn:
                await forget_objects(conn, leading, [each.object_id for each in dead])
            self._log.info("prune", log_objects=len(dead))
        return len(dead) == _OBJECTS

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[AsyncConnection]:
        """The connection, for one at a time, and a note of how long it was busy for us."""
        async with self._turn:
            conn, started = await self._link.get(), time.monotonic()
            try:
                yield conn
            finally:
                self._busy_seconds += time.monotonic() - started

    def _wait_out(self, error: StorageUnavailable) -> float:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._failures += 1
        seconds = now - self._failing_since
        metrics.LOG_MOVES_FAILING.set(max(seconds, 1.0))
        self.pulse.blocked = f"logs stay in the database, for {seconds / 60:.0f} minutes now: {error}"
        self._log.warning("storage_unavailable", doing="move_logs", error=error)
        return pause_seconds(self._failures)

    def _is_back(self) -> None:
        if self._failing_since is not None:
            self._failing_since, self._failures, self.pulse.blocked = None, 0, None
            metrics.LOG_MOVES_FAILING.set(0.0)

    def _forget(self) -> None:
        """Somebody else does it."""
        self._due.clear()
        self._last_run_id = 0
        self._is_back()


def pause_seconds(failures: int) -> float:
    """After so many in a row: a storage may be away for days."""
    return min(2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS)


def put_checked(store: ObjectStore, name: str, body: bytes) -> None:
    """It is there afterwards, and is what was put: what it holds will be nowhere else."""
    store.put_bytes(name, body)
    try:
        there = store.get_part(name, at=0, size=len(body) + 1)
    except ResultLost:
        there = None
    if there != body:
        raise StorageUnavailable(f"{store.place} gave back something else than was put as {name}.")
