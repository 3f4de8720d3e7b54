"""Throughput of many one-task runs at once and of one DAG with many tasks, compared with the raw loop of the same round."""

from __future__ import annotations

import time
from collections import defaultdict

from bench.case import ISOLATIONS, Bench, Raw, throughput
from bench.figures import Figure, at_least, median
from bench.house import House
from bench.work import run, until_over

from evertick.db.notify import Channel, notify
from evertick.domain.access import Actor
from evertick.engine.runs import trigger

_SINGLES_GOALS = {"process": at_least(500), "warm": at_least(5000)}


async def raw(bench: Bench, house: House) -> list[Figure]:
    """The raw claim-and-complete loop alone."""
    samples = defaultdict(list)
    for _ in bench.rounds():
        for batch, value in bench.raw_now().items():
            samples[batch].append(value)
    about = "raw PostgreSQL, claim and complete, batches of"
    return [median(f"raw.batch_{batch}", f"{about} {batch}", "rows/s", each) for batch, each in samples.items()]


async def singles(bench: Bench, house: House) -> list[Figure]:
    """Independent one-task runs, all submitted in one call. Also how fast one client can trigger them one by one."""
    rates, whole, run_ids = defaultdict(list), defaultdict(list), {}
    raws: list[Raw] = []
    triggered = []
    for _ in bench.rounds():
        raws.append(bench.raw_now())
        for isolation in ISOLATIONS:
            done = await run(house, f"single_{isolation}", bench.size.singles[isolation])
            rates[isolation].append(done.per_second)
            whole[isolation].append(done.per_second_since_submit)
            run_ids[isolation] = done.run_ids
        triggered.append(await _trigger_one_by_one(bench, house))
    found = []
    for isolation in ISOLATIONS:
        facts = await bench.facts(house, isolation, run_ids[isolation])
        about = f"{bench.size.singles[isolation]:,} one-task runs at once"
        goal = _SINGLES_GOALS[isolation]
        found += [
            throughput(f"singles.{isolation}", about, rates[isolation], raws, goal=goal, facts=facts),
            throughput(
                f"singles.{isolation}.since_submit",
                f"{about}, counted from the submission",
                whole[isolation],
                raws,
                goal=None,
                facts=facts,
            ),
        ]
    return [
        *found,
        median(
            "singles.trigger", "trigger, one call after the other on one connection", "runs/s", triggered, None, facts
        ),
    ]


async def big_dag(bench: Bench, house: House) -> list[Figure]:
    """One DAG with very many tasks, compared with as many one-task runs in the same round."""
    size = bench.size.big
    await house.publish("big.py", ["big"], WIDTH=str(size - 2))
    big, single, raws = [], [], []
    for _ in bench.rounds():
        raws.append(bench.raw_now())
        done = await run(house, "big")
        big.append(done.per_second)
        single.append((await run(house, "single_warm", size)).per_second)
    facts = await bench.facts(house, "warm", done.run_ids)
    ratios = [one / many for one, many in zip(big, single, strict=True)]
    share = median(
        "big_dag.share", f"one DAG of {size:,} tasks ÷ as many one-task runs", "ratio", ratios, at_least(0.6), facts
    )
    about = f"one DAG of {size:,} tasks (1 → {size - 2:,} → 1)"
    return [share, throughput("big_dag.warm", about, big, raws, goal=None, facts=facts)]


async def _trigger_one_by_one(bench: Bench, house: House) -> float:
    started = time.perf_counter()
    for _ in range(bench.size.triggers):
        await trigger(house.conn, dag="single_warm", params={}, actor=Actor("bench"))
    elapsed = time.perf_counter() - started
    await notify(house.conn, Channel.TASKS)
    await until_over(house, "single_warm")
    return bench.size.triggers / elapsed
