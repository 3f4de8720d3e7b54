"""The effect of age: with a database full of history, while history is deleted, and after a long time of load."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from bench.case import ISOLATIONS, Bench
from bench.figures import Figure, Settings, at_least, at_most, median
from bench.house import House, NotMeasured
from bench.work import percentile, run, warm_up
from psycopg import AsyncConnection

from evertick.db.function_sets import own_set
from evertick.db.queries import dags

_YOUNG, OLD = "bench_young", "bench_old"
DATABASES = (_YOUNG, OLD)
_CHUNK_TASKS = 100_000
_CHAIN = 40
_LONGEST_DELETION_SECONDS = 4 * 3600.0
# Inserted history is one day old.
_KEPT, _DELETED = {"EVERTICK_RETENTION_DAYS": "0"}, {"EVERTICK_RETENTION_DAYS": "0.5"}

# Finished work as stored by the engine: the run, its state, and a row, a result and a log chunk for each of its tasks.
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
    insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)
    select run_id, i, -1, 1, 0, 46, '1784000000123456 INFO fib(10) = 55' from made, generate_series(0, %(last)s) i"""


async def history(bench: Bench) -> list[Figure]:
    """The same work in a new database and in a database with millions of finished tasks."""

    async def age(house: House) -> str:
        await fill(bench, house, bench.size.history)
        return f"with {bench.size.history:,} finished tasks"

    return await _compare(bench, "history", age)


async def soak(bench: Bench) -> list[Figure]:
    """The same work on a new installation and on an installation after a long time of load."""

    async def age(house: House) -> str:
        tasks = await _load(bench, house)
        return f"after {bench.size.soak_minutes:g} minutes of load ({tasks:,} tasks)"

    return await _compare(bench, "soak", age)


async def retention(bench: Bench) -> list[Figure]:
    """The same work, in turn while the leader deletes old runs and without that."""
    await bench.server.make(OLD)
    ratios: dict[str, list[float]] = defaultdict(list)
    speeds: list[float] = []
    async with bench.house(OLD, settings=_KEPT) as house:
        await fill(bench, house, bench.size.history)
        await warm_up(house)
        for number in bench.rounds():
            taken = {}
            for setting in (_DELETED, _KEPT) if number % 2 else (_KEPT, _DELETED):
                await house.restart("scheduler", setting)
                if setting is _DELETED:
                    await _until_deleting(house)
                before, began = await _deleted(house), time.monotonic()
                taken[setting is _DELETED] = await _probe(bench, house)
                if setting is _DELETED:
                    speeds.append((await _deleted(house) - before) / (time.monotonic() - began))
            for name, value in taken[True].items():
                ratios[name].append(value / taken[False][name])
        facts = {each: await _facts(bench, house, each) for each in ISOLATIONS}
    if min(speeds) == 0:
        raise NotMeasured("nothing was deleted in one of the rounds: there was not enough history")
    deleted = median("retention.deleted", "old runs deleted meanwhile", "runs/s", speeds)
    return [*_figures("retention", "while old runs are deleted", ratios, facts), deleted]


async def retention_10m(bench: Bench) -> list[Figure]:
    """The time to delete ten million expired rows in batches, and that none is left."""
    await bench.server.make(OLD)
    async with bench.house(OLD, settings=_KEPT) as house:
        # Each task accounts for four rows: its own, its result, its log and its share of the run's two rows.
        await fill(bench, house, max(bench.size.rows // 4, 100))
        before = await _rows(house)
        await house.restart("scheduler", _DELETED)
        began = time.monotonic()

        async def is_gone() -> bool:
            bench.say(f"{await _deleted(house):,} runs are deleted")
            return await _is_empty(house)

        await house.until(is_gone, "all rows are deleted", within_seconds=_LONGEST_DELETION_SECONDS, pause_seconds=1.0)
        seconds = time.monotonic() - began
        if left := await _rows(house):
            raise NotMeasured(f"{left:,} rows were left behind")
    speed = median("retention_10m.rows", "old rows deleted, in batches", "rows/s", [before / seconds])
    return [speed, median("retention_10m.took", f"until {before:,} old rows were gone", "s", [seconds])]


async def _is_empty(house: House) -> bool:
    """Whether no run and no dependent row is left. Looks up one key, because counting ten million rows would be a load itself."""
    cursor = await house.conn.execute(
        "select (select run_id from run order by run_id limit 1) is null and not exists (select 1 from pending_cleanup)"
    )
    row = await cursor.fetchone()
    return bool(row and row[0])


async def _rows(house: House) -> int:
    """The number of rows of history. Other rows were created moments ago."""
    tables = ("run", "run_status", "task", "result", "log_chunk")
    counted = " + ".join(f"(select count(*) from {name})" for name in tables)
    cursor = await house.conn.execute(f"select {counted}")  # type: ignore[arg-type]
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def _deleted(house: House) -> int:
    cursor = await house.conn.execute(
        "select coalesce(sum((detail->>'runs')::bigint), 0) from audit_log where action = 'prune'"
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def _until_deleting(house: House) -> None:
    before = await _deleted(house)

    async def goes_on() -> bool:
        return await _deleted(house) > before

    await house.until(goes_on, "old runs are deleted")


async def _compare(bench: Bench, case: str, age: Callable[[House], Awaitable[str]]) -> list[Figure]:
    """Two installations on one server, one of them aged, do the same work in turn. Figures are ratios within a round."""
    for name in (_YOUNG, OLD):
        await bench.server.make(name)
    samples: dict[str, list[float]] = defaultdict(list)
    async with bench.house(_YOUNG) as young, bench.house(OLD) as old:
        condition = await age(old)
        for house in (young, old):
            await warm_up(house)
        for number in bench.rounds():
            # The machine may be quieter or busier for the second installation, so the order alternates.
            taken = {house: await _probe(bench, house) for house in ((young, old) if number % 2 else (old, young))}
            for name, value in taken[old].items():
                samples[name].append(value / taken[young][name])
        facts = {each: await _facts(bench, old, each) for each in ISOLATIONS}
    return _figures(case, condition, samples, facts)


async def _probe(bench: Bench, house: House) -> dict[str, float]:
    """Times in seconds and throughputs in tasks per second, by the names of the benchmarks that are repeated."""
    taken = {}
    for isolation in ISOLATIONS:
        chains = [await run(house, f"chain_{isolation}") for _ in range(bench.size.chains)]
        taken[f"chain.{isolation}"] = statistics.median(done.wall for done in chains)
        taken[f"hop.{isolation}"] = percentile([gap for done in chains for gap in done.gaps], 0.5)
        # As many as chains: a single one takes 30 ms, and its time depends more on the moment than on the installation.
        fans = [await run(house, f"fan_{isolation}") for _ in range(bench.size.chains)]
        taken[f"fan.{isolation}"] = statistics.median(done.wall for done in fans)
        count = max(10, bench.size.singles[isolation] // (5 if isolation == "process" else 1))
        taken[f"singles.{isolation}"] = (await run(house, f"single_{isolation}", count)).per_second
    return taken


async def _facts(bench: Bench, house: House, isolation: str) -> Settings:
    return await bench.facts(house, isolation, (await run(house, f"chain_{isolation}")).run_ids)


def _figures(case: str, condition: str, samples: dict[str, list[float]], facts: dict[str, Settings]) -> list[Figure]:
    """Ratios to the same work without the condition: times may grow and throughputs may fall by a tenth."""
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


async def fill(bench: Bench, house: House, tasks: int) -> None:
    """Insert half of the tasks in one-task runs and half in chains of forty, then vacuum as autovacuum would in time."""
    async with await AsyncConnection.connect(
        house.url, autocommit=True, options=f"-c search_path={own_set().search_path}"
    ) as conn:
        filled = 0
        while filled < tasks:
            chunk = min(_CHUNK_TASKS, tasks - filled)
            for name, length in (("single_warm", 1), ("chain_warm", _CHAIN)):
                row = await dags.find(house.conn, name)
                assert row is not None
                runs = max(1, chunk // 2 // length)
                await conn.execute(
                    _FILL, {"dag": row.dag_id, "version": row.version_id, "runs": runs, "last": length - 1}
                )
            filled += chunk
            bench.say(f"filling: {filled:,} of {tasks:,} finished tasks")
        bench.say("filling: vacuum")
        await conn.execute("vacuum analyze run, run_status, task, result, log_chunk")
        await conn.execute("checkpoint")


async def _load(bench: Bench, house: House) -> int:
    """Run one-task runs and chains without a pause for the configured time."""
    until, tasks = time.monotonic() + 60 * bench.size.soak_minutes, 0
    while (left := until - time.monotonic()) > 0:
        bench.say(f"load: {tasks:,} tasks so far, {left / 60:.1f} minutes to go")
        for dag, count in (("single_warm", 2_000), ("single_process", 200), ("fan_warm", 5), ("chain_process", 5)):
            scaled = max(1, count * bench.size.singles["warm"] // 5_000)
            tasks += len((await run(house, dag, scaled)).spans)
    return tasks
