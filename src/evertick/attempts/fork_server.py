"""The fork server of one bundle: imports the bundle once, and forks a child for each attempt.

Runs no attempt itself. Also kills children that would outlive their runner's lease: for that it needs neither the runner
nor the database.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import time
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from evertick.attempts.body import Loaded, load, obstacle_to_forking
from evertick.attempts.child import Child
from evertick.attempts.child_setup import REPORTED_EXIT_CODE, Cancellation, ChildSetup, ReuseLimits, enter_session
from evertick.domain.attempt import Usage
from evertick.logs.capture import Captured, SpoolWriter, capture_logging, capture_streams
from evertick.logs.spool import OpenSpool, SpoolIndex, open_nowhere
from evertick.processes.system import (
    CHILD_POLL_MS,
    IS_PORTABLE,
    MessageSocket,
    adopted,
    boot_seconds,
    children_of,
    send_fds,
    signal_fd,
    signal_mask,
)
from evertick.processes.thread_pools import without_pool_threads
from evertick.processes.tree import kill_tree
from evertick.processes.usage import usage_of
from evertick.storage.result_files import ResultFiles

LEASE_EXPIRED = (
    "lost_contact: no heartbeat was answered in time, so it was stopped before another runner could get its lease"
)


# After a suspend the deadline may be long past; a poll that was suspended with the machine must not last much longer.
_LONGEST_POLL_MS = 250


class LeaseDeadline:
    """Times are seconds since boot."""

    def __init__(self) -> None:
        self.children: set[int] = set()
        self.until = 0.0

    def poll_ms(self, otherwise_ms: int) -> int:
        """How long the fork server may sleep."""
        if not self.children:
            return otherwise_ms
        left_ms = max(0.0, self.until - boot_seconds()) * 1000
        return int(min(otherwise_ms, _LONGEST_POLL_MS, left_ms))

    def take_cut_off(self) -> list[int]:
        """The children whose deadline has passed, each once."""
        if not self.children or boot_seconds() < self.until:
            return []
        cut_off, self.children = sorted(self.children), set()
        return cut_off


_REAP_POLL_MS = 2


_LAZY_POLL_MS = 50


_LONGEST_REAP_SECONDS = 1.0


_CONTROL_BYTES = 64 * 1024


_WARM_UP_ROUNDS = 20


BATCH = 4


# Blocked for good, in the keeper and in the warm parent; each attempt's process lets all in.
BLOCKED = signal_mask({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


# User code must be the kernel's first choice when memory runs out, not the runner.
_OOM_SCORE = "300"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerConfig:
    """A fork server's configuration, from its command line. `spool_prefix` marks its processes, so that they can be found."""

    runner_pid: int
    folder: str
    file: str
    imports_in_child: bool
    spool_prefix: str
    # The folder of its Python environment, if it has one of its own.
    environment: str = ""
    limits: ReuseLimits = field(default_factory=ReuseLimits)
    files: ResultFiles = field(default_factory=ResultFiles)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ForkServerConfig:
        fields = json.loads(text)
        return cls(**{**fields, "limits": ReuseLimits(**fields["limits"]), "files": ResultFiles(**fields["files"])})


class ForkServer:
    """Serves one runner over one socket: fork, ask to stop, kill; and reports started and dead children."""

    def __init__(self, plan: ForkServerConfig, control: MessageSocket) -> None:
        self._plan = plan
        self._control = control
        self._captured = Captured(SpoolWriter(2))
        self._cancellation = Cancellation()
        self._loaded = Loaded()
        self._spool_index = SpoolIndex(plan.spool_prefix)
        self._numbers: dict[int, int] = {}
        self._logs: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._born = 0
        self._dead: list[tuple[int, int, Usage | None]] = []
        self._announce_by: float | None = None
        self._has_orphans = False
        self._ended: set[int] = set()
        self._deaths = signal_fd({signal.SIGCHLD})
        self._own_fds = open_nowhere(), open_nowhere()
        self._spared: frozenset[int] = frozenset()
        self._guard = LeaseDeadline()

    def run(self, reaper_pid: int) -> NoReturn:
        """Exits when the runner closes the socket; the reaper then kills what is left."""
        enter_session(reaper_pid, 2, BLOCKED)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
        capture_streams(self._captured)
        if self._load():
            self._serve(reaper_pid)
        os._exit(0)

    def _load(self) -> bool:
        """Import the code and report the result. False when nothing can be forked from here."""
        if not self._plan.imports_in_child:
            with without_pool_threads():
                self._loaded = load(self._plan.folder, self._plan.file)
            if self._loaded.failure is not None:
                self._tell(["broken", self._loaded.failure, self._loaded.traceback[-8000:]])
                return False
            if (obstacle := obstacle_to_forking(self._control.fileno())) is not None:
                self._tell(["unforkable", obstacle])
                return False
            capture_logging(self._captured)
            self._spared = frozenset(children_of(os.getpid()))
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._cancellation)
        coroutine_tasks = self._loaded.coroutine_tasks()
        if coroutine_tasks:
            import evertick.attempts.coroutines  # noqa: F401  once here instead of in every child
        self._tell(["ready", os.getpid(), coroutine_tasks])
        return True

    def _serve(self, reaper_pid: int) -> None:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._deaths, select.POLLIN)
        self._warm_up()
        gc.collect()
        gc.freeze()
        gc.disable()
        while True:
            is_hurried = self._has_orphans or self._announce_by is not None
            sleep_ms = _REAP_POLL_MS if is_hurried else _LAZY_POLL_MS if self._dead else CHILD_POLL_MS
            ready = dict(poll.poll(self._guard.poll_ms(sleep_ms)))
            if self._deaths in ready:
                os.read(self._deaths, 4096)
            if IS_PORTABLE and os.getppid() != reaper_pid:
                return
            self._reap_children()
            if self._announce_by is None and (not ready or len(self._dead) >= BATCH):
                self._announce()
            if self._control.fileno() in ready and not self._obey():
                return
            # After the runner's messages: they may have extended the lease just now.
            if cut_off := self._guard.take_cut_off():
                self._stop_cut_off(cut_off)

    def _warm_up(self) -> None:
        """Run through an attempt here, until Python has specialized its code and filled its caches.

        Pages that are still written later would be copied by every child, at 2 µs a page.
        """
        child, reaper_pid = Child(self._setup(0, -1, OpenSpool("", -1, 0)), self._spared), os.getppid()
        for _ in range(_WARM_UP_ROUNDS):
            enter_session(reaper_pid, 2, BLOCKED)
            copy_context().run(child.warm_up)

    def _obey(self) -> bool:
        """Carry out all pending requests of the runner; the busier it is, the larger the batch. False when it closed
        the socket."""
        to_fork = urgent = 0
        with suppress(BlockingIOError):
            while message := self._control.recv(_CONTROL_BYTES, socket.MSG_DONTWAIT):
                for verb, argument in json.loads(message):
                    if verb == "fork":
                        to_fork += argument
                    elif verb == "fork_urgent":
                        urgent += argument
                    elif verb == "contact":
                        self._guard.until = argument
                    elif verb == "guard":
                        self._guard.children.add(argument)
                    elif (pid := self._pids.get(argument)) is not None:
                        _stop(verb, pid)
            return False
        self._fork_many(urgent, is_urgent=True)
        self._fork_many(to_fork)
        return True

    def _fork_many(self, count: int, *, is_urgent: bool = False) -> None:
        for batch in range(0, count, BATCH):
            setups: list[ChildSetup] = []
            runner_ends: list[int] = []
            try:
                for _ in range(min(BATCH, count - batch)):
                    self._born += 1
                    runner_end, child_end = socket.socketpair()
                    log = self._spool_index.open()
                    runner_ends.append(runner_end.detach())
                    setups.append(self._setup(self._born, child_end.detach(), log, is_urgent=is_urgent))
                self._fork_batch(setups, runner_ends)
            except OSError as error:  # no memory, processes or descriptors left: running attempts must not suffer
                self._tell(["unborn", count - batch, str(error)])
                return
            finally:
                for setup in setups:
                    os.close(setup.fd)
                    os.close(setup.log_fd)
                for fd in runner_ends:
                    os.close(fd)

    def _setup(self, number: int, fd: int, log: OpenSpool, *, is_urgent: bool = False) -> ChildSetup:
        return ChildSetup(
            number=number,
            fd=fd,
            log_fd=log.fd,
            log_path=log.path,
            log_start=log.start,
            own_fds=self._own_fds,
            parent_pid=os.getpid(),
            is_urgent=is_urgent,
            captured=self._captured,
            cancellation=self._cancellation,
            limits=self._plan.limits,
            files=self._plan.files,
        )

    def _fork_batch(self, setups: list[ChildSetup], runner_ends: list[int]) -> None:
        """Only forks in the loop: after each one, every page that this process touches is copied (3 µs)."""
        children = [Child(setup) for setup in setups]
        fds = [self._control.fileno(), self._deaths, *runner_ends]
        fds += [fd for setup in setups for fd in (setup.fd, setup.log_fd)]
        unwanted = _ranges(fds)
        code = partial(load, self._plan.folder, self._plan.file) if self._plan.imports_in_child else self._loaded
        pids = []
        for child in children:
            pid = os.fork()
            if pid == 0:
                child.live(code, unwanted)
            pids.append(pid)
        passed: list[int] = []
        for setup, pid, runner_end in zip(setups, pids, runner_ends, strict=True):
            self._numbers[pid] = setup.number
            self._pids[setup.number] = pid
            self._logs[setup.number] = setup.log_path
            passed += runner_end, setup.log_fd
        born = [(setup.number, pid, setup.log_path, setup.log_start) for setup, pid in zip(setups, pids, strict=True)]
        send_fds(self._control, [json.dumps(["born", born]).encode()], passed)

    def _reap_children(self) -> None:
        """Reap dead children and kill their orphans, which are now children of this process."""
        has_reaped = False
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            has_reaped = True
            self._ended.add(pid)
            if (number := self._numbers.pop(pid, None)) is not None:
                del self._pids[number]
                self._guard.children.discard(number)
                has_reported = status == REPORTED_EXIT_CODE << 8
                self._dead.append((number, status, None if has_reported else usage_of(used)))
                if not has_reported:
                    self._announce_by = self._announce_by or time.monotonic() + _LONGEST_REAP_SECONDS
        if has_reaped or self._has_orphans:
            self._kill_orphans()
        if self._announce_by is not None and (not self._has_orphans or time.monotonic() >= self._announce_by):
            self._announce()

    def _kill_orphans(self) -> None:
        known = self._numbers.keys() | self._spared
        orphans = [pid for pid in adopted(self._ended) if pid not in known]
        for orphan in orphans:
            kill_tree(orphan)
        self._has_orphans = bool(orphans)
        if not orphans:
            self._ended.clear()

    def _stop_cut_off(self, numbers: list[int]) -> None:
        """The runner did not extend its leases in time: it is frozen, or disconnected from the database."""
        for number in numbers:
            if (pid := self._pids.get(number)) is not None:
                kill_tree(pid)
        self._tell(["cut_off", numbers])

    def _announce(self) -> None:
        """An attempt that died without a report is announced when no orphan is left; the others can wait."""
        if self._dead:
            dead = [(number, status, used, self._is_log_finished(number)) for number, status, used in self._dead]
            self._tell(["dead", dead])
        self._dead = []
        self._announce_by = None

    def _is_log_finished(self, number: int) -> bool:
        """A child that imports may print before it has an order: its file is not reused."""
        path = self._logs.pop(number)
        return bool(path) and (self._has_orphans or self._plan.imports_in_child or self._spool_index.put_back(path))

    def _tell(self, message: list[Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _stop(verb: str, pid: int) -> None:
    if verb == "kill":
        kill_tree(pid)
    else:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)


def _ranges(fds: list[int]) -> list[tuple[int, int]]:
    """Descriptors as ranges, each from its first to after its last: closing many at once costs a child as much as
    closing one."""
    ranges: list[tuple[int, int]] = []
    for fd in sorted(fds):
        if ranges and ranges[-1][1] == fd:
            ranges[-1] = ranges[-1][0], fd + 1
        else:
            ranges.append((fd, fd + 1))
    return ranges
