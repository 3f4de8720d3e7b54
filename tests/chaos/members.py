"""One service of the installation: a real `evertick` process, started again when it ends, as an init system would.

Remembers every life of the process by the machine's own clock, which is what a recovery is judged by. Must never leave a
process behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evertick.processes.system import children_of, die_with_parent
from tests.chaos.record import NemesisLog, boot_ns
from tests.waiting import elapse, eventually

Event = dict[str, Any]

RESTART_SECONDS = 0.2
LONGEST_RESTART_SECONDS = 2.0
QUICK_LIFE_NS = 2_000_000_000
STOP_SECONDS = 20.0
HEALTH_SECONDS = 3.0
FAILPOINT = "EVERTICK_FAILPOINT"


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a service, from its start to its end. `cause` is what we did to it, or have armed it with; None: it
    ended by itself."""

    pid: int
    began_ns: int
    ended_ns: int | None = None
    exit_code: int | None = None
    cause: str | None = None


@dataclass(slots=True, kw_only=True)
class Member:
    """`wrapper` is put before the command. `next_environment` may give each life settings of its own."""

    name: str
    kind: str
    folder: Path
    environment: Mapping[str, str]
    record: NemesisLog
    wrapper: tuple[str, ...] = ()
    # What it takes for its own pid, where that is another: in a PID name-space of its own it is 1.
    own_pid: int | None = None
    next_environment: Callable[[int], Mapping[str, str]] = field(default=lambda life: {})
    on_end: Callable[[Life], None] = field(default=lambda life: None)
    is_kept: bool = True
    lives: list[Life] = field(default_factory=list)
    _process: Process | None = None
    _keeping: asyncio.Task[None] | None = None
    _read_up_to: int = 0
    _events: list[Event] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """Of the process that is there now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        """Start it, and go on starting it whenever it ends."""
        self.is_kept = True
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def _keep(self) -> None:
        quick_deaths = 0
        while self.is_kept:
            life = await self._live()
            assert life.ended_ns is not None
            is_quick = life.ended_ns - life.began_ns < QUICK_LIFE_NS and life.cause is None
            quick_deaths = quick_deaths + 1 if is_quick else 0
            await elapse(min(RESTART_SECONDS * 2**quick_deaths, LONGEST_RESTART_SECONDS))

    async def _live(self) -> Life:
        """One life, to its end."""
        environment = {**self.environment, **self.next_environment(len(self.lives))}
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *self.wrapper,
                sys.executable,
                "-m",
                "evertick.cli.main",
                self.kind,
                cwd=self.folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_tied_to(os.getpid()),
            )
        finally:
            os.close(log)
        self._process = process
        life = Life(pid=process.pid, began_ns=boot_ns(), cause=environment.get(FAILPOINT))
        self.lives.append(life)
        self.record.started(self.name, self.own_pid or process.pid)
        life.exit_code = await process.wait()
        life.ended_ns = boot_ns()
        self.record.exited(self.name, self.own_pid or process.pid, life.exit_code)
        self.on_end(life)
        return life

    def send(self, number: signal.Signals, *, cause: str | None = None) -> bool:
        """Whether there was a process to send it to. A signal that ends it says so in `cause`."""
        if self.pid is None:
            return False
        if cause is not None:
            self.lives[-1].cause = cause
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    async def kill(self, cause: str = "kill -9") -> bool:
        """kill -9, as the kernel or a person would; it is started again soon."""
        life = self.lives[-1] if self.pid is not None else None
        if life is None or not self.send(signal.SIGKILL, cause=cause):
            return False
        await eventually(lambda: life.ended_ns is not None)
        return True

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it for good."""
        self.is_kept = False
        for number in (how, signal.SIGCONT):
            self.send(number, cause="stopped by the harness")
        if self._keeping is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._keeping), STOP_SECONDS)
            except TimeoutError:
                self.send(signal.SIGKILL)
                await self._keeping

    def warm_parents(self) -> list[int]:
        """Of a runner: the processes that user code is forked from. Each is the only child of its keeper."""
        keepers = children_of(self.pid) if self.pid is not None else []
        return [parent for keeper in keepers if _is_keeper(keeper) for parent in children_of(keeper)]

    def kill_zygotes(self) -> int:
        """Of a runner: the processes that fork its fork servers. They have no children of their own."""
        found = [
            child
            for child in (children_of(self.pid) if self.pid is not None else [])
            if _runs(child, b"evertick.bundles.zygote_process") and not children_of(child)
        ]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def task_children(self) -> list[int]:
        """Of a runner: the processes that run tasks, or wait to."""
        return [child for parent in self.warm_parents() for child in children_of(parent)]

    async def readiness(self) -> int:
        """What it answers at its health port, as a load balancer would ask; 0 for no answer."""
        said = self.events("health_listening")
        if self.pid is None or not said:
            return 0
        host, _, port = str(said[-1]["url"]).removeprefix("http://").partition(":")
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
                line = await reader.readline()
                writer.close()
            return int(line.split()[1])
        except (OSError, TimeoutError, IndexError, ValueError):
            return 0

    def events(self, name: str | None = None, **fields: object) -> list[Event]:
        """What it said, in all its lives."""
        self._read_new_events()
        return [
            event
            for event in self._events
            if (name is None or event.get("event") == name) and all(event.get(k) == v for k, v in fields.items())
        ]

    def _read_new_events(self) -> None:
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self._read_up_to)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_up_to += len(whole)
            for line in whole.splitlines():
                with suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        self._events.append(event)

    def condition(self) -> str:
        """For people: how long its process has been there, and what it said last."""
        if self.pid is None:
            return f"down, {len(self.lives)} lives"
        last = (self.events() or [{}])[-1]
        return f"up for {(boot_ns() - self.lives[-1].began_ns) / 1e9:.0f} s, said last: {last.get('event')}"

    def tail(self, lines: int = 12) -> str:
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return "(no log)"


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_keeper(pid: int) -> bool:
    """One that a zygote forked has its command line."""
    return _runs(pid, b"evertick.attempts.fork_server_main") or _runs(pid, b"evertick.bundles.zygote_process")


def _runs(pid: int, module: bytes) -> bool:
    with suppress(OSError):
        return module in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _tied_to(parent_pid: int) -> Callable[[], None]:
    """In the child before exec: whatever happens to the harness, nothing of the installation outlives it."""

    def prepare() -> None:
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL, parent_pid)

    return prepare
