"""Two thousand runners on one PostgreSQL: the cost of their heartbeats, polls and work, and the effect on the leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import psutil  # type: ignore[import-untyped]
import psycopg
from bench import counters
from bench.case import Bench
from bench.figures import Figure, Goal, at_most
from bench.house import House
from bench.stand_ins import Counts, Fleet
from bench.usage import tree_seconds
from bench.work import percentile, submit

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.engine.shards import poll_work

_DATABASE = "bench_fleet"
DATABASES = (_DATABASE,)
_TICKS_PER_SECOND = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The cost of one stage: the server's CPU time and WAL, and the duration of the leader's polls meanwhile."""

    seconds: float
    counts: Counts
    server_seconds: float
    wal_bytes: float
    ticks: list[float]

    @property
    def operations(self) -> int:
        return sum(len(took) for took in self.counts.took.values())

    def beyond(self, alone: Stage) -> Stage:
        """The same without the cost of the idle installation."""
        share = self.seconds / alone.seconds
        return replace(
            self,
            server_seconds=self.server_seconds - share * alone.server_seconds,
            wal_bytes=self.wal_bytes - share * alone.wal_bytes,
        )


async def fleet(bench: Bench) -> list[Figure]:
    """Three stages: runners that only send heartbeats, runners that also poll for work once a second, and runners with work."""
    beat, ask = Settings().heartbeat_seconds, Settings().tick_seconds
    seconds, size = bench.size.fleet_seconds, bench.size.fleet
    await bench.server.make(_DATABASE)
    async with bench.house(_DATABASE, runners=0) as house:
        alone = await _watched(house, seconds, lambda: _nothing(seconds))
        async with Fleet(house.url, size=size) as them:
            bench.say(f"{size:,} runners heartbeat")
            busy = await _watched(house, seconds, lambda: them.live(seconds, beat_seconds=beat, ask_seconds=None))
            bench.say(f"{size:,} runners poll for work, and there is none")
            idle = await _watched(house, seconds, lambda: them.live(seconds, beat_seconds=beat, ask_seconds=ask))
            bench.say(f"{size:,} runners work")
            await submit(house, "single_warm", bench.size.fleet_tasks)
            work = await _watched(house, seconds, lambda: them.live(seconds, beat_seconds=beat, ask_seconds=ask))
    busy, idle, work = busy.beyond(alone), idle.beyond(alone), work.beyond(alone)
    about, facts = f"{size:,} runners on one PostgreSQL", {"note": f"{seconds:g} s each, over 16 connections"}

    def figure(name: str, what: str, unit: str, value: float, goal: Goal | None = None) -> Figure:
        return Figure(name=f"fleet.{name}", about=f"{about}: {what}", unit=unit, value=value, goal=goal, settings=facts)

    told_gone = sum(stage.counts.told_gone for stage in (busy, idle, work))
    found = [
        figure("lost", "live runners declared dead", "runners", float(told_gone), at_most(0)),
        figure("refused", "reports refused", "reports", float(work.counts.refused), at_most(0)),
    ]
    for name, stage in (("heartbeat", busy), ("asking", idle), ("working", work)):
        took = [each for times in stage.counts.took.values() for each in times]
        found += [
            figure(f"{name}.rate", "statements", "1/s", stage.operations / stage.seconds),
            figure(f"{name}.p99", "a statement", "ms", 1000 * percentile(took, 0.99)),
            figure(f"{name}.late", "delay of sending, p99", "ms", 1000 * percentile(stage.counts.late, 0.99)),
            figure(f"{name}.server", "of one core, by the server", "%", 100 * stage.server_seconds / stage.seconds),
            figure(f"{name}.server_each", "server's time", "µs each", 1e6 * stage.server_seconds / stage.operations),
            figure(f"{name}.wal", "WAL", "bytes each", stage.wal_bytes / stage.operations),
            figure(
                f"{name}.tick",
                "the leader's poll ÷ without them, p50",
                "ratio",
                percentile(stage.ticks, 0.5) / percentile(alone.ticks, 0.5),
            ),
        ]
    finished = max(1, work.counts.finished)
    return [
        *found,
        figure("tasks", "finished", "tasks/s", work.counts.finished / work.seconds),
        figure(
            "task.server",
            "server's time, including heartbeats and polls",
            "µs/task",
            1e6 * work.server_seconds / finished,
        ),
        figure("task.wal", "WAL, including heartbeats and polls", "bytes/task", work.wal_bytes / finished),
    ]


async def _nothing(seconds: float) -> Counts:
    await asyncio.sleep(seconds)
    return Counts()


async def _watched(house: House, seconds: float, live: Callable[[], Awaitable[Counts]]) -> Stage:
    with psycopg.connect(house.url, autocommit=True) as conn:
        server = psutil.Process(conn.info.backend_pid).parent()
    before, spent, began = counters.read(house.url), tree_seconds(server), time.monotonic()
    ticking = asyncio.create_task(_ticks(house, seconds))
    counts = await live()
    elapsed = time.monotonic() - began
    spent, after = tree_seconds(server) - spent, counters.read(house.url)
    return Stage(
        seconds=elapsed,
        counts=counts,
        server_seconds=spent,
        wal_bytes=after.wal_bytes - before.wal_bytes,
        ticks=await ticking,
    )


async def _ticks(house: House, seconds: float) -> list[float]:
    """The leader's poll of each tick, on a connection like its own."""
    took, until = [], time.monotonic() + seconds
    async with await connect(house.url, purpose=Purpose.SCHEDULER) as conn:
        while time.monotonic() < until:
            leader = await shards.leader(conn, shard=0)
            assert leader is not None
            began = time.perf_counter()
            await poll_work(conn, shard=0, epoch=leader.epoch, lost_after=90.0)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(1 / _TICKS_PER_SECOND)
    return took
