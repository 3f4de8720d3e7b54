"""A local executor on DAG files written for the test."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from evertick.domain.attempt import AttemptOrder, Isolation, Outcome, TaskKey
from evertick.executors.local.child_process import ExecutorLimits
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.logs.spool import LogChunk
from tests.waiting import eventually

SESSION = 7
DEADLINE_SECONDS = 60.0


class Rig:
    """Starts tasks by name and hands out their outcomes."""

    def __init__(self, folder: Path, spool_dir: Path) -> None:
        self.folder = folder
        self.spool_dir = spool_dir
        self.uses_threads = False
        self.executor: LocalExecutor
        self.batches: list[list[Outcome]] = []
        self.chunks: list[LogChunk] = []
        self._outcomes: dict[TaskKey, asyncio.Future[Outcome]] = {}
        self._run_ids = itertools.count(1)

    def order(self, task: str, **fields: Any) -> AttemptOrder:
        defaults: dict[str, Any] = {
            "key": TaskKey(next(self._run_ids), 0, -1),
            "epoch": 1,
            "session": SESSION,
            "attempt": 1,
            "dag": "d",
            "task": task,
            "version_id": 1,
            "bundle": "bundle-1",
            "file": "d.py",
            "fire_at": "2030-01-02T06:00:00+00:00",
            "params_json": "{}",
            "inputs_json": "{}",
            "timeout_seconds": None,
            "isolation": Isolation.PROCESS,
        }
        return AttemptOrder(**{**defaults, **fields})

    def start(self, *orders: AttemptOrder) -> None:
        loop = asyncio.get_running_loop()
        self._outcomes.update({order.key: loop.create_future() for order in orders})
        self.executor.start_many(list(orders))

    async def outcome(self, order: AttemptOrder) -> Outcome:
        return await asyncio.wait_for(self._outcomes[order.key], DEADLINE_SECONDS)

    async def run(self, task: str, **fields: Any) -> Outcome:
        order = self.order(task, **fields)
        self.start(order)
        return await self.outcome(order)

    async def result(self, task: str, **fields: Any) -> Any:
        outcome = await self.run(task, **fields)
        assert outcome.kind == "success", outcome
        return json.loads(outcome.result_json or "null")

    async def chunk_with(self, order: AttemptOrder, text: str) -> str:
        """Poll logs until the attempt has shipped this text; gives all it has shipped."""

        def shipped() -> str | None:
            self.chunks += self.executor.poll_logs()
            content = b"".join(chunk.content for chunk in self.chunks if chunk.key == order.key).decode()
            return content if text in content else None

        return str(await eventually(shipped))

    async def resolve(self, _bundle: str, _file: str) -> BundlePlace:
        return BundlePlace(self.folder, self.uses_threads)

    def took(self, outcomes: list[Outcome]) -> None:
        self.batches.append(outcomes)
        self.executor.settle([(outcome.key, outcome.epoch) for outcome in outcomes])
        for outcome in outcomes:
            self._outcomes[outcome.key].set_result(outcome)


@asynccontextmanager
async def rig(
    tmp_path: Path, source: str, *, slots: int = 4, limits: ExecutorLimits | None = None
) -> AsyncIterator[Rig]:
    folder = tmp_path / "dags"
    folder.mkdir(exist_ok=True)
    (folder / "d.py").write_text(source)
    made = Rig(folder, tmp_path / "spool")
    async with LocalExecutor(
        slots=slots,
        spool_dir=made.spool_dir,
        session=SESSION,
        resolve_bundle=made.resolve,
        put=made.took,
        limits=limits,
    ) as made.executor:
        yield made


def dag_of(*functions: str) -> str:
    """A file with a DAG `d` of these task functions; each is given without its decorator."""
    names = [function.removeprefix("async ").split("(")[0].removeprefix("def ").strip() for function in functions]
    head = "import os, sys, signal, subprocess, time\nfrom evertick import *\n\n"
    body = "".join(f"@task\n{function}\n\n" for function in functions)
    calls = "".join(f"    {name}()\n" for name in names)
    return f"{head}{body}@dag\ndef d():\n{calls}"


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely unburied."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def dead(pid: int) -> None:
    await eventually(lambda: not is_alive(pid))


async def text_of(path: Path) -> str:
    """What a task wrote to a file, once it has."""
    return str(await eventually(lambda: path.read_text() if path.exists() else ""))


def log_text(outcome: Outcome) -> list[str]:
    """The log lines of an outcome without their times."""
    return [line.split(" ", 1)[1] for line in outcome.log.decode().splitlines()]
