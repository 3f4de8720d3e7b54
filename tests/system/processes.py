"""Real service processes for tests: start, kill, freeze and stop them, wait for what they say, leave none behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import uuid
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from psycopg import AsyncConnection

from evertick.api.agent.auth import LeasedConnection
from evertick.config import Settings, environment_for
from evertick.db.connect import Purpose, connect
from evertick.db.notify import Channel, notify
from evertick.domain.errors import PostgresUnavailable
from evertick.processes.tree import find_by_token, kill_tree
from evertick.runner.database_access import DatabasePeers
from evertick.runner.peer_check import declare_dead_peers
from tests.system.service import FREEZE_VARIABLE, RECORD_VARIABLE, serve
from tests.system.work import Effect, effects
from tests.waiting import eventually

Event = dict[str, Any]

# Small enough that a fault and its repair take a second, large enough for a busy machine.
QUICK: dict[str, Any] = {
    "tick_seconds": 0.1,
    "leader_lease_seconds": 1.0,
    "reconcile_seconds": 0.1,
    "heartbeat_seconds": 0.3,
    "lost_after_seconds": 2.0,
    "stop_grace_seconds": 5.0,
    "runner_slots": 4,
}

# Until a process has said or done something: on a busy machine its start alone takes many seconds.
PATIENCE_SECONDS = 60.0

_ELSEWHERE = """
create function elsewhere() returns trigger language plpgsql as $$ begin new.host := 'elsewhere'; return new; end $$;
create trigger elsewhere before insert on runner for each row execute function elsewhere();
"""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.system.service"])


class Service:
    """One process and its log."""

    def __init__(self, kind: str, environment: dict[str, str], log: Path) -> None:
        self.kind, self.log, self.environment = kind, log, environment
        self._told: list[Event] = []
        self._read_bytes = 0
        self._process: ForkServerProcess = _FORKS.Process(target=serve, args=(kind, environment, str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def events(self, name: str | None = None, **fields: object) -> list[Event]:
        self._read_on()
        return [
            event
            for event in self._told
            if (name is None or event.get("event") == name) and all(event.get(k) == v for k, v in fields.items())
        ]

    def _read_on(self) -> None:
        """What was logged since: tests ask again and again. A line without its end is still being written."""
        if not self.log.exists():
            return
        with self.log.open("rb") as file:
            file.seek(self._read_bytes)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            with suppress(ValueError):
                self._told.append(json.loads(line))

    async def saw(self, name: str, *, within_seconds: float = PATIENCE_SECONDS, **fields: object) -> Event:
        """Wait until it has said so; returns what it said first."""

        def found() -> Event | None:
            said = self.events(name, **fields)
            assert said or self.is_alive, f"the {self.kind} ended ({self.exit_code}) without {name}:\n{self.tail()}"
            return said[0] if said else None

        first: Event = await eventually(found, within_seconds)
        return first

    async def ended(self, within_seconds: float = PATIENCE_SECONDS) -> int:
        """Wait until it is gone; returns its exit code, negative for a signal."""
        await eventually(lambda: not self.is_alive, within_seconds)
        assert self.exit_code is not None
        return self.exit_code

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """kill -9, as the kernel or a person would."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def terminate(self, within_seconds: float = PATIENCE_SECONDS) -> int:
        self.signal(signal.SIGTERM)
        return await self.ended(within_seconds)

    def tail(self, lines: int = 15) -> str:
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return "(no log)"


class Installation:
    """A database, a home, and the services that work on them. Leaving the block ends every process of theirs."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.url, self.folder = url, folder
        self._settings = {**QUICK, **settings}
        self.services: list[Service] = []
        self._token = uuid.uuid4().hex
        self.effects_file = folder / "effects"
        self._effects_bytes, self._effects = 0, list[Effect]()
        self.conn: AsyncConnection

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.effects_file.touch()
        self.conn = await connect(self.url, purpose=Purpose.SCHEDULER)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.conn.close()
        for service in self.services:
            if service.is_alive:
                service.signal(signal.SIGKILL)
                await service.ended()
        with suppress(AssertionError):
            await eventually(lambda: not self.strays())
        strays = self.strays()
        for pid in strays:
            kill_tree(pid)
        assert error is not None or not strays, f"processes were left behind: {strays}"

    async def reconnect(self) -> None:
        """After the database was away."""
        await self.conn.close()

        async def try_to() -> bool:
            try:
                self.conn = await connect(self.url, purpose=Purpose.SCHEDULER)
            except PostgresUnavailable:
                return False
            return True

        await eventually(try_to, PATIENCE_SECONDS, pause_seconds=0.05)

    def settings(self, **changes: Any) -> Settings:
        chosen = {"database_url": self.url, **self._settings, **changes}
        return Settings(home=self.folder / "home", log="json", **chosen)

    async def start(self, kind: str, *, record: Path | None = None, **settings: Any) -> Service:
        """Start a service and wait until it is at work."""
        service = self.launch(kind, record=record, **settings)
        await service.saw({"runner": "runner_started", "scheduler": "leadership_acquired"}[kind])
        return service

    def launch(
        self, kind: str, *, record: Path | None = None, freeze_in: str | None = None, **settings: Any
    ) -> Service:
        environment = environment_for(self.settings(**settings), self._environment())
        environment["RUNNER_NAME"] = str(settings.get("runner_id"))
        if record is not None:
            environment[RECORD_VARIABLE] = str(record)
        if freeze_in is not None:
            environment[FREEZE_VARIABLE] = freeze_in
        log = self.folder / f"{kind}-{len(self.services)}.log"
        service = Service(kind, environment, log)
        self.services.append(service)
        return service

    async def diagnosis(self) -> str:
        """What a person would look at first when a test did not end well."""
        tasks = "select run_id, task, state::text, epoch, session, request, not_before from all_tasks where finished_at is null"
        activity = (
            "select application_name, state, wait_event_type, wait_event, clock_timestamp() - query_start, left(query, 80)"
            " from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        )
        lines = [f"clock: {await self.value('select clock()')}"]
        for query in (tasks, activity, "select * from schedule_state", "select * from shard", "select * from runner"):
            lines += [str(row) for row in await self.rows(query)]
        for service in self.services:
            state = process_state(service.pid) if service.is_alive else f"ended with {service.exit_code}"
            lines.append(f"--- {service.log.name} ({service.pid}: {state})\n{service.tail()}")
        return "\n".join(lines)

    def strays(self) -> list[int]:
        """Processes that services started and that are still there. They carry our token in their environment."""
        return find_by_token(self._token)

    async def certify_deaths(self) -> list[int]:
        """What `evertick up` does when a runner died: its processes must be gone; then it is buried."""
        buried = await declare_dead_peers(DatabasePeers(LeasedConnection(self.conn), settings=Settings()))
        await notify(self.conn, Channel.TASKS)
        return [each.runner.session for each in buried]

    async def kill_all(self, kind: str) -> None:
        for service in self.services:
            if service.kind == kind and service.is_alive:
                await service.kill()

    async def keep_runners_elsewhere(self) -> None:
        """Runners that join from now on seem to be on another machine, where nobody here can see that their processes are
        gone. From their first row on: a neighbour that has seen one here remembers it."""
        await self.conn.execute(_ELSEWHERE)

    async def value(self, query: str, *params: object) -> Any:
        cursor = await self.conn.execute(query, params)  # type: ignore[arg-type]
        row = await cursor.fetchone()
        return None if row is None else row[0]

    async def rows(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        cursor = await self.conn.execute(query, params)  # type: ignore[arg-type]
        return await cursor.fetchall()

    async def begun(self, task: str, *, epoch: int = 1, within_seconds: float = PATIENCE_SECONDS) -> Effect:
        """Wait until the body of that attempt has begun."""

        def found() -> Effect | None:
            return next((e for e in self.effects() if (e.task, e.epoch, e.what) == (task, epoch, "begin")), None)

        begin: Effect = await eventually(found, within_seconds)
        return begin

    def effects(self) -> list[Effect]:
        """Read again only when there is more: tests ask again and again."""
        size = self.effects_file.stat().st_size
        if size != self._effects_bytes:
            self._effects_bytes, self._effects = size, effects(self.effects_file)
        return list(self._effects)

    async def ended(self, run_id: int, within_seconds: float = PATIENCE_SECONDS) -> str:
        """Wait until the run is over; returns how it ended."""

        async def state() -> str | None:
            found = await self.value("select state::text from run_status where run_id = %s", run_id)
            return None if found in ("queued", "running") else str(found)

        last: str = await eventually(state, within_seconds, pause_seconds=0.01)
        return last

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EVERTICK_", "PYTHON"))}
        return {**kept, "EFFECTS": str(self.effects_file), "TEST_TOKEN": self._token}


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be buried."""
    return process_state(pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """The kernel's letter for it; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
