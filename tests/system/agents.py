"""Agents as real processes, an API that can be taken away from them, and attempts that were dispatched to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
from psycopg import AsyncConnection

from evertick.api.server import serve
from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import tasks
from evertick.db.queries.runners import QueuedRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.engine.remote_attempts import claim_for_dispatch
from evertick.engine.runs import trigger
from evertick.processes.tree import find_orphans, kill_tree
from evertick.runtime.listen_socket import bound
from evertick.secrets.agent_tokens import AgentTokens
from tests.api.applications import shared_app
from tests.engine.world import Runner
from tests.ports import own_port
from tests.system.work import Published, publish_work
from tests.waiting import eventually

FAR = """
import os, pathlib, sys, time
from evertick import TaskContext, dag, task

FLAGS = pathlib.Path(os.environ.get("FLAGS", "/nonexistent"))

def until(name):
    while not (FLAGS / name).exists():
        time.sleep(0.01)

@dag
def quick():
    @task
    def count():
        print("counting")
        return {"rows": 5}
    count()

@dag
def lasting():
    @task
    def wait():
        (FLAGS / f"began-{os.getpid()}").touch()
        print("waiting")
        until("go")
        return "went"
    wait()

@dag
def strict():
    @task(on_lost_contact="stop")
    def wait():
        (FLAGS / f"began-{os.getpid()}").touch()
        until("go")
    wait()

@dag
def talking():
    @task
    def talk():
        for number in range(400):
            print("line", number)
            if number == 200:
                (FLAGS / f"began-{os.getpid()}").touch()
                until("go")
    talk()

@dag
def large():
    @task
    def make():
        return "x" * 5000
    @task
    def take(text):
        return len(text)
    take(make())

@dag
def secret():
    @task(secrets=["db"])
    def use(context: TaskContext):
        print("using", context.secrets["db"])
        print("environment", sorted(name for name in os.environ if "EVERTICK" in name or "TOKEN" in name))
        return sorted(name for name in os.environ if name.startswith("EVERTICK_"))
    use()

@dag
def failing():
    @task
    def fail():
        sys.exit(7)
    fail()
"""

QUICK: dict[str, Any] = {
    "heartbeat_seconds": 0.3,
    "agent_lost_after_seconds": 60.0,
    "agent_report_seconds": 1.0,
    "stop_grace_seconds": 0.2,
}


class AgentProcess:
    def __init__(self, process: Process, row: QueuedRow, outcome_file: Path) -> None:
        self.process, self.row, self.outcome_file = process, row, outcome_file
        self._reading = asyncio.create_task(process.communicate())

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.row.run_id, self.row.idx, self.row.map_index)

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self, within_seconds: float = 60.0) -> int:
        """Its exit code, once it is gone and nothing of its attempt is left."""
        async with asyncio.timeout(within_seconds):
            await self._reading
        assert self.process.returncode is not None
        await eventually(lambda: not find_orphans(self.row.session))
        return self.process.returncode

    def said(self) -> str:
        out, errors = self._reading.result()
        return (out + errors).decode()

    def outcome(self) -> dict[str, Any] | None:
        raw = self.outcome_file.read_bytes() if self.outcome_file.exists() else b""
        return json.loads(raw) if raw else None


class Farm:
    """A database, an API, and agents. Leaving the block ends all of them."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.url, self.folder, self.flags = url, folder, folder / "flags"
        self.settings = Settings(api_rate_limit=0, home=folder / "api", **{**QUICK, **settings})
        self.tokens = AgentTokens(self.settings)
        self._agents: list[AgentProcess] = []
        self._port = own_port()
        self._serving: asyncio.Task[None] | None = None
        self.conn: AsyncConnection
        self.runner: Runner

    async def __aenter__(self) -> Self:
        self.flags.mkdir(parents=True)
        self.conn = await connect(self.url, purpose=Purpose.SCHEDULER)
        self.runner = await Runner.join(self.conn, executor="far", slots=100)
        await self.open_api()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents:
            if agent.process.returncode is None:
                kill_tree(agent.process.pid)
            await asyncio.gather(agent._reading, return_exceptions=True)
        await self.close_api()
        await self.conn.close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def open_api(self) -> None:
        """Again at the same port, each time."""
        at = bound("127.0.0.1", self._port)
        self._stop = asyncio.Event()
        log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
        self._serving = asyncio.create_task(serve(shared_app, self.settings, self.url, log, at, self._stop))

    async def close_api(self) -> None:
        if self._serving is not None:
            self._stop.set()
            await self._serving
            self._serving = None

    async def dispatch(self, work: Published, dag: str, **params: object) -> QueuedRow:
        await publish_work(self.conn, work, only=[dag])
        await trigger(self.conn, dag=dag, params=params, actor=Actor("test"))
        return await self.claim()

    async def claim(self) -> QueuedRow:
        (row,) = await claim_for_dispatch(self.conn, session=self.runner.session, queues=["default"], free=1)
        return row

    async def start(self, row: QueuedRow, *, server: str | None = None, **environment: str) -> AgentProcess:
        key = TaskKey(row.run_id, row.idx, row.map_index)
        name = f"{row.session}-{len(self._agents)}"
        token_file, outcome_file = self.folder / f"token-{name}", self.folder / f"outcome-{name}"
        token_file.write_text(self.tokens.make_start_token(key=key, epoch=row.epoch, session=row.session) + "\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERTICK_")}
        environment.setdefault("EVERTICK_SERVER", server or self.address)
        ours = {"EVERTICK_HOME": str(self.folder / "agent"), "FLAGS": str(self.flags), "EVERTICK_LOG": "json"}
        command = ["-m", "evertick.cli.main", "agent"]
        files = ["--token-file", str(token_file), "--outcome-file", str(outcome_file)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *files, env={**kept, **ours, **environment}, stdout=PIPE, stderr=PIPE
        )
        agent = AgentProcess(process, row, outcome_file)
        self._agents.append(agent)
        return agent

    async def begun(self, agent: AgentProcess) -> int:
        """The pid of the body, once it has begun."""

        def found() -> list[Path]:
            assert agent.process.returncode is None, agent.said()
            return list(self.flags.glob("began-*"))

        (path,) = await eventually(found, 60)
        return int(path.name.removeprefix("began-"))

    def go(self) -> None:
        (self.flags / "go").touch()

    async def task(self, row: QueuedRow) -> Any:
        return await tasks.find(self.conn, TaskKey(row.run_id, row.idx, row.map_index))

    async def result(self, row: QueuedRow) -> object:
        return await tasks.result(self.conn, TaskKey(row.run_id, row.idx, row.map_index))
