"""Services inside the test's own process: started, listened to, and stopped as their commands would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from evertick.config import Settings
from evertick.db import failpoints
from evertick.observability.logging import Log
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from tests.waiting import WITHIN_SECONDS, eventually

Event = dict[str, Any]


class Said:
    """What a service logs, for the test to look at."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.log: Log = structlog.wrap_logger(
            None, processors=[self._keep], wrapper_class=structlog.make_filtering_bound_logger(0)
        )

    def events(self, name: str, **fields: object) -> list[Event]:
        return [event for event in self.all if event["event"] == name and fields.items() <= event.items()]

    async def saw(self, name: str, *, within_seconds: float = WITHIN_SECONDS, **fields: object) -> Event:
        await eventually(lambda: self.events(name, **fields), within_seconds)
        return self.events(name, **fields)[0]

    def _keep(self, _: WrappedLogger, level: str, event: EventDict) -> EventDict:
        self.all.append({**event, "level": level})
        raise structlog.DropEvent


def quick(url: str, folder: Path, **changes: Any) -> Settings:
    chosen: dict[str, Any] = {
        "tick_seconds": 0.1,
        # With a short one a busy machine breaks off the leader's statements, and takes the lead from one that is alive.
        "leader_lease_seconds": 30.0,
        "reconcile_seconds": 0.1,
        "heartbeat_seconds": 0.1,
        "lost_after_seconds": 5.0,
        "stop_grace_seconds": 2.0,
        "runner_slots": 4,
        "runner_id": "r0",
    }
    return Settings(database_url=url, home=folder, **{**chosen, **changes})


@asynccontextmanager
async def hosted(service: Scheduler | Runner) -> AsyncIterator[None]:
    """Run the service within the block."""
    async with asyncio.TaskGroup() as group:
        group.create_task(service.run())
        try:
            yield
        finally:
            service.stop.set()
            service.wake.set()


@contextmanager
def armed(failpoint: str) -> Iterator[None]:
    """Connections that are opened within the block meet this failpoint."""
    failpoints.arm(failpoint)
    try:
        yield
    finally:
        failpoints.disarm()
