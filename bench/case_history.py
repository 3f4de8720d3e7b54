"""Whether age makes it slower: beside a database full of history, and after a long time of load."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from bench.case import ISOLATIONS, Bench
from bench.figures import Figure, Settings, at_least, at_most, median
from bench.house import House
from bench.work import percentile, run, warm_up
from psycopg import AsyncConnection

from evertick.store import dags

_YOUNG, _OLD = "bench_young", "bench_old"
DATABASES = (_YOUNG, _OLD)
_CHUNK_TASKS = 100_000
_CHAIN = 40

# Finished work as the engine leaves it: the run, its state, and a task, a result and a log chunk for each of its tasks.
_FILL = """
    with made as (
        insert into run (dag_id, version_id, kind, params, triggered_by, created_at)
        select %(dag)s, %(version)s, 'manual', '{}', 'bench', clock() - interval '1 day' from generate_series(1, %(runs)s)
        returning run_id, created_at
    ), over as (
        insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at, finished_at)
        select run_id, %(dag)s, %(version)s, 'success', 0, created_at, created_at from made
    ), done as (
        insert into task (run_id, idx, version_id, state, epoch, attempt, session, started_at, finished_at)
        select run_id, i, %(version)s, 'success', 1, 1, 1, created_at, created_at from made, generate_series(0, %(last)s) i
    ), kept as (
        insert into result (run_id, idx, map_index, epoch, value)
        select run_id, i, -1, 1, '[1784000000.123456, 1784000000.123654]' from made, generate_series(0, %(last)s) i
    )
    insert into log_chunk (run_id, idx, map_index, epoch, seq, until, content)
    select run_id, i, -1, 1, 0, 46, '1784000000123456 INFO fib(10) = 55' from made, generate_series(0, %(last)s) i"""


async def history(bench: Bench) -> list[Figure]:
    """The same work in a new database and in one with millions of finished tasks."""

    async def age(house: House) -> str:
        await _fill(bench, house)
        return f"with {bench.size.history:,} finished tasks"

    return await _compare(bench, "history", age)


async def soak(bench: Bench) -> list[Figure]:
    """The same work on a new installation and on one that has been under load for long."""

    async def age(house: House) -> str:
        tasks = await _load(bench, house)
        return f"after {bench.size.soak_minutes:g} minutes of load ({tasks:,} tasks)"

    return await _compare(bench, "soak", age)


async def _compare(bench: Bench, case: str, age: Callable[[House], Awaitable[str]]) -> list[Figure]:
    """Two installations on one server, one of them aged, do the same in turn; figures are ratios of the same round."""
    for name in (_YOUNG, _OLD):
        await bench.server.make(name)
    samples: dict[str, list[float]] = defaultdict(list)
    async with bench.house(_YOUNG) as young, bench.house(_OLD) as old:
        condition = await age(old)
        for house in (young, old):
            await warm_up(house)
        for number in bench.rounds():
            # Whoever goes second may find a quieter or a busier machine, so they take turns.
            taken = {house: await _probe(bench, house) for house in ((young, old) if number % 2 else (old, young))}
            for name, value in taken[old].items():
                samples[name].append(value / taken[young][name])
        facts = {each: await _facts(bench, old, each) for each in ISOLATIONS}
    return _figures(case, condition, samples, facts)


async def _probe(bench: Bench, house: House) -> dict[str, float]:
    """Times in seconds and throughputs in tasks per second, by the names of the figures that they repeat."""
    taken = {}
    for isolation in ISOLATIONS:
        chains = [await run(house, f"chain_{isolation}") for _ in range(bench.size.chains)]
        taken[f"chain.{isolation}"] = statistics.median(done.wall for done in chains)
        taken[f"hop.{isolation}"] = percentile([gap for done in chains for gap in done.gaps], 0.5)
        taken[f"fan.{isolation}"] = (await run(house, f"fan_{isolation}")).wall
        count = max(10, bench.size.singles[isolation] // (5 if isolation == "process" else 1))
        taken[f"singles.{isolation}"] = (await run(house, f"single_{isolation}", count)).per_second
    return taken


async def _facts(bench: Bench, house: House, isolation: str) -> Settings:
    return await bench.facts(house, isolation, (await run(house, f"chain_{isolation}")).run_ids)


def _figures(case: str, condition: str, samples: dict[str, list[float]], facts: dict[str, Settings]) -> list[Figure]:
    """Ratios to the same work without it: a time may grow by a tenth, a throughput may fall by a tenth."""
    return [
        median(
            f"{case}.{name}",
            f"{name} {condition} ÷ without",
            "ratio",
            each,
            at_least(0.9) if name.startswith("singles") else at_most(1.1),
            facts[name.split(".")[1]],
        )
        for name, each in samples.items()
    ]


async def _fill(bench: Bench, house: House) -> None:
    """Half of the tasks in one-task runs, half in chains of forty; then vacuumed, as autovacuum would in time."""
    async with await AsyncConnection.connect(house.url, autocommit=True, options="-c search_path=evertick") as conn:
        filled = 0
        while filled < bench.size.history:
            chunk = min(_CHUNK_TASKS, bench.size.history - filled)
            for name, length in (("single_warm", 1), ("chain_warm", _CHAIN)):
                row = await dags.find(house.conn, name)
                assert row is not None
                runs = max(1, chunk // 2 // length)
                await conn.execute(
                    _FILL, {"dag": row.dag_id, "version": row.version_id, "runs": runs, "last": length - 1}
                )
            filled += chunk
            bench.say(f"filling: {filled:,} of {bench.size.history:,} finished tasks")
        bench.say("filling: vacuum")
        await conn.execute("vacuum analyze run, run_status, task, result, log_chunk")
        await conn.execute("checkpoint")


async def _load(bench: Bench, house: House) -> int:
    """One-task runs and chains without a pause, for as long as it takes."""
    until, tasks = time.monotonic() + 60 * bench.size.soak_minutes, 0
    while (left := until - time.monotonic()) > 0:
        bench.say(f"load: {tasks:,} tasks so far, {left / 60:.1f} minutes to go")
        for dag, count in (("single_warm", 2_000), ("single_process", 200), ("fan_warm", 5), ("chain_process", 5)):
            scaled = max(1, count * bench.size.singles["warm"] // 5_000)
            tasks += len((await run(house, dag, scaled)).spans)
    return tasks
