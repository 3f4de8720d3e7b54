"""The runner's client of one fork server: starts its process, requests forks and kills, and receives starts and deaths."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evertick.attempts.fork_server import BATCH, LEASE_EXPIRED, ForkServerConfig
from evertick.bundles.environments import Interpreter
from evertick.bundles.zygote import Fds, Spawned, Zygote
from evertick.domain.attempt import FORK_SERVER_MARK, OutcomeKind, Usage
from evertick.executors.local.child_process import ChildProcess, ExecutorLimits
from evertick.logs import format
from evertick.logs.spool import SpoolFolder
from evertick.processes.system import message_pair, recv_fds
from evertick.processes.tree import find_by_token, kill_tree

if TYPE_CHECKING:
    from evertick.executors.local.process_pool import ProcessPool

_MODULE = "evertick.attempts.fork_server_main"
_TOKEN_BYTES = 8
_CONTROL_BYTES = 64 * 1024
_MOST_FDS = 2 * BATCH
_RETRY_SECONDS = 0.01
_REAP_SECONDS = 0.2


class BundlePlace(NamedTuple):
    """Where a bundle's code is. If its import starts threads, it is imported in each process and never forked.

    `environment` is the environment that its code sees; None passes on all of the runner's.
    """

    path: Path
    uses_threads: bool
    environment: Mapping[str, str] | None = None
    interpreter: Interpreter = Interpreter()
    zygote: Zygote | None = None


def unused_mark(spool: SpoolFolder) -> str:
    """The mark of no fork server, as long as that of each."""
    return str(spool.path / f"{'0' * 2 * _TOKEN_BYTES}-")


class ForkServerClient:
    """One fork server from its start until no process of its tree is left. `pool` handles what happens to it and to its
    children, `put_message` receives their messages."""

    def __init__(
        self, pool: ProcessPool, put_message: Callable[[ChildProcess, list[Any]], None], spool: SpoolFolder
    ) -> None:
        self._pool, self._put_message, self._spool = pool, put_message, spool
        self.children: dict[int, ChildProcess] = {}
        self.forking = 0
        self.is_ready = False
        self.is_retiring = False
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time()
        self._pid = 0
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._requests: list[tuple[str, float]] = []
        self._reaper: subprocess.Popen[bytes] | Spawned

    def start(self, place: BundlePlace, file: str, limits: ExecutorLimits, *, imports_in_child: bool) -> None:
        ours, theirs = message_pair()
        plan = ForkServerConfig(
            runner_pid=os.getpid(),
            folder=str(place.path),
            file=file,
            imports_in_child=imports_in_child,
            environment=place.interpreter.environment,
            spool_prefix=str(self._spool.path / f"{self._token}-"),
            limits=limits.reuse,
            files=limits.results,
        )
        environment = place.environment
        if environment is not None:
            # The loader's seed: a DAG that loops over a set must name its tasks here as it did there.
            environment = {**environment, "PYTHONHASHSEED": "0", FORK_SERVER_MARK: plan.spool_prefix}
        # A fresh interpreter, so that none of the runner's threads, sockets and locks are copied into attempts.
        fresh = partial(_start_fresh, place.interpreter, plan, environment)
        with theirs, (self._spool.path / f"{self._token}.err").open("wb") as errors:
            fds = errors.fileno(), errors.fileno(), theirs.fileno()
            if place.zygote is None or imports_in_child:
                self._reaper = fresh(fds)
            else:
                arguments, mark = ["{fd}", plan.to_json()], plan.spool_prefix
                self._reaper = place.zygote.spawn(fresh, _MODULE, arguments, fds, mark=mark)
        self._control = ours
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._receive)

    def fork(self, count: int, urgent: int) -> None:
        """`urgent`: so many of them have orders that wait."""
        self.forking += count
        for verb, share in (("fork_urgent", urgent), ("fork", count - urgent)):
            if share:
                self._request(verb, share)

    def guard(self, link: ChildProcess, contact_until: float) -> bool:
        """Called before the start of an attempt that must not outlive the lease. False when the fork server could not
        be reached."""
        try:
            self._control.send(json.dumps([("contact", contact_until), ("guard", link.number)]).encode())
        except BlockingIOError:
            return False
        except OSError:
            pass  # it is gone: `_receive` will notice
        link.is_guarded = True
        return True

    def extend_lease(self, until: float) -> None:
        if any(link.is_guarded for link in self.children.values()):
            self._request("contact", until)

    def ask_to_stop(self, link: ChildProcess) -> None:
        self._request("term", link.number)

    def kill(self, link: ChildProcess) -> None:
        self._request("kill", link.number)

    @property
    def has_work(self) -> bool:
        return any(link.running for link in self.children.values())

    def terminate(self) -> None:
        """Ask the reaper to kill everything; `gone` follows when it has."""
        if self._reaper.poll() is None:
            self._reaper.send_signal(signal.SIGTERM)

    def destroy(self) -> None:
        """For a reaper that does not respond, or was itself killed: find its processes by their mark."""
        found = find_by_token(self._token)
        for pid in found:
            kill_tree(pid)
        adopted = [self._pid, *found, *(link.pid for link in self.children.values())]
        self._loop.call_later(_REAP_SECONDS, _reap, adopted)

    def _request(self, verb: str, argument: float) -> None:
        """Requests of one turn of the loop are sent together."""
        if not self._requests:
            self._loop.call_soon(self._send_requests)
        self._requests.append((verb, argument))

    def _send_requests(self) -> None:
        try:
            self._control.send(json.dumps(self._requests).encode())
        except BlockingIOError:
            self._loop.call_later(_RETRY_SECONDS, self._send_requests)
            return
        except OSError:
            pass  # it is gone: `_receive` will notice
        self._requests = []

    def _receive(self) -> None:
        while True:
            try:
                message, fds, _, _ = recv_fds(self._control, _CONTROL_BYTES, _MOST_FDS)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            if not message:
                self._loop.remove_reader(self._control.fileno())
                self._control.close()
                self._wait_for_reaper()
                return
            self._on_message(json.loads(message), fds)

    def _on_message(self, message: list[Any], fds: list[int]) -> None:
        match message:
            case ["born", born]:
                self.forking -= len(born)
                for at, (number, pid, path, start) in enumerate(born):
                    spool = self._spool.file(path, fds[2 * at + 1])
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fds[2 * at])
                    link = ChildProcess(self, number, pid, sock, spool, start, self._put_message)
                    self.children[number] = link
                    self._pool.on_born(link)
            case ["dead", announced]:
                for number, status, used, is_log_finished in announced:
                    if (gone := self.children.pop(number, None)) is not None:
                        gone.receive()
                        gone.usage = Usage(*used) if used else None
                        self._pool.on_child_died(gone, status)
                        gone.close()
                        if is_log_finished:
                            self._spool.finish(gone.spool.path)
            case ["cut_off", numbers]:
                for number in numbers:
                    if (cut_off := self.children.get(number)) is not None:
                        cut_off.set_verdict(OutcomeKind.LOST, LEASE_EXPIRED)
            case ["ready", pid, coroutine_tasks]:
                self._pid = pid
                self.is_ready = True
                self._pool.on_ready(self, coroutine_tasks)
            case ["broken", reason, traceback]:
                self._pool.fail(self, reason, traceback)
            case ["unforkable", _]:
                self._pool.on_unforkable(self)
            case ["unborn", count, reason]:
                self.forking -= count
                self._pool.on_unborn(reason)

    def _wait_for_reaper(self) -> None:
        """The socket closes an instant before the reaper is gone."""
        if (code := self._reaper.poll()) is None:
            self._loop.call_later(_RETRY_SECONDS, self._wait_for_reaper)
            return
        if code < 0:
            self.destroy()
        is_killed = code < 0 or code == 128 + signal.SIGKILL
        self._pool.on_gone(self, _ended(code) + self._last_words(code), is_killed=is_killed)
        for link in self.children.values():
            link.close()
        self.children.clear()
        self._spool.abandon(self._token)

    def _last_words(self, code: int) -> str:
        """The last output of a fork server that failed by itself: most likely a bug in Evertick."""
        path = self._spool.path / f"{self._token}.err"
        said = format.shipped(path.read_bytes()[-2000:], 0) if 0 < code < 128 and path.exists() else b""
        return f"; its last output: {said.decode().splitlines()[-1].split(' ', 2)[2]}" if said else ""


def _start_fresh(
    interpreter: Interpreter, plan: ForkServerConfig, environment: Mapping[str, str] | None, fds: Fds
) -> subprocess.Popen[bytes]:
    stdout, stderr, control = fds
    return subprocess.Popen(
        [*interpreter.command(_MODULE), str(control), plan.to_json()],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[control],
        start_new_session=True,
        env=environment,
    )


def _ended(code: int) -> str:
    """How a fork server ended, from its reaper's exit code."""
    number = code - 128 if code > 128 else -code
    if code == 0:
        return "stopped"
    if number <= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"killed by signal {number}"


def _reap(pids: list[int]) -> None:
    """A runner that adopts orphans must also reap them. Only by pid: other children belong to other code."""
    for pid in filter(None, pids):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
