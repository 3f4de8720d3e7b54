"""`evertick up`: an embedded PostgreSQL (unless a database is configured) and the services, each a child that is
restarted when it dies.

Prints one readable line per event. Declares a dead runner dead once its processes are gone. Never runs user code and
never plans.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrate
from evertick.db.notify import Channel, notify
from evertick.db.queries import accounts as accounts_queries
from evertick.domain.access import Actor
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.public_access import refuse_open_door
from evertick.observability.health import ServicePhase
from evertick.observability.health_endpoint import HealthEndpoint, leave_note
from evertick.observability.logging import Log, render_line
from evertick.processes.identity import process_name
from evertick.processes.system import become_subreaper, children_of, command_line
from evertick.processes.tree import kill_tree
from evertick.runner.database_access import DatabasePeers
from evertick.runner.peer_check import declare_dead_peers
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.listen_socket import API_NOTES, address_of, listen
from evertick.runtime.loop import back_off, in_background, run_loop
from evertick.supervisor.fork_server import ServiceForkServer
from evertick.supervisor.postgres import EmbeddedPostgres
from evertick.supervisor.up_health import ChildService, UpHealth

SERVICES = ("scheduler", "runner", "publisher", "api")
# Only with a file of fleets.
LAUNCHER = "launcher"
READY_EVENTS = {"scheduler": "leadership_acquired", "runner": "runner_started"}
Print = Callable[[str], None]


def first_login(address: str, secret: str) -> str:
    """Printed after the banner, so that it stands out among the lines of starting services."""
    return (
        f"\nWeb       {address}\nSign in   {address}/auth/link/{secret}\n          as admin, once and within an hour\n"
    )


def services_of(settings: Settings) -> tuple[str, ...]:
    return SERVICES if settings.fleets_file is None else (*SERVICES, LAUNCHER)


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        *,
        environment: Mapping[str, str],
        fork_server: ServiceForkServer,
        say: Print,
        log: Log,
    ) -> None:
        self._settings, self._environment, self._say, self._log = settings, dict(environment), say, log
        self._fork_server = fork_server
        fork_server.lost = self._on_fork_server_lost
        self._postgres = None if settings.database_url else EmbeddedPostgres(settings.home)
        self.children = [ChildService(name) for name in services_of(settings)]
        self.health = UpHealth(self.children, owner=process_name())
        self.port = HealthEndpoint("up", self.health.routes(), settings=settings, log=log)
        self.stop = asyncio.Event()
        self._api_port: socket.socket | None = None
        self.url = settings.database_url or ""

    async def run(self) -> None:
        """Start everything, keep it running until `stop` is set, and stop it in order."""
        started = time.monotonic()
        become_subreaper()
        if self._postgres is not None:
            self.url = await self._postgres.start()
            self._event("postgres", "service_ready", seconds=time.monotonic() - started)
        self.port.leave_note()
        try:
            async with await connect(self.url, purpose=Purpose.SCHEDULER) as conn:
                for name in await migrate(conn, tell=lambda why: self._event("postgres", "migration_blocked", why=why)):
                    self._event("postgres", "migration_applied", migration=name)
                await self._open_door(conn)
            background = [self._keep(child) for child in self.children] + [self._announce(started), self._tick()]
            if self._postgres is not None:
                background.append(self._postgres.supervise())
            async with in_background(*background):
                await self.stop.wait()
                self.health.phase = ServicePhase.STOPPING
                await self._stop_children()
        finally:
            self._fork_server.close()
            if self._api_port is not None:
                self._api_port.close()
            if self._postgres is not None:
                await self._postgres.stop()
                self._event("postgres", "service_stopped")

    async def _open_door(self, conn: AsyncConnection) -> None:
        """Create the first user, before the API can receive a request."""
        settings = self._settings
        await refuse_open_door(conn, host=settings.api_host, has_password=settings.admin_password is not None)
        self._api_port = listen(settings, self._log)
        address = address_of(self._api_port)
        leave_note(settings.home, "up", address, API_NOTES)
        self._event("api", "api_listening", url=address)
        if (await accounts_queries.count_accounts(conn)).with_password:
            return
        # Imported by name: this process runs for long, and only its first start needs the hashing library.
        accounts = import_module("evertick.engine.accounts")
        secret = await accounts.first_admin(conn, actor=Actor("up"), password=settings.admin_password)
        if secret is not None and settings.log == "text":
            self._say(first_login(address, secret))
        elif secret is not None:
            message = "Sign in as admin, once and within an hour:"
            self._event("api", "first_sign_in_created", message=message, url=f"{address}/auth/link/{secret}")

    async def _keep(self, child: ChildService) -> None:
        """Keep one child running; a crash loop backs off and is reported."""
        while not self.stop.is_set():
            if child.name == "api":
                await self._wait_for_request(child)
            code = await self._run_child(child)
            if self.stop.is_set():
                return
            if child.is_dismissed and code == 0:
                child.has_left("drained and stopped on request")
                message = "It was drained and stopped on request; the next `up` starts one."
                self._event(child.name, "service_exited", message=message)
                return
            child.has_died(_how_it_ended(code))
            delay = 0.0 if child.quick_deaths == 0 else back_off(child.quick_deaths)
            facts = {"restarts": child.restarts, "restart_in": delay, "crash_loop": child.is_crash_looping}
            self._event(child.name, "service_died", level="error", exit_code=code, **facts)
            if child.name == "runner":
                await self._declare_dead_runners()
            await asyncio.sleep(delay)

    async def _wait_for_request(self, child: ChildService) -> None:
        """Wait for the first connection to the API: without requests it uses no memory."""
        assert self._api_port is not None
        child.is_asleep = True
        loop, requested = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._api_port, requested.set)
        try:
            await requested.wait()
        finally:
            loop.remove_reader(self._api_port)

    async def _run_child(self, child: ChildService) -> int:
        environment = {**self._environment, "EVERTICK_DATABASE_URL": self.url, "EVERTICK_LOG": "json"}
        environment.pop("EVERTICK_ADMIN_PASSWORD", None)
        if self._settings.health_port is not None:
            # That port belongs to the supervisor.
            environment["EVERTICK_HEALTH_PORT"] = "0"
        port = self._api_port.fileno() if self._api_port is not None and child.name == "api" else None
        process = await self._fork_server.start([child.name], environment, port)
        child.is_born(process)
        assert process.stdout is not None
        while (line := await _next_line(process.stdout)) != b"":
            self._relay(child, line)
        return await process.wait()

    def _relay(self, child: ChildService, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._say(line.decode("utf-8", "replace").rstrip())
            return
        if event.get("event") == READY_EVENTS.get(child.name):
            child.is_ready.set()
        if event.get("event") == "runner_exited":
            # It was drained with a request to exit: that is not a crash, and it is not restarted.
            child.is_dismissed = True
        if event.get("event") == "health_listening":
            # The address of the whole is enough for people: the banner shows it.
            child.url = event.get("url")
            if self._settings.log == "text":
                return
        self._show(event)

    def _on_fork_server_lost(self) -> None:
        how = "All services are restarted, each on its own. They need more memory until the next `up`."
        self._event("fork_server", "service_died", message=how, level="error")

    async def _tick(self) -> None:
        """Report to the health port that this loop is running."""

        async def rest() -> float:
            return 1.0

        await run_loop(rest, stop=self.stop, name="supervisor", log=self._log)

    async def _announce(self, started: float) -> None:
        for child in self.children:
            if child.name in READY_EVENTS:
                await child.is_ready.wait()
        self.health.phase = ServicePhase.RUNNING
        message = "Evertick is up; press Ctrl-C to stop."
        self._event("evertick", "service_ready", seconds=time.monotonic() - started, message=message)

    async def _declare_dead_runners(self) -> None:
        """Declare dead the runners of this machine that are provably gone, after their processes have ended."""
        processes = (*(child.process for child in self.children), self._fork_server, self._postgres)
        _kill_orphans({process.pid for process in processes if process})
        link = ReconnectingConnection(self.url, Purpose.SCHEDULER)
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            for dead in await declare_dead_peers(DatabasePeers(link, settings=self._settings)):
                gone = dead.runner.runner_id
                self._event("runner", "runner_declared_dead", gone=gone, attempts=dead.attempts, level="warning")
            await notify(await link.get(), Channel.TASKS)
        await link.close()

    async def _stop_children(self) -> None:
        self._event("evertick", "service_stopping")
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
        line = {"service": service, "owner": process_name(), "event": event, "timestamp": stamp, "level": level}
        self._show(line | fields)

    def _show(self, event: dict[str, object]) -> None:
        is_json = self._settings.log == "json"
        self._say(json.dumps(event, default=str) if is_json else render_line(event, is_colored=sys.stdout.isatty()))


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """Empty at the end. A line that is too long is dropped: it must not end the supervisor."""
    while True:
        with suppress(ValueError):
            return await stream.readline()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _kill_orphans(known: set[int | None]) -> None:
    """Orphaned processes of a dead runner become children of this process, a subreaper. They run its attempts' bodies."""
    for pid in children_of(os.getpid()):
        if pid not in known and not _is_own_service(pid):
            kill_tree(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _is_own_service(pid: int) -> bool:
    """A service or a PostgreSQL that is being started, and is not in the list of children yet."""
    with suppress(OSError):
        command = command_line(pid)
        named = command.startswith(b"evertick ") or b"evertick.cli" in command or b"evertick\0up" in command
        return named or b"postgres" in command
    return True
