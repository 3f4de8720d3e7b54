"""One service in a process of its own, as the tests start it. Its settings come from the environment, as for users.

The interpreter is forked from a server that has the program imported, so that a test that restarts services a hundred
times does not spend its time on imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from psycopg import AsyncCursor

from evertick.config import Settings, read_settings, user_environment
from evertick.db import failpoints
from evertick.db.statements import executed_name
from evertick.observability import logging
from evertick.processes.system import die_with_parent
from evertick.runner.runner import Runner
from evertick.runtime.loop import limit_backoff
from evertick.scheduler.scheduler import Scheduler

RECORD_VARIABLE = "EVERTICK_TEST_RECORD"
FREEZE_VARIABLE = "EVERTICK_TEST_FREEZE"


def serve(kind: str, environment: Mapping[str, str], log_path: str) -> None:
    """Be that service until SIGTERM. Events go to the log as JSON; whatever else is printed goes there, too."""
    die_with_parent(signal.SIGKILL, os.getppid())
    log_file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115  for the process's life
    sys.stderr = sys.stdout
    settings = read_settings()
    failpoints.arm(settings.failpoint)
    limit_backoff(settings.heartbeat_seconds)
    if record := os.environ.get(RECORD_VARIABLE):
        failpoints.install(recording(Path(record)))
    if statement := os.environ.get(FREEZE_VARIABLE):
        failpoints.install(freezing(statement))
    asyncio.run(_serve(kind, settings))


async def _serve(kind: str, settings: Settings) -> None:
    log = logging.configure(service=kind, as_json=True)
    url = settings.database_url
    assert url is not None
    service: Scheduler | Runner
    match kind:
        case "scheduler":
            service = Scheduler(settings, url=url, owner=f"scheduler-{os.getpid()}", log=log)
        case "runner":
            service = Runner(settings, url=url, log=log, environment=user_environment())
        case _:
            raise ValueError(kind)

    def stop() -> None:
        if service.stop.is_set() and isinstance(service, Runner):
            service.stop_now()
        service.stop.set()
        service.wake.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await service.run()


def recording(path: Path) -> type[AsyncCursor[Any]]:
    """Cursors that note the name of every statement and stored function that they execute."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    class RecordingCursor(AsyncCursor[Any]):
        async def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
            if (name := executed_name(query)) is not None:
                os.write(file, f"{name}\n".encode())
            return await super().execute(query, params, **options)

    return RecordingCursor


def freezing(statement: str) -> type[AsyncCursor[Any]]:
    """Cursors that make that statement a transaction of its own, and stop the process once between it and its COMMIT."""
    frozen = list[bool]()

    class FreezingCursor(AsyncCursor[Any]):
        async def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
            if executed_name(query) != statement or frozen:
                return await super().execute(query, params, **options)
            frozen.append(True)
            await self.connection.execute("begin")
            await super().execute(query, params, **options)
            os.kill(os.getpid(), signal.SIGSTOP)
            await self.connection.execute("commit")
            return self

    return FreezingCursor
