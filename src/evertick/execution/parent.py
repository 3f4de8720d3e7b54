"""The warm parent: has a bundle's code loaded and forks attempts' processes from it, ahead of need.

Single-threaded, with no socket but the one to its runner, because a fork copies neither threads nor the other end of a
connection. It never runs a task itself, and it kills whatever a dead attempt left behind.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from evertick.execution.capture import Captured, SpoolWriter, capture_logging, capture_streams
from evertick.execution.child import Child
from evertick.execution.kill import children_of, kill_tree
from evertick.execution.linux import become_subreaper, die_with_parent, signal_fd
from evertick.execution.loaded import Loaded, load
from evertick.execution.seat import Cancellation, ChildSeat, ReuseLimits
from evertick.execution.spool import open_spool

_IDLE_POLL_MS = 1000
_BURIAL_POLL_MS = 2
_LONGEST_BURIAL_SECONDS = 1.0
_CONTROL_BYTES = 64 * 1024
# User code must be the kernel's first choice when memory runs out, not the runner.
_OOM_SCORE = "300"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentPlan:
    """What a runner tells a warm parent on its command line. `token` marks its processes for whoever must find them."""

    runner_pid: int
    folder: str
    file: str
    imports_in_child: bool
    spool_prefix: str
    token: str
    limits: ReuseLimits = field(default_factory=ReuseLimits)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ParentPlan:
        fields = json.loads(text)
        return cls(**{**fields, "limits": ReuseLimits(**fields["limits"])})


class WarmParent:
    """Serves one runner over one socket: fork, ask to stop, kill; and tells it of children born and dead."""

    def __init__(self, plan: ParentPlan, control: socket.socket) -> None:
        self._plan = plan
        self._control = control
        self._captured = Captured(SpoolWriter(2))
        self._cancellation = Cancellation()
        self._loaded = Loaded()
        self._numbers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._born = 0
        self._to_announce: list[tuple[int, int]] = []
        self._announce_by: float | None = None

    def run(self, keeper_pid: int) -> NoReturn:
        """Never returns; exits when the runner hangs up, and the keeper then kills what is left."""
        try:
            die_with_parent(signal.SIGKILL, keeper_pid)
            become_subreaper()
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
            capture_streams(self._captured)
            if self._load():
                self._serve()
        finally:
            os._exit(0)

    def _load(self) -> bool:
        """Import the code and say how that went. False when nothing can be forked from here."""
        if not self._plan.imports_in_child:
            self._loaded = load(self._plan.folder, self._plan.file)
            if self._loaded.failure is not None:
                self._tell(["broken", self._loaded.failure, self._loaded.traceback[-8000:]])
                return False
            if (obstacle := _obstacle_to_forking(self._control)) is not None:
                self._tell(["unforkable", obstacle])
                return False
            capture_logging(self._captured)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._cancellation)
        coroutine_tasks = self._loaded.coroutine_tasks()
        if coroutine_tasks:
            import evertick.execution.coroutines  # noqa: F401  once here instead of in every child
        self._tell(["ready", coroutine_tasks])
        return True

    def _serve(self) -> None:
        deaths = signal_fd({signal.SIGCHLD})
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(deaths, select.POLLIN)
        gc.collect()
        gc.freeze()
        gc.disable()
        while True:
            ready = dict(poll.poll(_IDLE_POLL_MS if self._announce_by is None else _BURIAL_POLL_MS))
            if deaths in ready:
                os.read(deaths, 4096)
            self._bury()
            if self._control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Carry out one message of the runner. False when it hung up."""
        message = self._control.recv(_CONTROL_BYTES)
        if not message:
            return False
        for verb, argument in json.loads(message):
            if verb == "fork":
                self._fork_many(argument)
            elif (pid := self._pids.get(argument)) is not None:
                if verb == "kill":
                    kill_tree(pid)
                elif verb == "term":
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGTERM)
        return True

    def _fork_many(self, count: int) -> None:
        for done in range(count):
            try:
                self._fork()
            except OSError as error:  # no memory, processes or descriptors left: attempts that run must not suffer
                self._tell(["unborn", count - done, str(error)])
                return

    def _fork(self) -> None:
        self._born += 1
        number = self._born
        runner_end, child_end = socket.socketpair()
        path, log_fd = self._open_log(number)
        try:
            seat = ChildSeat(
                sock=child_end,
                log_fd=log_fd,
                log_path=path,
                parent_pid=os.getpid(),
                captured=self._captured,
                cancellation=self._cancellation,
                limits=self._plan.limits,
            )
            child = Child(seat)
            pid = os.fork()
            if pid == 0:
                self._control.close()
                runner_end.close()
                child.live(self._load_in_child if self._plan.imports_in_child else self._loaded)
            self._numbers[pid] = number
            self._pids[number] = pid
            message = json.dumps(["child", number, pid, path]).encode()
            socket.send_fds(self._control, [message], [runner_end.fileno(), log_fd])
        finally:
            child_end.close()
            runner_end.close()
            os.close(log_fd)

    def _load_in_child(self) -> Loaded:
        return load(self._plan.folder, self._plan.file)

    def _open_log(self, number: int) -> tuple[str, int]:
        """A disk that is full costs the log, not the task."""
        path = f"{self._plan.spool_prefix}{number}.log"
        try:
            return path, open_spool(path)
        except OSError:
            return "", os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def _bury(self) -> None:
        """Reap the dead and kill their orphans, which are now ours; announce the dead when no orphan is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if (number := self._numbers.pop(pid, None)) is not None:
                del self._pids[number]
                self._to_announce.append((number, status))
        if not self._to_announce:
            return
        now = time.monotonic()
        if self._announce_by is None:
            self._announce_by = now + _LONGEST_BURIAL_SECONDS
        orphans = [pid for pid in children_of(os.getpid()) if pid not in self._numbers]
        for orphan in orphans:
            kill_tree(orphan)
        if not orphans or now >= self._announce_by:
            self._tell(["dead", self._to_announce])
            self._to_announce = []
            self._announce_by = None

    def _tell(self, message: list[Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _obstacle_to_forking(control: socket.socket) -> str | None:
    """What the import left in this process that a fork would break."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return f"its import starts threads ({', '.join(names) or 'of an extension'})"
    for entry in Path("/proc/self/fd").iterdir():
        if int(entry.name) == control.fileno():
            continue
        try:
            target = entry.readlink().name
        except OSError:
            continue
        if target.startswith("socket:"):
            return "its import opens sockets"
    return None
