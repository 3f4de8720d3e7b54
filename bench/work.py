"""Workloads, and the times recorded by the bodies of their tasks. Submission is one call, so it is never the bottleneck."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.house import House, NotMeasured

from evertick.db.notify import Channel, notify
from evertick.db.queries import dags

_LONGEST_WORK_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Span:
    """One body: when it started and ended by its own clock, in seconds since 1970."""

    run_id: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The recorded spans of one workload, in the order in which the bodies started."""

    submitted: float
    run_ids: list[int]
    spans: list[Span]

    @property
    def wall(self) -> float:
        """The seconds from the start of the first body to the end of the last."""
        return max(span.end for span in self.spans) - self.spans[0].start

    @property
    def per_second(self) -> float:
        return len(self.spans) / self.wall

    @property
    def per_second_since_submit(self) -> float:
        return len(self.spans) / (max(span.end for span in self.spans) - self.submitted)

    @property
    def gaps(self) -> list[float]:
        """In a chain: the seconds from the end of each body to the start of its successor's."""
        return [after.start - before.end for before, after in zip(self.spans, self.spans[1:], strict=False)]


async def submit(house: House, dag: str, count: int, *, spread: Mapping[str, int] | None = None) -> list[int]:
    """Create and open that many runs in one transaction, as firing does, and wake the runners.

    `spread` passes run id modulo N as a parameter: `{"key": 20}`.
    """
    row = await dags.find(house.conn, dag)
    if row is None or row.version_id is None:
        raise NotMeasured(f"DAG {dag} is not published")
    async with house.conn.transaction():
        cursor = await house.conn.execute(
            """with made as (
                   insert into run (dag_id, version_id, kind, params, triggered_by, created_at)
                   select %s, %s, 'manual', '{}', 'bench', clock() from generate_series(1, %s) returning run_id)
               select array_agg(run_id order by run_id) from made""",
            [row.dag_id, row.version_id, count],
        )
        found = await cursor.fetchone()
        assert found is not None
        for name, keys in (spread or {}).items():
            await house.conn.execute(
                "update run set params = jsonb_build_object(%s::text, run_id %% %s) where run_id = any(%s)",
                [name, keys, found[0]],
            )
        await house.conn.execute("select apply_effects(open_runs(%s, null))", [found[0]])
    await notify(house.conn, Channel.TASKS)
    return list(found[0])


async def until_over(house: House, dag: str) -> None:
    """Wait until no run of the DAG is open, by a cheap lookup in a small index."""
    row = await dags.find(house.conn, dag)
    assert row is not None

    async def is_over() -> bool:
        cursor = await house.conn.execute(
            "select 1 from run_status where dag_id = %s and state in ('queued', 'running') limit 1", [row.dag_id]
        )
        return await cursor.fetchone() is None

    await house.until(
        is_over, f"all runs of {dag} have ended", within_seconds=_LONGEST_WORK_SECONDS, pause_seconds=0.03
    )


async def spans(house: House, run_ids: Sequence[int]) -> list[Span]:
    """The times recorded by the bodies of these runs. Every task must have succeeded, otherwise work is missing."""
    cursor = await house.conn.execute(
        "select count(*) from run_status where run_id = any(%s) and state <> 'success'", [list(run_ids)]
    )
    failed = await cursor.fetchone()
    if failed is None or failed[0]:
        raise NotMeasured(f"{failed[0] if failed else 'unknown'} of {len(run_ids)} runs did not succeed")
    cursor = await house.conn.execute(
        "select run_id, (value->>0)::float8, (value->>1)::float8 from result where run_id = any(%s) order by 2, 3",
        [list(run_ids)],
    )
    return [Span(*row) for row in await cursor.fetchall()]


async def run(house: House, dag: str, count: int = 1) -> Done:
    """Submit that many runs and wait until all have ended."""
    submitted = time.time()
    run_ids = await submit(house, dag, count)
    await until_over(house, dag)
    return Done(submitted=submitted, run_ids=run_ids, spans=await spans(house, run_ids))


async def warm_up(house: House) -> None:
    """Run once: the first run of a bundle loads its code and starts its processes, a cost of publishing, not of a task."""
    for isolation in ("process", "warm"):
        await run(house, f"single_{isolation}", 10 * house.runners)


async def fill_slots(house: House, isolation: str) -> None:
    """Run as many tasks as all runners have slots; none ends before all are claimed. Then each runner has loaded the code and has
    a process for each slot; otherwise some runners would do that during the measurement."""
    await run(house, f"held_{isolation}", house.slots * house.runners)


async def rows_per_task(house: House, run_ids: Sequence[int]) -> dict[str, float]:
    """The numbers of log, result and history rows per task of these runs."""
    tables = {"log": "log_chunk", "result": "result", "history": "all_attempts"}
    cursor = await house.conn.execute("select count(*) from task where run_id = any(%s)", [list(run_ids)])
    row = await cursor.fetchone()
    tasks = row[0] if row else 0
    found = {}
    for name, table in tables.items():
        cursor = await house.conn.execute(f"select count(*) from {table} where run_id = any(%s)", [list(run_ids)])
        row = await cursor.fetchone()
        found[name] = round(row[0] / tasks, 3) if row and tasks else math.nan
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile by nearest rank: always one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
