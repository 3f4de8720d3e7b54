"""The process pool of one bundle: its fork server, replaced when old or dead, and the idle children.

Never forks without bound: a bundle that cannot be imported is retried only after a growing pause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from evertick.attempts.fork_server import BATCH
from evertick.executors.local.child_process import ChildProcess, ExecutorLimits
from evertick.executors.local.fork_server_client import BundlePlace, ForkServerClient
from evertick.logs.spool import SpoolFolder
from evertick.processes.tree import explain_exit

if TYPE_CHECKING:
    from evertick.executors.local.bundle_executor import BundleExecutor

_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 15.0
_LONGEST_EXIT_SECONDS = 1.0


class LoadFailure(NamedTuple):
    """Why no child is available. `is_ours`: not the bundle's fault, as far as can be told."""

    reason: str
    traceback: str = ""
    is_ours: bool = False


class ProcessPool:
    def __init__(
        self, executor: BundleExecutor, place: BundlePlace, file: str, spool: SpoolFolder, limits: ExecutorLimits
    ) -> None:
        self._executor = executor
        self._place, self._file = place, file
        self._spool, self._limits = spool, limits
        self._loop = asyncio.get_running_loop()
        self._parents: set[ForkServerClient] = set()
        self._parent: ForkServerClient | None = None
        self._successor: ForkServerClient | None = None
        self._idle: deque[ChildProcess] = deque()
        self._imports_in_child = place.uses_threads
        self._level = limits.min_idle
        self._last_miss_at = self._loop.time()
        self._failure: LoadFailure | None = None
        self._pause_seconds = 0.0
        self._paused_until = 0.0
        self._barren_since: float | None = None
        self._revival: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.all_gone = asyncio.Event()
        self.all_gone.set()
        self.coroutine_tasks: set[tuple[str, str]] = set()
        self._start_parent()

    @property
    def has_work(self) -> bool:
        return any(parent.has_work for parent in self._parents)

    def take(self) -> ChildProcess | None:
        """An idle child, if there is one."""
        return self._idle.popleft() if self._idle else None

    def missed(self, count: int) -> None:
        """This many orders found the pool empty: keep more idle children from now on."""
        self._last_miss_at = self._loop.time()
        if self._parent is not None and self._parent.is_ready:
            self._level = min(self._limits.max_idle, self._level + count)

    def refill(self, waiting_count: int) -> None:
        """Request the children that waiting orders and the pool lack."""
        parent = self._parent
        if parent is None:
            self._revive(waiting_count)
        elif parent.is_ready:
            missing = self._level + waiting_count - len(self._idle) - parent.forking
            if missing >= (1 if waiting_count else min(BATCH, self._level // BATCH + 1)):
                parent.fork(missing, min(missing, max(0, waiting_count - parent.forking)))

    def tick(self, now: float) -> None:
        """Time-based work: retire old fork servers, shrink the pool, time out what hangs."""
        for parent in list(self._parents):
            self._watch(parent, now)
        current = self._parent
        if current is not None and current.is_ready and now - current.started_at > self._limits.parent_age_seconds:
            with suppress(OSError):
                self._successor = self._successor or self._spawn()
        if now - self._last_miss_at > self._limits.idle_decay_seconds and self._level > self._limits.min_idle:
            self._last_miss_at = now
            self._level -= 1
        if len(self._idle) > self._level:
            self._idle.pop().close()

    def extend_lease(self, until: float) -> None:
        for parent in self._parents:
            parent.extend_lease(until)

    def close(self) -> None:
        """Stop the fork servers and everything below them."""
        self._is_closed = True
        self._parent = self._successor = None
        self._idle.clear()
        for parent in self._parents:
            parent.is_retiring = True
            parent.terminate()

    def destroy(self) -> None:
        for parent in self._parents:
            parent.destroy()

    def _revive(self, waiting_count: int) -> None:
        pause = self._paused_until - self._loop.time()
        if self._is_closed or waiting_count == 0:
            return
        if pause <= 0:
            self._failure = None
            self._start_parent()
        elif self._failure is not None:
            self._executor.fail_waiting(self._failure)
        else:
            self._wake_up_after(pause)

    def _wake_up_after(self, seconds: float) -> None:
        if self._revival is None:
            self._revival = self._loop.call_later(seconds, self._wake_up)

    def _wake_up(self) -> None:
        self._revival = None
        self._executor.serve_waiting()

    def _start_parent(self) -> None:
        try:
            self._parent = self._spawn()
        except OSError as error:
            self._pause_after(LoadFailure(f"no fork server could be started: {error}", is_ours=True))

    def _spawn(self) -> ForkServerClient:
        parent = ForkServerClient(self, self._executor.on_message, self._spool)
        parent.start(self._place, self._file, self._limits, imports_in_child=self._imports_in_child)
        self._parents.add(parent)
        self.all_gone.clear()
        return parent

    def _watch(self, parent: ForkServerClient, now: float) -> None:
        patience = self._limits.load_seconds
        slowest = min((link.born_at for link in parent.children.values() if not link.is_loaded), default=now)
        if not parent.is_ready:
            slowest = parent.started_at
        if parent.is_retiring and not parent.has_work:
            parent.terminate()
        elif not parent.is_retiring and now - slowest > patience:
            self.fail(parent, f"{self._file} was not imported within {patience:g} s")
        for link in parent.children.values():
            if link.hung_up_at is not None and now - link.hung_up_at > _LONGEST_EXIT_SECONDS:
                parent.kill(link)

    def on_ready(self, parent: ForkServerClient, coroutine_tasks: list[list[str]]) -> None:
        self.coroutine_tasks = {(dag, task) for dag, task in coroutine_tasks}
        if parent is self._successor:
            old, self._parent, self._successor = self._parent, parent, None
            if old is not None:
                self._retire(old)
        self._executor.serve_waiting()

    def _retire(self, parent: ForkServerClient) -> None:
        parent.is_retiring = True
        for link in [link for link in self._idle if link.parent is parent]:
            self._idle.remove(link)
            link.close()

    def on_unforkable(self, parent: ForkServerClient) -> None:
        """The import has started threads."""
        self._imports_in_child = True
        self._drop(parent)
        self._start_parent()

    def fail(self, parent: ForkServerClient, reason: str, traceback: str = "") -> None:
        """It could not import the bundle."""
        is_current = parent is self._parent
        self._drop(parent)
        if is_current:
            self._pause_after(LoadFailure(reason, traceback))

    def _pause_after(self, failure: LoadFailure) -> None:
        self._failure = failure
        self._pause()
        self._executor.fail_waiting(failure)

    def _drop(self, parent: ForkServerClient) -> None:
        """Expect nothing more of it. Its running attempts may end; `tick` handles the rest."""
        parent.is_ready = True
        if parent is self._parent:
            self._parent = None
        if parent is self._successor:
            self._successor = None
            if self._parent is not None:  # it works, and stays in place for another period
                self._parent.started_at = self._loop.time()
        self._retire(parent)
        if not parent.has_work:
            parent.terminate()

    def _pause(self) -> None:
        self._pause_seconds = min(_LONGEST_PAUSE_SECONDS, self._pause_seconds * 2 or _FIRST_PAUSE_SECONDS)
        self._paused_until = self._loop.time() + self._pause_seconds

    def on_unborn(self, reason: str) -> None:
        """No memory, processes or descriptors left: retry, with a limit."""
        now = self._loop.time()
        self._barren_since = self._barren_since or now
        if now - self._barren_since > self._limits.load_seconds:
            self._executor.fail_waiting(LoadFailure(f"no process could be forked: {reason}", is_ours=True))
        else:
            self._wake_up_after(_FIRST_PAUSE_SECONDS)

    def on_born(self, link: ChildProcess) -> None:
        self._barren_since = None
        if not self._imports_in_child:
            self._add_idle(link)

    def _add_idle(self, link: ChildProcess) -> None:
        link.is_loaded = True
        if link.parent.is_retiring:
            link.close()
            return
        self._pause_seconds = 0.0
        self._idle.append(link)
        self._executor.serve_waiting()

    def on_loaded(
        self, link: ChildProcess, failure: str | None, traceback: str, coroutine_tasks: list[list[str]]
    ) -> None:
        """A child has imported the bundle itself."""
        if failure is not None:
            if link.parent is self._parent:
                self.fail(link.parent, failure, traceback)
            return
        self.coroutine_tasks |= {(dag, task) for dag, task in coroutine_tasks}
        self._add_idle(link)

    def on_child_died(self, link: ChildProcess, status: int) -> None:
        """All its messages were put before."""
        if link in self._idle:
            self._idle.remove(link)
        if not link.is_loaded and not link.parent.is_retiring:
            how = explain_exit(status, has_oom_evidence=False).reason
            self.fail(link.parent, f"the process that imports {self._file} ended: {how}")
        self._executor.on_child_died(link, status)

    def on_gone(self, parent: ForkServerClient, how: str, *, is_killed: bool) -> None:
        """No process of its tree is left. Its children are listed until this is handled."""
        is_load_failure = parent is self._parent and not parent.is_ready
        self._parents.discard(parent)
        if parent is self._parent:
            self._pause()
        self._drop(parent)
        for link in parent.children.values():
            if link in self._idle:
                self._idle.remove(link)
            link.receive()
            self._executor.on_child_lost(link, f"its fork server ended: {how}")
        if not self._parents:
            self.all_gone.set()
        if is_load_failure:
            self._failure = LoadFailure(f"the process that imports {self._file} ended: {how}", is_ours=is_killed)
        self._executor.serve_waiting()
