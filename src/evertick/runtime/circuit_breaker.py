"""A circuit breaker for one maintenance job of the leader: a failure is logged, counted and retried later; the other
jobs continue (A12)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds

T = TypeVar("T")
SHORTEST_REST_SECONDS = 0.5
# After this many failures in a row the cause is not the candidates.
MOST_FAILURES_IN_A_ROW = 3


class CircuitBreaker:
    """After a failure it pauses, twice as long each time, so that a job that always times out does not delay the
    others."""

    def __init__(self, name: str, *, log: Log, longest_rest: float = 60.0) -> None:
        self.name, self._log, self._longest_rest = name, log, longest_rest
        self._failures = 0
        self.rests_until = 0.0

    @property
    def is_open(self) -> bool:
        return boot_seconds() < self.rests_until

    async def attempt(self, conn: AsyncConnection, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `work`, or None on failure. Raises when leadership or the connection is lost: then no job can
        continue."""
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
        metrics.JOB_FAILURES.labels(job=self.name).inc()
        self._log.error("job_failed", job=self.name, error=error, rest_seconds=rest)


class CircuitBreakers:
    """A job with several candidates, each with its own circuit breaker: a candidate that hangs or fails pauses alone
    and does not delay the others (A13). When several in a row fail, the whole job pauses, so that it delays no other
    job."""

    def __init__(self, name: str, *, log: Log) -> None:
        self.whole, self._log = CircuitBreaker(name, log=log), log
        self._own: dict[int, CircuitBreaker] = {}

    async def attempt(
        self, conn: AsyncConnection, candidates: list[int], work: Callable[[int], Awaitable[None]]
    ) -> None:
        if not candidates:
            return
        # Candidates that are no longer listed are done.
        self._own = {candidate: own for candidate, own in self._own.items() if candidate in candidates}
        failures = 0
        for candidate in candidates:
            if self.whole.is_open:
                return
            closed = CircuitBreaker(self.whole.name, log=self._log.bind(candidate=candidate))
            own = self._own.setdefault(candidate, closed)
            if own.is_open:
                continue
            await own.attempt(conn, partial(work, candidate))
            if not own.is_open:
                failures = 0
                self.whole.succeed()
                continue
            failures += 1
            if failures == MOST_FAILURES_IN_A_ROW:
                self.whole.fail(f"{failures} candidates in a row have failed")
