"""A remote executor that takes seconds per submission: its effect on ticks of the leader and of the dispatching runner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import structlog
from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.house import House, NotMeasured
from bench.work import percentile, submit

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.runs import cancel
from evertick.engine.shards import poll_work
from evertick.executors.base import Observed, Phase, RemoteOrder
from evertick.runner.remote.session import RemoteSession
from evertick.secrets.agent_tokens import AgentTokens

SHARD = 0
TASKS = 200
_OVER_SECONDS = 60.0


class SlowExecutor:
    """Accepts submissions after a delay. No attempt ever starts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._names: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def submit(self, order: RemoteOrder) -> None:
        await asyncio.sleep(self.seconds)
        self._names.add(order.name)

    async def observe(self) -> Mapping[str, Observed]:
        await asyncio.sleep(self.seconds)
        return {name: Observed(phase=Phase.WAITING) for name in self._names}

    async def find(self, name: str) -> Observed | None:
        return Observed(phase=Phase.WAITING) if name in self._names else None

    async def cancel(self, name: str, grace_seconds: float) -> None:
        self._names.discard(name)

    async def hints(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield None


class TimedSession(RemoteSession):
    """A session that records the durations of its ticks in `took`."""

    took: list[float]

    async def tick(self) -> float:
        began = time.perf_counter()
        try:
            return await super().tick()
        finally:
            self.took.append(time.perf_counter() - began)


async def dispatch(bench: Bench) -> list[Figure]:
    """Each round measures ticks of the leader without and with submissions, and ticks of the runner."""
    ratios, alone, beside, own = [], [], [], []
    await bench.server.make("dispatch")
    async with bench.house("dispatch", runners=0) as house:
        await house.publish("light.py", ["single_process"])
        for _ in bench.rounds():
            before = await _ticks(bench, house)
            async with _dispatching(bench, house) as session:
                after = await _ticks(bench, house)
                took = list(session.took)
            ratios.append(percentile(after, 0.99) / percentile(before, 0.99))
            alone.append(1000 * percentile(before, 0.99))
            beside.append(1000 * percentile(after, 0.99))
            own.append(1000 * percentile(took, 0.99))
    facts = {"rounds": bench.size.rounds, "note": f"{Settings().dispatch_workers} workers"}
    what = f"{TASKS} tasks for an executor of {bench.size.submit_seconds:g} s per submission"
    return [
        median("dispatch.tick", f"a leader's tick with {what} ÷ without, p99", "ratio", ratios, at_most(1.2), facts),
        median("dispatch.tick_ms", f"a leader's tick with {what}, p99", "ms", beside, None, facts),
        median("dispatch.tick_none_ms", "a leader's tick without submissions, p99", "ms", alone, None, facts),
        median("dispatch.runner_tick_ms", f"a tick of the runner with {what}, p99", "ms", own, at_most(1000), facts),
    ]


async def _ticks(bench: Bench, house: House) -> list[float]:
    took = []
    async with await connect(house.url, purpose=Purpose.SCHEDULER) as conn:
        for _ in range(bench.size.ticks):
            leader = await shards.leader(conn, shard=SHARD)
            assert leader is not None
            began = time.perf_counter()
            await poll_work(conn, shard=SHARD, epoch=leader.epoch, lost_after=90.0)
            await promote_due_tasks(conn, shard=SHARD, epoch=leader.epoch, limit=1000)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0)
    return took


@asynccontextmanager
async def _dispatching(bench: Bench, house: House) -> AsyncIterator[TimedSession]:
    """A runner in this process whose worker pool is full of slow submissions. Everything is cleaned up at the end."""
    settings = Settings(
        database_url=house.url,
        home=bench.folder / "dispatch",
        executor="slow",
        runner_slots=TASKS,
        runner_id="dispatch",
        listen_notify=False,
        stop_grace_seconds=0,
    )
    executor, log = SlowExecutor(bench.size.submit_seconds), structlog.wrap_logger(None, processors=[_drop])
    session = TimedSession(
        settings, url=house.url, log=log, executor=executor, tokens=AgentTokens(settings), request=None
    )
    session.took = []
    runs = await submit(house, "single_process", TASKS)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(session.run())
        await _until(house, f"select count(*) >= {Settings().dispatch_workers} from dispatch where tries > 0")
        yield session
        executor.seconds = 0.0
        for run_id in runs:
            await cancel(house.conn, run_id=run_id, actor=Actor("bench"))
        await _until(house, "select count(*) = 0 from dispatch")
        session.registration.stop_now()
        await running


async def _until(house: House, query: str) -> None:
    deadline = time.monotonic() + _OVER_SECONDS
    while True:
        row = await (await house.conn.execute(query)).fetchone()  # type: ignore[call-overload]
        if row and row[0]:
            return
        if time.monotonic() > deadline:
            raise NotMeasured(f"not within {_OVER_SECONDS:g} s: {query}")
        await asyncio.sleep(0.05)


def _drop(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.ProcessorReturnValue:
    raise structlog.DropEvent
