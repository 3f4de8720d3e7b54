"""Gates: the cost of a pool on every task, the time between holders of a key, and that blocked tasks slow down no others."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.case import Bench
from bench.figures import Figure, at_least, at_most, median
from bench.house import House
from bench.work import run, spans, submit, until_over

from evertick.domain.access import Actor
from evertick.engine.gates import set_pool
from evertick.engine.runs import cancel

_POOL_SLOTS = 64


async def pool_overhead(bench: Bench, house: House) -> list[Figure]:
    """Each round runs the same work without and with a pool that has fewer slots than there are waiting tasks."""
    await _open(house)
    count, ratios = bench.size.singles["warm"], []
    await run(house, "pooled_warm", 50)
    for _ in bench.rounds():
        free = (await run(house, "single_warm", count)).per_second
        done = await run(house, "pooled_warm", count)
        ratios.append(done.per_second / free)
    facts = await bench.facts(house, "warm", done.run_ids)
    about = f"one-task runs with a pool of {_POOL_SLOTS} slots on every task ÷ without"
    return [median("pool_overhead.share", about, "ratio", ratios, at_least(0.7), facts)]


async def mutex_drain(bench: Bench, house: House) -> list[Figure]:
    """All runs of all keys at once: the time from the end of a body to the start of the next one with its key."""
    await _open(house)
    keys, each = bench.size.keyed
    samples = []
    for _ in bench.rounds():
        run_ids = await submit(house, "keyed_warm", keys * each, spread={"key": keys})
        await until_over(house, "keyed_warm")
        by_key = defaultdict(list)
        for span in await spans(house, run_ids):
            by_key[span.run_id % keys].append(span)
        gaps = [b.start - a.end for found in by_key.values() for a, b in itertools.pairwise(found)]
        assert min(gaps) >= 0, "two bodies with one key ran at the same time"
        samples.append(1000 * statistics.median(gaps))
    facts = await bench.facts(house, "warm", run_ids)
    about = f"{keys} mutex keys × {each:,} tasks: from a holder's end to the next one's start"
    return [median("mutex_drain.handover", about, "ms", samples, at_most(15), facts)]


async def gates_blocked(bench: Bench, house: House) -> list[Figure]:
    """The same work, without a gate and with a pool, each without and with many tasks behind a closed pool."""
    await _open(house)
    count, free, gated = bench.size.singles["warm"], [], []
    for _ in bench.rounds():
        before = [(await run(house, dag, count)).per_second for dag in ("single_warm", "pooled_warm")]
        async with _held(house, bench.size.held):
            after = [await run(house, dag, count) for dag in ("single_warm", "pooled_warm")]
        free.append(after[0].per_second / before[0])
        gated.append(after[1].per_second / before[1])
    facts = await bench.facts(house, "warm", after[0].run_ids)
    about = f"with {bench.size.held * 1000:,} tasks behind a closed pool ÷ without"
    return [
        median("gates_blocked.claim", f"one-task runs {about}", "ratio", free, at_least(0.9), facts),
        median("gates_blocked.promote", f"one-task runs with a pool, {about}", "ratio", gated, at_least(0.9), facts),
    ]


async def _open(house: House) -> None:
    """Create the pools and publish the DAGs that need them."""
    await set_pool(house.conn, name="bench", slots=_POOL_SLOTS, actor=Actor("bench"))
    await set_pool(house.conn, name="closed", slots=1, actor=Actor("bench"))
    await house.publish("gated.py", ("pooled_warm", "keyed_warm", "held"))


@asynccontextmanager
async def _held(house: House, runs: int) -> AsyncIterator[None]:
    await set_pool(house.conn, name="closed", slots=0, actor=Actor("bench"))
    run_ids = []
    for _ in range(runs):
        run_ids += await submit(house, "held", 1)
    try:
        yield
    finally:
        for run_id in run_ids:
            await cancel(house.conn, run_id=run_id, actor=Actor("bench"))
