"""Agents and runners as processes of this machine: an executor that starts them, and the directory with the state of each.

The directory holds the process, its token and its outcome: enough to find the agent again after its runner is gone, and
to distinguish it from a later process with the same pid.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Self

from evertick.bundles.cache import LOOK_SECONDS, UNUSED_SECONDS, remove_unused
from evertick.config import NO_FILE
from evertick.domain.agent_protocol import MOST_BYTES, parse_name
from evertick.domain.attempt import session_text
from evertick.domain.errors import ExecutorUnavailable
from evertick.executors.base import Observed, Order, Phase, RemoteOrder
from evertick.processes.system import boot_id, boot_seconds, exit_fd, facts_of
from evertick.processes.tree import find_by_token, kill_orphans, kill_tree

# The end of the variable that names the file with the token; it also identifies the process.
TOKEN_VARIABLE = "TOKEN_FILE"


# Prefix of a directory that is being removed.
GONE = ".gone-"


class AgentDirectory:
    """The directory of one attempt's agent. Only the owner can read it."""

    def __init__(self, path: Path) -> None:
        self.path, self.token_file, self.outcome_file = path, path / "token", path / "outcome"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory, also against other processes. Creates it if it does not exist."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def keep_token(self, token: str) -> None:
        fd = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(token)

    @property
    def was_started(self) -> bool:
        return (self.path / "pid").exists()

    def keep_pid(self, pid: int) -> None:
        self._keep("pid", f"{pid} {facts_of(pid).started} {boot_id()}")

    def find_again(self) -> bool:
        """Whether a runner that was killed started the agent before it could record the process; if so, record it now."""
        if not self.token_file.exists():
            return False
        found: list[tuple[float, int]] = []
        for pid in find_by_token(f"{TOKEN_VARIABLE}={self.token_file}"):
            with suppress(OSError):
                facts = facts_of(pid)
                if facts.session == pid and not facts.has_ended:
                    found.append((facts.started, pid))
        if found:
            # Processes that the agent started itself are younger.
            self.keep_pid(min(found)[1])
        return bool(found)

    def living_pid(self) -> int | None:
        """The pid of its process, if that very process still lives. A zombie has ended."""
        try:
            pid, started, boot = (self.path / "pid").read_text(encoding="ascii").split()
            facts = facts_of(int(pid))
            if boot == boot_id() and float(started) == facts.started and not facts.has_ended:
                return int(pid)
        except (OSError, ValueError):
            return None
        return None

    def keep_exit(self, code: int) -> None:
        self._keep("exit", str(code))

    def exit_code(self) -> int | None:
        """None if no process observed it."""
        try:
            return int((self.path / "exit").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def outcome(self) -> bytes | None:
        try:
            with self.outcome_file.open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError:
            return None

    def note_asked(self, now: float) -> float:
        """When it was first asked to stop, in seconds since boot."""
        file = self.path / "asked"
        with suppress(OSError, ValueError):
            return float(file.read_text(encoding="ascii"))
        self._keep("asked", str(now))
        return now

    def remove(self) -> None:
        """Removed in one step: another process could take a half-removed directory for missing, or write into it again."""
        gone = self.path.parent.parent / f"{GONE}{self.path.name}"
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _keep(self, name: str, text: str) -> None:
        """Write atomically."""
        draft = self.path / f".{name}"
        with suppress(FileNotFoundError):
            draft.write_text(text, encoding="ascii")
            draft.replace(self.path / name)


_EVERTICK = (sys.executable, "-P", "-m", "evertick.cli.main")
AGENT, RUNNER = (*_EVERTICK, "agent"), (*_EVERTICK, "runner")


STRAYS_SECONDS = 2.0


class AgentProcesses:
    """All executors that use the same directory see the same agents."""

    def __init__(self, folder: Path, *, environment: Mapping[str, str], command: Sequence[str] = AGENT) -> None:
        self._folder, self._home = folder / "attempts", folder / "home"
        self._environment, self._command = dict(environment), list(command)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._tidied_at = -inf
        self._watched: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._folder.parent.glob(f"{GONE}*"):
            shutil.rmtree(left, ignore_errors=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Agents keep running."""
        for name in list(self._watched):
            self._unwatch(name)

    async def submit(self, order: Order) -> None:
        folder = self._of(order.name)
        try:
            with folder.locked():
                if not folder.was_started and not folder.find_again():
                    self._start(folder, order)
        except OSError as error:
            raise ExecutorUnavailable(f"the agent could not be started: {error}") from None
        self._watch(order.name, folder)

    def _start(self, folder: AgentDirectory, order: Order) -> None:
        folder.keep_token(order.token)
        ours = order.variables(token_file=str(folder.token_file), outcome_file=str(folder.outcome_file))
        if isinstance(order, RemoteOrder):
            # All share one cache, so that code is fetched once. Large files are stored per attempt.
            command, places = self._command, {"EVERTICK_HOME": str(self._home)}
            places["EVERTICK_RESULTS_FOLDER"] = str(folder.path / "results")
        else:
            command, places = list(RUNNER), {"EVERTICK_HOME": str(folder.path / "home"), "EVERTICK_CONFIG": NO_FILE}
        environment = {**self._environment, **ours, **places}
        with (folder.path / "output").open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        folder.keep_pid(child.pid)
        self._children[order.name] = child

    async def observe(self) -> Mapping[str, Observed]:
        if boot_seconds() - self._tidied_at >= LOOK_SECONDS:
            self._tidied_at = boot_seconds()
            await asyncio.to_thread(remove_unused, self._home / "bundles", in_use=(), unused_seconds=UNUSED_SECONDS)
        seen: dict[str, Observed] = {}
        for name in sorted(each.name for each in self._folder.iterdir()):
            if (found := await self.find(name)) is not None:
                seen[name] = found
        return seen

    async def find(self, name: str) -> Observed | None:
        folder = self._of(name)
        if not folder.was_started:
            return None
        self._collect(name)
        self._watch(name, folder)
        if folder.living_pid() is not None or not await self._is_nothing_left(name):
            return Observed(phase=Phase.RUNNING, outcome=folder.outcome())
        code = folder.exit_code()
        return Observed(phase=Phase.ENDED, reason=_reason(code), exit_code=_status(code), outcome=folder.outcome())

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """Ask it to stop, and kill it after the grace period. The directory of an ended one is removed."""
        folder = self._of(name)
        if not folder.path.exists():
            return
        pid = folder.living_pid()
        if pid is None:
            if await self._is_nothing_left(name):
                self._unwatch(name)
                await asyncio.to_thread(self._remove, name, folder)
            return
        self._watch(name, folder)
        is_new = not (folder.path / "asked").exists()
        asked_at = folder.note_asked(boot_seconds())
        if boot_seconds() - asked_at >= grace_seconds:
            await asyncio.to_thread(kill_tree, pid)
        elif is_new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_seconds, self._changed.set)

    async def hints(self) -> AsyncIterator[None]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield None

    def _remove(self, name: str, folder: AgentDirectory) -> None:
        """The directory goes last: as long as it exists, the removal is retried."""
        if (attempt := parse_name(name)) is not None:
            shutil.rmtree(self._home / "spool" / session_text(attempt.session), ignore_errors=True)
        folder.remove()

    def _of(self, name: str) -> AgentDirectory:
        return AgentDirectory(self._folder / name)

    async def _is_nothing_left(self, name: str) -> bool:
        """Processes of a killed agent die with it; this waits for that, and kills what remains."""
        attempt = parse_name(name)
        if attempt is None:
            return True
        return await asyncio.to_thread(kill_orphans, attempt.session, within_seconds=STRAYS_SECONDS)

    def _watch(self, name: str, folder: AgentDirectory) -> None:
        """Get notified when it ends, no matter which process started it."""
        pid = folder.living_pid()
        if name in self._watched or pid is None:
            return
        with suppress(OSError):
            fd = self._watched[name] = exit_fd(pid)
            asyncio.get_running_loop().add_reader(fd, self._on_end, name)

    def _on_end(self, name: str) -> None:
        self._unwatch(name)
        self._collect(name)
        self._changed.set()

    def _collect(self, name: str) -> None:
        """How it ended, if it is a child of this process and has ended."""
        child = self._children.get(name)
        if child is not None and (code := child.poll()) is not None:
            del self._children[name]
            self._of(name).keep_exit(code)

    def _unwatch(self, name: str) -> None:
        fd = self._watched.pop(name, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)


def _status(code: int | None) -> int | None:
    """As a shell reports it."""
    return 128 - code if code is not None and code < 0 else code


def _reason(code: int | None) -> str | None:
    if code is None:
        return "its agent's exit was not observed"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else None
