"""Waiting tasks: they use no slots, and a tick with fifty thousand of them takes no longer than a tick without."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.house import House
from bench.work import percentile, submit

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.engine.runs import cancel
from evertick.engine.shards import poll_work
from evertick.engine.waits import wake

SHARD = 0
PER_RUN = 1000


async def waiting_50k(bench: Bench, house: House) -> list[Figure]:
    """Each round measures the leader's polls and jobs without and with them, on a connection like its own."""
    await house.publish("waits.py", ["waits"])
    ratios, usual, alone, beside, leases = [], [], [], [], []
    for _ in bench.rounds():
        before = await _ticks(bench, house)
        async with _waiting(house, bench.size.waiting) as held:
            after = await _ticks(bench, house)
            leases.append(float(held))
        ratios.append(percentile(after, 0.99) / percentile(before, 0.99))
        usual.append(percentile(after, 0.5) / percentile(before, 0.5))
        alone.append(1000 * percentile(before, 0.99))
        beside.append(1000 * percentile(after, 0.99))
    facts = {"rounds": bench.size.rounds, "slots": bench.slots or Settings().runner_slots}
    count = f"{bench.size.waiting * PER_RUN:,} waiting tasks (times, events, approvals, sensors)"
    return [
        median("waiting_50k.tick", f"a tick with {count} ÷ without, p99", "ratio", ratios, at_most(1.1), facts),
        median("waiting_50k.tick_p50", f"a tick with {count} ÷ without, median", "ratio", usual, None, facts),
        median("waiting_50k.tick_ms", f"a tick with {count}, p99", "ms", beside, None, facts),
        median("waiting_50k.tick_none_ms", "a tick without waiting tasks, p99", "ms", alone, None, facts),
        median("waiting_50k.slots", f"{count}: slots in use", "slots", leases, at_most(0), facts),
    ]


async def _ticks(bench: Bench, house: House) -> list[float]:
    took = []
    async with await connect(house.url, purpose=Purpose.SCHEDULER) as conn:
        for _ in range(bench.size.ticks):
            leader = await shards.leader(conn, shard=SHARD)
            assert leader is not None
            began = time.perf_counter()
            await poll_work(conn, shard=SHARD, epoch=leader.epoch, lost_after=90.0)
            await wake(conn, shard=SHARD, epoch=leader.epoch, batch=1000)
            took.append(time.perf_counter() - began)
    return took


@asynccontextmanager
async def _waiting(house: House, runs: int) -> AsyncIterator[int]:
    """Create runs in which every task waits. Yields the number of slots they hold."""
    run_ids = []
    for _ in range(runs):
        run_ids += await submit(house, "waits", 1)

    async def count(query: str) -> int:
        found = await (await house.conn.execute(query)).fetchone()  # type: ignore[call-overload]
        assert found is not None
        return int(found[0])

    async def all_wait() -> bool:
        # By then, event waits were checked once and sensors were polled once.
        settled = "select count(*) from deferral where wake_at > clock()"
        return await count(settled) >= runs * PER_RUN

    await house.until(all_wait, "everything waits")
    await house.conn.execute("vacuum analyze deferral, task")
    try:
        yield await count("select count(*) from lease")
    finally:
        for run_id in run_ids:
            await cancel(house.conn, run_id=run_id, actor=Actor("bench"))
        await house.conn.execute("vacuum analyze deferral, task")
