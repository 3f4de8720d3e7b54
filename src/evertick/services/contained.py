"""One step of the leader, contained: what breaks in it is told, counted and tried again later; the others go on (A12)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.services import metrics
from evertick.services.events import Log

T = TypeVar("T")
SHORTEST_REST_SECONDS = 0.5
# So many in a row, and the trouble is not theirs.
MOST_FAILURES_IN_A_ROW = 3


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
        self.succeed()
        return done

    def succeed(self) -> None:
        self._failures = 0

    def fail(self, error: Exception | str) -> None:
        self._failures += 1
        rest = min(SHORTEST_REST_SECONDS * 2 ** min(self._failures, 20), self._longest_rest)
        self.rests_until = boot_seconds() + rest
        metrics.STEP_FAILURES.labels(step=self.name).inc()
        self._log.error("step_failed", step=self.name, error=error, rest_seconds=rest)


class EachStep:
    """A step that is done for several candidates, each contained on its own: one that hangs or breaks rests alone and keeps no
    other from its turn (A13). Where several in a row fail, the step rests as a whole, so that it delays no other step."""

    def __init__(self, name: str, *, log: Log) -> None:
        self.whole, self._log = Step(name, log=log), log
        self._own: dict[int, Step] = {}

    async def attempt(
        self, conn: AsyncConnection, candidates: list[int], work: Callable[[int], Awaitable[None]]
    ) -> None:
        if not candidates:
            return
        # Those who are not named any more are over.
        self._own = {candidate: own for candidate, own in self._own.items() if candidate in candidates}
        failures = 0
        for candidate in candidates:
            if self.whole.is_resting:
                return
            own = self._own.setdefault(candidate, Step(self.whole.name, log=self._log.bind(candidate=candidate)))
            if own.is_resting:
                continue
            await own.attempt(conn, partial(work, candidate))
            if not own.is_resting:
                failures = 0
                self.whole.succeed()
                continue
            failures += 1
            if failures == MOST_FAILURES_IN_A_ROW:
                self.whole.fail(f"{failures} candidates in a row have failed")
