"""Forecasts against the engine: random workloads run on the real engine with a simulated clock, and each prediction that
was made in the middle is compared with the end. `make forecast` runs 50 of them."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta
from heapq import heappop, heappush
from pathlib import Path

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.forecast.simulate import forecast
from evertick.domain.retry import RetryPolicy
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.monitoring.figures import count_figures
from evertick.engine.monitoring.forecasts import read_snapshot
from tests.databases import Cluster, own_cluster
from tests.engine.world import T0, Runner, lead, make_dag, names_of, put, set_clock, start, value

# What must hold over 50 workloads.
MOST_MEDIAN_ERROR = 0.15
FEWEST_INSIDE, MOST_INSIDE = 0.70, 0.90
HISTORY = 12


@dataclass(slots=True)
class Judged:
    """`errors`: relative to the time that was left; `inside`: whether the end was in the band."""

    errors: list[float] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)

    def text(self) -> str:
        median, share = statistics.median(self.errors), sum(self.inside) / len(self.inside)
        return f"{len(self.errors)} runs: median error {median:.1%}, in the 80 % band {share:.1%}"


class Workload:
    """DAGs of random shapes with tasks of random durations, some in a narrow pool, some that are retried."""

    def __init__(self, conn: AsyncConnection, seed: int) -> None:
        self._conn, self._random = conn, random.Random(seed)
        self._means: dict[tuple[str, str], tuple[float, float]] = {}
        self._running: list[tuple[float, int, ExchangeRow]] = []
        self._now = 0.0
        self._count = 0
        self._dag_of: dict[int, str] = {}
        self._flaky: set[str] = set()

    async def prepare(self) -> None:
        rng = self._random
        await set_clock(self._conn, T0)
        self._epoch = await lead(self._conn)
        self._slots = rng.randint(3, 10)
        self._runner = await Runner.join(self._conn, slots=self._slots)
        await set_pool(self._conn, name="narrow", slots=2, actor=Actor("test"))
        self._dags = [f"w{number}" for number in range(rng.randint(2, 4))]
        for dag in self._dags:
            names = [f"t{number}" for number in range(rng.randint(2, 6))]
            shape = {name: [up for up in names[:place] if rng.random() < 0.5] for place, name in enumerate(names)}
            for name in names:
                self._means[dag, name] = rng.uniform(10, 200), rng.uniform(0.1, 0.4)
            gates = (GateSpec(kind=GateKind.POOL, name="narrow", weight=1),)
            pooled = {names[0]: {"gates": gates}} if rng.random() < 0.4 else {}
            if rng.random() < 0.3:
                self._flaky.add(dag)
            retry = RetryPolicy(retries=3, delay_seconds=15)
            await put(self._conn, make_dag(dag, shape, task_retry=retry, per_task=pooled))
        await self._count_ended()

    async def learn(self) -> None:
        """Past runs, one after the other, as a schedule would start them."""
        for _ in range(HISTORY):
            for dag in self._dags:
                await self._begin(dag)
            await self._advance(None)
        await self._count_ended()

    async def judge(self, judged: Judged) -> None:
        runs = [await self._begin(dag) for dag in self._dags for _ in range(self._random.randint(1, 3))]
        await self._advance(self._now + self._random.uniform(5, 120))
        found = await read_snapshot(self._conn, horizon=timedelta(hours=1))
        predicted = {each.run.run_id: each.end for each in forecast(found.snapshot, random.Random).runs}
        made_at = self._now
        await self._advance(None)
        for run_id in runs:
            band = predicted.get(run_id)
            ended = await value(
                self._conn,
                "select extract(epoch from finished_at - %s::timestamptz)::float8 from run_status where run_id = %s",
                T0,
                run_id,
            )
            left = float(str(ended)) - made_at
            if left > 0:  # otherwise it had ended before
                assert band is not None, run_id
                judged.errors.append(abs(band.middle - left) / left)
                judged.inside.append(band.low <= left <= band.high)

    async def _begin(self, dag: str) -> int:
        run_id = await start(self._conn, dag)
        self._dag_of[run_id] = dag
        return run_id

    async def _count_ended(self) -> None:
        await count_figures(self._conn, shard=0, epoch=self._epoch, limit=1000, settle_seconds=0)

    async def _advance(self, until: float | None) -> None:
        """Run everything until an instant, or until all runs have ended. The clock jumps from end to end."""
        await self._take([])
        while self._running or await self._wait_for_retry(until):
            if not self._running:
                continue
            if until is not None and self._running[0][0] > until:
                break
            self._now, _, claim = heappop(self._running)
            await self._set_clock()
            dag = self._dag_of[claim.run_id]
            fails = dag in self._flaky and self._random.random() < 0.1
            await promote_due_tasks(self._conn, shard=0, epoch=self._epoch, limit=100)
            end = (claim, "failed", {"retry_in": 15}) if fails else (claim, "success", {})
            await self._take([end])
        if until is not None:
            self._now = until
            await self._set_clock()
            await promote_due_tasks(self._conn, shard=0, epoch=self._epoch, limit=100)
            await self._take([])

    async def _wait_for_retry(self, until: float | None) -> bool:
        """Nothing runs: go to the next timer, if there is one."""
        due = await value(
            self._conn, "select extract(epoch from min(due_at) - %s::timestamptz)::float8 from task_timer", T0
        )
        if due is None or (until is not None and float(str(due)) > until):
            return False
        self._now = max(self._now, float(str(due)))
        await self._set_clock()
        await promote_due_tasks(self._conn, shard=0, epoch=self._epoch, limit=100)
        await self._take([])
        return bool(self._running)

    async def _take(self, ends: list[tuple[ExchangeRow, str, dict[str, object]]]) -> None:
        free = self._slots - len(self._running)
        claims, refused = await self._runner.step(ends, free=free)
        assert refused == []
        for claim, name in zip(claims, await names_of(self._conn, claims), strict=True):
            mean, sigma = self._means[self._dag_of[claim.run_id], name]
            self._count += 1
            lasting = mean * self._random.lognormvariate(0, sigma)
            heappush(self._running, (self._now + lasting, self._count, claim))

    async def _set_clock(self) -> None:
        await set_clock(self._conn, T0 + timedelta(seconds=self._now))


async def run_workload(conn: AsyncConnection, seed: int, judged: Judged) -> None:
    workload = Workload(conn, seed)
    await workload.prepare()
    await workload.learn()
    await workload.judge(judged)


async def _judge_one(url: str, seed: int, judged: Judged) -> None:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn, conn.transaction():
        await run_workload(conn, seed, judged)


def _run_all(cluster: Cluster, first: int, count: int) -> Judged:
    judged, template = Judged(), cluster.template()
    for seed in range(first, first + count):
        name = cluster.create(template)
        try:
            asyncio.run(_judge_one(cluster.database_url(name), seed, judged))
        finally:
            cluster.drop(name)
        print(f"\r{seed - first + 1} workloads, {judged.text()}", end="", file=sys.stderr, flush=True)
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, own_cluster(Path(folder) / "postgres") as cluster:
        judged = _run_all(cluster, options.seed, options.count)
    print(f"\n{options.count} workloads, {judged.text()}")
    is_good = statistics.median(judged.errors) <= MOST_MEDIAN_ERROR
    is_calibrated = FEWEST_INSIDE <= sum(judged.inside) / len(judged.inside) <= MOST_INSIDE
    return 0 if is_good and is_calibrated else 1


if __name__ == "__main__":
    sys.exit(main())
