"""Simulated runners on other machines: each has a session, sends heartbeats, claims tasks and reports a log and a result.

They send the product's own statements. They share a few connections, as behind a pooler, which is enough for the traffic of
two thousand machines; the cost of an exchange for the server is the same.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import logs, runners
from evertick.db.queries.logs import NewChunk
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.retry import RetryPolicy
from evertick.engine.finish_and_claim import ClaimCursor, encode_report, finish_and_claim
from evertick.engine.runners import extend
from evertick.runner.registration import new_runner

QUEUES = ["default"]
LINE = "2026-01-01T00:00:00Z INFO a line as a body writes it, with a number or two: 12345 67890\n"


@dataclass(slots=True)
class StandIn:
    """One runner. `held` contains its running tasks with the end time of each body."""

    session: int
    slots: int
    held: dict[tuple[TaskKey, int], float] = field(default_factory=dict)
    cursor: ClaimCursor = field(default_factory=lambda: ClaimCursor(len(QUEUES)))


@dataclass(slots=True)
class Counts:
    """Counts of operations, and the seconds of each kind of statement, including the wait for a connection."""

    took: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    late: list[float] = field(default_factory=list)
    finished: int = 0
    told_gone: int = 0
    refused: int = 0


Act = Callable[[AsyncConnection, StandIn, Counts], Awaitable[None]]


class Fleet:
    """`async with Fleet(url, size=2000) as fleet:`; all runners are registered, and deregistered at the end."""

    def __init__(
        self, url: str, *, size: int, slots: int = 4, connections: int = 16, body_seconds: float = 0.5
    ) -> None:
        self._url, self._size, self._slots = url, size, slots
        self._connections, self._body_seconds = connections, body_seconds

    async def __aenter__(self) -> Fleet:
        self._pool: asyncio.Queue[AsyncConnection] = asyncio.Queue()
        for _ in range(self._connections):
            self._pool.put_nowait(await connect(self._url, purpose=Purpose.RUNNER))
        self.members = [StandIn(secrets.randbits(62), self._slots) for _ in range(self._size)]
        settings = Settings()
        async with await connect(self._url, purpose=Purpose.SCHEDULER) as conn, conn.transaction():
            for number, member in enumerate(self.members):
                # On another host, so that a runner of this machine does not declare them dead because their pids do not exist.
                me = replace(
                    new_runner(member.session, settings),
                    runner_id=f"far-{number}",
                    host=f"far-{number}",
                    boot_id=f"far-{number}",
                    queues=QUEUES,
                    slots=self._slots,
                )
                await runners.register(conn, me)
        return self

    async def __aexit__(self, *_: object) -> None:
        async with await connect(self._url, purpose=Purpose.SCHEDULER) as conn, conn.transaction():
            for member in self.members:
                await runners.leave(conn, member.session)
        while not self._pool.empty():
            await self._pool.get_nowait().close()

    async def live(self, seconds: float, *, beat_seconds: float, ask_seconds: float | None) -> Counts:
        """Every runner sends heartbeats and, unless `ask_seconds` is None, polls for work, evenly spread over the interval."""
        counts, began = Counts(), time.monotonic()
        acts: list[tuple[float, int, StandIn, Act, float]] = []
        for number, member in enumerate(self.members):
            share = number / self._size
            acts.append((began + share * beat_seconds, len(acts), member, self._beat, beat_seconds))
            if ask_seconds is not None:
                acts.append((began + share * ask_seconds, len(acts), member, self._ask, ask_seconds))
        heapq.heapify(acts)
        async with asyncio.TaskGroup() as group:
            while acts[0][0] < began + seconds:
                due, order, member, act, pace = acts[0]
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                conn = await self._pool.get()
                counts.late.append(max(0.0, time.monotonic() - due))
                group.create_task(self._do(conn, member, act, counts))
                heapq.heapreplace(acts, (due + pace, order, member, act, pace))
        return counts

    async def _do(self, conn: AsyncConnection, member: StandIn, act: Act, counts: Counts) -> None:
        try:
            await act(conn, member, counts)
        finally:
            self._pool.put_nowait(conn)

    async def _beat(self, conn: AsyncConnection, member: StandIn, counts: Counts) -> None:
        began = time.monotonic()
        heard = await extend(conn, session=member.session, held=list(member.held))
        counts.took["heartbeat"].append(time.monotonic() - began)
        counts.told_gone += heard.is_gone
        for name in heard.lost:
            member.held.pop(name, None)

    async def _ask(self, conn: AsyncConnection, member: StandIn, counts: Counts) -> None:
        began = time.monotonic()
        ended = [name for name, until in member.held.items() if until <= began]
        for name in ended:
            del member.held[name]
        done = await finish_and_claim(
            conn,
            session=member.session,
            reports=[encode_report(_outcome(*name), policy=RetryPolicy(), attempt=1) for name in ended],
            queues=QUEUES,
            free=member.slots - len(member.held),
            infra_retries=3,
            cursor=member.cursor,
        )
        kind = "step with work" if ended or done.claims else "step without work"
        counts.took[kind].append(time.monotonic() - began)
        counts.refused += len(done.refused)
        counts.finished += len(ended) - len(done.refused)
        claimed = [(TaskKey(row.run_id, row.idx, row.map_index), row.epoch) for row in done.claims]
        member.held |= dict.fromkeys(claimed, time.monotonic() + self._body_seconds)
        if claimed:
            began = time.monotonic()
            chunks = [NewChunk(key=key, epoch=epoch, seq=0, until=len(LINE), content=LINE) for key, epoch in claimed]
            await logs.append(conn, session=member.session, chunks=chunks)
            counts.took["log"].append(time.monotonic() - began)


def _outcome(key: TaskKey, epoch: int) -> Outcome:
    log = LINE.encode()
    return Outcome(
        key=key,
        epoch=epoch,
        kind=OutcomeKind.SUCCESS,
        result_json='{"rows": 12345}',
        log=log,
        log_offset=len(log),
        log_end=2 * len(log),
    )
