"""One step of the leader, contained: what breaks in it is told, counted and tried again later; the others go on (A12)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.services import metrics
from evertick.services.events import Log

T = TypeVar("T")
SHORTEST_REST_SECONDS = 0.5


def boot_seconds() -> float:
    """A clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Step:
    """After a failure it rests, twice as long each time, so that a step which always takes all its time delays no other."""

    def __init__(self, name: str, *, log: Log, longest_rest: float = 60.0) -> None:
        self.name, self._log, self._longest_rest = name, log, longest_rest
        self._failures = 0
        self.rests_until = 0.0

    @property
    def is_resting(self) -> bool:
        return boot_seconds() < self.rests_until

    async def attempt(self, conn: AsyncConnection, work: Callable[[], Awaitable[T]]) -> T | None:
        """What `work` gives, or None. Raises when the lead or the connection is lost: then nothing can go on."""
        try:
            done = await work()
        except (NotLeader, PostgresUnavailable):
            raise
        except Exception as error:
            if conn.closed or conn.broken:
                raise
            self.fail(error)
            return None
        self._failures = 0
        return done

    def fail(self, error: Exception | str) -> None:
        self._failures += 1
        rest = min(SHORTEST_REST_SECONDS * 2 ** min(self._failures, 20), self._longest_rest)
        self.rests_until = boot_seconds() + rest
        metrics.STEP_FAILURES.labels(step=self.name).inc()
        self._log.error("step_failed", step=self.name, error=error, rest_seconds=rest)
