"""Clients that write as fast as they are answered, and note every request and its answer: what an outage is judged by."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psycopg

from evertick.db.connect import Purpose
from evertick.domain.access import Actor
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.runs import trigger
from evertick.runtime.connections import ReconnectingConnection
from tests.chaos.cluster import Cluster
from tests.chaos.record import Answer
from tests.waiting import elapse

ANSWER_SECONDS = 15.0


@dataclass(slots=True, kw_only=True)
class Writers:
    """`most` requests in all, at most `per_second` of them; each failed one is sent again until it is answered."""

    cluster: Cluster
    dag: str
    most: int
    per_second: float
    answers: Counter[Answer] = field(default_factory=Counter)
    _sent: int = 0

    async def write(self, pace_seconds: float) -> None:
        link = ReconnectingConnection(self.cluster.client_url, Purpose.SCHEDULER)
        try:
            while self._sent < self.most:
                self._sent += 1
                key = f"writer-{self._sent}"
                self.cluster.clients.asked("trigger", request=key, dag=self.dag)
                while not await self._ask(link, key):
                    await elapse(0.05)
                await elapse(pace_seconds)
        finally:
            await link.close()

    async def _ask(self, link: ReconnectingConnection, key: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await trigger(await link.get(), dag=self.dag, params={}, actor=Actor("writer"), key=key)
        except (psycopg.Error, PostgresUnavailable, OSError, TimeoutError) as error:
            self.answers[Answer.UNKNOWN] += 1
            self.cluster.clients.answered(key, Answer.UNKNOWN, error=f"{type(error).__name__}: {error}")
            await link.close()
            return False
        self.answers[Answer.OK] += 1
        self.cluster.clients.answered(key, Answer.OK)
        return True


@asynccontextmanager
async def writing(
    cluster: Cluster, *, dag: str, most: int, per_second: float, clients: int = 8
) -> AsyncIterator[Writers]:
    """They write beside the block; the end of the block waits until the last request is answered."""
    writers = Writers(cluster=cluster, dag=dag, most=most, per_second=per_second)
    tasks = [asyncio.create_task(writers.write(clients / per_second)) for _ in range(clients)]
    try:
        yield writers
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
