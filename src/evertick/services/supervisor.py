"""`evertick up`: an embedded PostgreSQL (unless one is named) and the services, each a child that is restarted when it dies.

Prints one readable line per event. A dead runner gets its death certificate here, once its processes are gone. Never
runs user code and never plans.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from evertick.config import Settings
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.reap import bury
from evertick.execution.kill import children_of, kill_tree
from evertick.execution.linux import become_subreaper, die_with_parent
from evertick.services.events import render_line
from evertick.services.link import Link
from evertick.services.loop import back_off
from evertick.services.postgres import EmbeddedPostgres
from evertick.services.whoami import is_provably_gone
from evertick.store import runners
from evertick.store.db import Purpose, connect
from evertick.store.migrate import migrate
from evertick.store.wake import Channel, notify

STEADY_SECONDS = 10.0
READY_EVENTS = {"scheduler": "lead", "runner": "started"}
Print = Callable[[str], None]


@dataclass(slots=True)
class Child:
    """One supervised service."""

    name: str
    arguments: list[str]
    process: Process | None = None
    restarts: int = 0
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    def __init__(self, settings: Settings, *, environment: Mapping[str, str], say: Print) -> None:
        self._settings, self._environment, self._say = settings, dict(environment), say
        self._postgres = None if settings.database_url else EmbeddedPostgres(settings.home)
        self.children = [
            Child("scheduler", ["scheduler"]),
            Child("runner", ["runner"]),
            Child("publisher", ["publisher"]),
        ]
        self.stop = asyncio.Event()
        self.url = settings.database_url or ""

    async def run(self) -> None:
        """Bring everything up, keep it up until `stop` is set, and take it down in order."""
        started = time.monotonic()
        become_subreaper()
        if self._postgres is not None:
            self.url = await self._postgres.start()
            self._event("postgres", "ready", seconds=time.monotonic() - started)
        async with await connect(self.url, purpose=Purpose.PLANNING) as conn:
            for name in await migrate(conn):
                self._event("postgres", "migrate", migration=name)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(child)) for child in self.children]
                if self._postgres is not None:
                    tasks.append(group.create_task(self._postgres.supervise()))
                tasks.append(group.create_task(self._announce(started)))
                await self.stop.wait()
                await self._stop_children()
                for task in tasks:
                    task.cancel()
        finally:
            if self._postgres is not None:
                await self._postgres.stop()
                self._event("postgres", "stopped")

    async def _keep(self, child: Child) -> None:
        """Run one child for ever; a crash loop backs off and is shown."""
        quick_deaths = 0
        while not self.stop.is_set():
            born = time.monotonic()
            code = await self._run_child(child)
            if self.stop.is_set():
                return
            quick_deaths = 0 if time.monotonic() - born > STEADY_SECONDS else quick_deaths + 1
            child.restarts += 1
            delay = 0.0 if quick_deaths == 0 else back_off(quick_deaths)
            self._event(child.name, "died", exit_code=code, restarts=child.restarts, restart_in=delay, level="error")
            if child.name == "runner":
                await self._certify_deaths()
            await asyncio.sleep(delay)

    async def _run_child(self, child: Child) -> int:
        environment = {**self._environment, "EVERTICK_DATABASE_URL": self.url, "EVERTICK_LOG": "json"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "evertick.cli.main",
            *child.arguments,
            env=environment,
            stdout=PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            limit=1024 * 1024,
            preexec_fn=_die_with(os.getpid()),
        )
        child.process = process
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._relay(child, line)
        return await process.wait()

    def _relay(self, child: Child, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            self._say(line.decode("utf-8", "replace").rstrip())
            return
        if event.get("event") == READY_EVENTS.get(child.name):
            child.is_ready.set()
        self._say(render_line(event, is_colored=sys.stdout.isatty()))

    async def _announce(self, started: float) -> None:
        for child in self.children:
            if child.name in READY_EVENTS:
                await child.is_ready.wait()
        self._event("evertick", "ready", seconds=time.monotonic() - started, message="Evertick is up; Ctrl-C stops it.")

    async def _certify_deaths(self) -> None:
        """Bury runners of this machine that are provably gone, after their processes are."""
        _kill_strays({child.process.pid for child in self.children if child.process} | self._postgres_pids())
        link = Link(self.url, Purpose.PLANNING)
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            conn = await link.get()
            for runner in await runners.live(conn):
                if is_provably_gone(runner):
                    reason = f"agent_lost: runner {runner.runner_id} died"
                    held = await bury(
                        conn, session=runner.session, reason=reason, infra_retries=self._settings.infra_retries
                    )
                    self._event("runner", "bury", runner=runner.runner_id, attempts=held, level="warning")
            await notify(conn, Channel.READY)
        await link.close()

    def _postgres_pids(self) -> set[int]:
        pid = self._postgres.pid if self._postgres is not None else None
        return {pid} if pid is not None else set()

    async def _stop_children(self) -> None:
        self._event("evertick", "stopping")
        alive = [child.process for child in self.children if child.process and child.process.returncode is None]
        for process in alive:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = self._settings.stop_grace_seconds + 10
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await asyncio.gather(*(process.wait() for process in alive))
        for process in alive:
            if process.returncode is None:
                process.kill()

    def _event(self, service: str, event: str, *, level: str = "info", **fields: object) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"service": service, "event": event, "timestamp": stamp, "level": level, **fields}
        self._say(render_line(line, is_colored=sys.stdout.isatty()))


def _kill_strays(known: set[int]) -> None:
    """Processes that a dead runner left behind come to us, because we are a subreaper. They hold its attempts' bodies."""
    for pid in children_of(os.getpid()):
        if pid not in known and not _is_of_the_house(pid):
            kill_tree(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _is_of_the_house(pid: int) -> bool:
    """A service or a PostgreSQL that is just being started, and that nobody has entered in the list yet."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"evertick.cli" in command or b"postgres" in command or b"evertick\0up" in command
    return True


def _die_with(parent_pid: int) -> Callable[[], None]:
    """In the child before exec: an orphaned service would hold the home and the leases of a dead installation."""

    def prepare() -> None:
        os.setpgid(0, 0)
        die_with_parent(signal.SIGTERM, parent_pid)

    return prepare
