"""The owner's side of a zygote: starts it, asks it for processes, and replaces it when it died or its packages changed.

A request is never lost: what the zygote cannot fork is started as a fresh interpreter, in a second instead of milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from evertick.bundles.environments import Interpreter
from evertick.bundles.zygote_forks import MOST_FDS, REQUEST_BYTES, marks_of
from evertick.config import user_environment
from evertick.processes.system import IS_PORTABLE, MessageSocket, message_pair, recv_fds, send_fds

_LONGEST_START_SECONDS = 60.0
_LONGEST_ANSWER_SECONDS = 10.0
_LONGEST_EXIT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0


# Starts a program with these as its standard output and error, and the descriptor that it gets.
Fds = tuple[int, int, int]
Fresh = Callable[[Fds], "subprocess.Popen[bytes]"]


class Spawned:
    """A process that is being started. As `subprocess.Popen` for a child of this process."""

    def __init__(self, fresh: Fresh) -> None:
        self._fresh = fresh
        self._popen: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None
        self.pid = 0
        self.returncode: int | None = None
        self.started = asyncio.get_running_loop().create_future()

    def born(self, pid: int) -> None:
        self.pid = pid
        self._on_start()

    def start_fresh(self, fds: Fds) -> None:
        try:
            self._popen = self._fresh(fds)
            self.pid = self._popen.pid
        except OSError:
            self.returncode = 255
        self._on_start()

    def poll(self) -> int | None:
        if self._popen is not None:
            self.returncode = self._popen.poll()
        elif self.pid and self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """One that is not started yet gets it then."""
        if not self.pid:
            self._signal = number
        elif self.poll() is None:
            os.kill(self.pid, number)

    def abandon(self) -> None:
        """Kill it, as soon as it has started."""
        self.send_signal(signal.SIGKILL)
        self.started.add_done_callback(lambda _: self._wait())

    def _wait(self) -> None:
        if self._popen is not None:
            self._popen.wait()
        elif self.pid:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _on_start(self) -> None:
        if self._signal is not None:
            self.send_signal(self._signal)
        if not self.started.done():
            self.started.set_result(None)


@dataclass(slots=True, kw_only=True)
class _Request:
    """`go`: the process waits until this is written to. If the zygote dies before it has said the number of a process, that
    process ends, and a fresh one takes its place: the two must not both serve one socket."""

    spawned: Spawned
    text: bytes
    fds: Fds
    go: tuple[int, int]
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygotePlan:
    """What a zygote has imported. `mark` is an environment variable that each of its processes gets anew, with a first value
    of the same length."""

    interpreter: Interpreter
    environment: Mapping[str, str] | None
    modules: tuple[str, ...]
    mark: tuple[str, str] = ("", "")
    idle_seconds: float | None = None


@dataclass(slots=True)
class _Running:
    """One process of a zygote."""

    process: subprocess.Popen[bytes]
    control: MessageSocket
    is_ready: bool = False
    watched: dict[str, int] = field(default_factory=dict)


class Zygote:
    """Its processes are children of this one. `close` ends the zygote itself, and none of them."""

    def __init__(self, plan: ZygotePlan) -> None:
        self.plan = plan
        self._loop = asyncio.get_running_loop()
        self._running: _Running | None = None
        self._requests: dict[int, _Request] = {}
        self._last_number = 0
        self._pause_seconds, self._paused_until = 0.0, 0.0
        self._is_usable = not IS_PORTABLE
        self._idle: asyncio.TimerHandle | None = None
        self._gone: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int | None:
        """None: it does not run now."""
        return None if self._running is None else self._running.process.pid

    def start(self) -> None:
        """Start it before it is needed. It imports meanwhile."""
        self._reap()
        if self._running is not None or not self._is_usable or self._loop.time() < self._paused_until:
            return
        plan = self.plan
        seen = user_environment() if plan.environment is None else plan.environment
        environment = {**seen, "PYTHONHASHSEED": "0"} | ({plan.mark[0]: plan.mark[1]} if plan.mark[0] else {})
        ours, theirs = message_pair()
        command = [*plan.interpreter.command("evertick.bundles.zygote_process"), str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                process = subprocess.Popen(
                    [*command, plan.mark[0], *plan.modules],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=environment,
                )
        except OSError:
            ours.close()
            self._pause()
            return
        self._running = running = _Running(process, ours)
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._receive, running)
        self._loop.call_later(_LONGEST_START_SECONDS, self._end_slow, running)

    def spawn(self, fresh: Fresh, module: str, arguments: list[str], fds: Fds, *, mark: str = "") -> Spawned:
        """Run `module.run(arguments)` in a process with these as its standard output, its standard error, and "{fd}". `fresh`
        starts it without a zygote. The caller may close the descriptors at once."""
        spawned = Spawned(fresh)
        self._replace_outdated()
        self.start()
        if self._running is None:
            spawned.start_fresh(fds)
            return spawned
        self._last_number += 1
        number = self._last_number
        text = json.dumps([number, module, arguments, mark]).encode()
        copies = os.dup(fds[0]), os.dup(fds[1]), os.dup(fds[2])
        request = _Request(spawned=spawned, text=text, fds=copies, go=os.pipe())
        self._requests[number] = request
        if self._running.is_ready:
            self._send(number, request)
        self._keep_until_idle()
        return spawned

    def close(self) -> None:
        """Requests without an answer get a fresh interpreter."""
        if self._idle is not None:
            self._idle.cancel()
        if self._running is not None:
            self._end(self._running)
        for process in self._gone:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LONGEST_EXIT_SECONDS)

    def _send(self, number: int, request: _Request) -> None:
        assert self._running is not None
        running = self._running
        request.timer = self._loop.call_later(_LONGEST_ANSWER_SECONDS, self._end, running)
        try:
            send_fds(running.control, [request.text], [*request.fds, request.go[0]])
        except OSError:  # it is gone or full
            self._requests.pop(number)
            _start_fresh(request)

    def _receive(self, running: _Running) -> None:
        while running is self._running:
            try:
                message, _, _, _ = recv_fds(running.control, REQUEST_BYTES, MOST_FDS)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._end(running)
                self._pause()
                return
            match json.loads(message):
                case ["ready", watched]:
                    running.is_ready, running.watched = True, watched
                    self._pause_seconds = 0.0
                    for number, request in list(self._requests.items()):
                        self._send(number, request)
                case ["unforkable", _]:
                    self._is_usable = False
                    self._end(running)
                case ["born", number, pid]:
                    _born(self._requests.pop(number), pid)
                case ["refused", number, _]:
                    _start_fresh(self._requests.pop(number))

    def _end(self, running: _Running) -> None:
        if running is not self._running:
            return
        self._running = None
        self._loop.remove_reader(running.control.fileno())
        self._receive_last(running)
        running.control.close()
        with suppress(OSError):
            running.process.kill()
        self._gone.append(running.process)
        requests, self._requests = self._requests, {}
        for request in requests.values():
            _start_fresh(request)

    def _receive_last(self, running: _Running) -> None:
        """A process whose number it told before its end does run."""
        with suppress(OSError, ValueError):
            while message := recv_fds(running.control, REQUEST_BYTES, MOST_FDS)[0]:
                said = json.loads(message)
                if said[0] == "born" and (request := self._requests.pop(said[1], None)) is not None:
                    _born(request, said[2])

    def _end_slow(self, running: _Running) -> None:
        if running is self._running and not running.is_ready:
            self._end(running)
            self._pause()

    def _replace_outdated(self) -> None:
        """A package was installed, or Airflow's configuration or a plugin has changed."""
        running = self._running
        if running is not None and running.is_ready and marks_of(list(running.watched)) != running.watched:
            self._end(running)

    def _pause(self) -> None:
        self._pause_seconds = min(_LONGEST_PAUSE_SECONDS, self._pause_seconds * 2 or _FIRST_PAUSE_SECONDS)
        # The first one is replaced at once.
        pause = 0.0 if self._pause_seconds == _FIRST_PAUSE_SECONDS else self._pause_seconds
        self._paused_until = self._loop.time() + pause

    def _keep_until_idle(self) -> None:
        if self.plan.idle_seconds is not None:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = self._loop.call_later(self.plan.idle_seconds, self.close)

    def _reap(self) -> None:
        self._gone = [process for process in self._gone if process.poll() is None]


def _born(request: _Request, pid: int) -> None:
    with suppress(OSError):  # it was killed meanwhile
        os.write(request.go[1], b"1")
    _release(request)
    request.spawned.born(pid)


def _start_fresh(request: _Request) -> None:
    request.spawned.start_fresh(request.fds)
    _release(request)


def _release(request: _Request) -> None:
    if request.timer is not None:
        request.timer.cancel()
    for fd in (*request.fds, *request.go):
        os.close(fd)
