"""Archives the logs of ended runs to the object storage, and deletes archived logs that retention has removed.

Runs in the leader, in the background, with a small share of the database's time. Lines are deleted from the database
only after the object was read back and compared. During a storage outage they stay in the database.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import logs, server
from evertick.db.queries.logs import BEFORE_ALL, ChunkKey, RunWithLogs
from evertick.domain.errors import NotLeader, ResultLost, StorageUnavailable
from evertick.domain.log_archive import object_name, pack
from evertick.domain.retention import rest_seconds
from evertick.engine.retention import (
    Leading,
    archive_logs,
    create_archive_object,
    delete_archive_objects,
    finish_log_archiving,
    orphaned_archive_objects,
    queue_log_archiving,
)
from evertick.engine.verbs import is_poison
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.thread_runner import ThreadRunner
from evertick.storage.object_store import ObjectStore

SHARD = 0
LOOK_SECONDS, ROUND_SECONDS = 1.0, 30.0
LONGEST_PAUSE_SECONDS = 60.0
# The longest that a step may take: an object written to and read back from a very slow storage.
STEP_SECONDS = 120.0
# The number of objects in transfer at once, and the limits of each: bytes of lines, and chunks.
AT_ONCE = 4
OBJECT_BYTES, OBJECT_CHUNKS = 4 * 1024 * 1024, 2000
# Smaller logs stay in the database: their rows are as small as their lines, and the storage charges per object.
SMALLEST_BYTES = 16 * 1024
_WALKED, _RUNS, _OBJECTS = 1000, 200, 100


@dataclass(slots=True)
class _Archiving:
    """A run being archived, and its progress. If the database or the storage refuses this run alone, it waits for the
    next round, so that it delays no other (V11)."""

    run: RunWithLogs
    after: ChunkKey = BEFORE_ALL
    is_over: bool = False
    is_left: bool = False


class LogArchiver:
    """`epoch` returns the leader's epoch, or None while this process does not lead."""

    def __init__(
        self,
        settings: Settings,
        store: ObjectStore,
        *,
        link: ReconnectingConnection,
        epoch: Callable[[], int | None],
        log: Log,
    ) -> None:
        self._store, self._link, self._epoch, self._log = store, link, epoch, log
        self._is_moving, self._after_seconds = settings.log_archive, settings.log_archive_after_seconds
        self._threads = ThreadRunner("log_moving", most=AT_ONCE)
        self.pulse = LoopHealth("log_moving", is_essential=False, longest_tick_seconds=STEP_SECONDS)
        self._due: deque[_Archiving] = deque()
        # Cursor of the round over all queued runs; 0 at its start.
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
        is_behind = await server.is_behind(await self._link.get())
        return rest_seconds(self._busy_seconds, is_behind=is_behind)

    async def _step(self, leading: Leading) -> bool:
        """Returns whether there may be more to do at once."""
        if self._failing_since is not None:
            # Create no entries for a storage that is still unavailable.
            await self._threads.do(lambda: self._store.has("logs/none"))
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
                await finish_log_archiving(conn, leading, over)
        return True

    async def _find(self, leading: Leading) -> bool:
        """Fill the list of due runs. False at the end of a round over all queued runs."""
        async with self._database() as conn:
            if self._last_run_id == 0:
                self._has_walked_all = await queue_log_archiving(conn, leading, limit=_WALKED) < _WALKED
            after, seconds = self._last_run_id, self._after_seconds
            found = await logs.ended(conn, after=after, seconds=seconds, batch=_RUNS)
            if not found:
                return False
            self._last_run_id = found[-1].run_id
            if small := [each for each in found if each.bytes < SMALLEST_BYTES]:
                await finish_log_archiving(conn, leading, small)
        self._due += [_Archiving(each) for each in found if each.bytes >= SMALLEST_BYTES]
        return True

    async def _move(self, leading: Leading, moving: _Archiving) -> None:
        """Archive one object's worth of a run's lines."""
        run_id = moving.run.run_id
        async with self._database() as conn:
            part = await logs.part(conn, run_id, after=moving.after, chunks=OBJECT_CHUNKS, bytes_=OBJECT_BYTES)
        if not part:
            moving.is_over = True
            return
        body, pieces = await self._threads.do(lambda: pack(content for _, content in part))
        async with self._database() as conn:
            object_id = await create_archive_object(conn, leading, run_id=run_id, bytes=len(body))
        await self._threads.do(lambda: put_checked(self._store, object_name(run_id, object_id), body))
        keys = [key for key, _ in part]
        async with self._database() as conn:
            moved = await archive_logs(conn, leading, object_id, list(zip(keys, pieces, strict=True)))
        if moved:
            metrics.LOGS_ARCHIVED.inc(sum(len(content.encode()) for _, content in part))
        moving.after, moving.is_over = keys[-1], not moved

    def _judge(self, some: list[_Archiving], outcomes: list[BaseException | None]) -> None:
        """Log an error that concerns one run alone and postpone that run; raise all others."""
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
            self._log.error("log_archive_refused", run_id=each.run.run_id, error=error)

    async def _remove_dead(self, leading: Leading) -> bool:
        """Returns whether there may be more of them."""
        async with self._database() as conn:
            dead = await orphaned_archive_objects(conn, leading, limit=_OBJECTS)
        if dead:
            names = [object_name(each.run_id, each.object_id) for each in dead]
            await asyncio.gather(*(self._threads.do(partial(self._store.remove, name)) for name in names))
            async with self._database() as conn:
                await delete_archive_objects(conn, leading, [each.object_id for each in dead])
            self._log.info("log_archive_pruned", log_objects=len(dead))
        return len(dead) == _OBJECTS

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[AsyncConnection]:
        """The connection, for one user at a time; measures how long it was busy."""
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
        metrics.LOG_ARCHIVE_FAILING.set(max(seconds, 1.0))
        self.pulse.blocked = f"logs have stayed in the database for {seconds / 60:.0f} minutes: {error}"
        self._log.warning("storage_unavailable", doing="move_logs", error=error)
        return pause_seconds(self._failures)

    def _is_back(self) -> None:
        if self._failing_since is not None:
            self._failing_since, self._failures, self.pulse.blocked = None, 0, None
            metrics.LOG_ARCHIVE_FAILING.set(0.0)

    def _forget(self) -> None:
        """Another scheduler archives now."""
        self._due.clear()
        self._last_run_id = 0
        self._is_back()


def pause_seconds(failures: int) -> float:
    """The pause after this many failures in a row: a storage may be unavailable for days."""
    return min(2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS)


def put_checked(store: ObjectStore, name: str, body: bytes) -> None:
    """Write the object, read it back and compare: afterwards it is the only copy."""
    store.put_bytes(name, body)
    try:
        there = store.get_part(name, at=0, size=len(body) + 1)
    except ResultLost:
        there = None
    if there != body:
        raise StorageUnavailable(f"{store.place} returned different content than was written as {name}.")
