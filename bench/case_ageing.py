"""Fairness between priorities: what asking who waited too long costs a claim, and when the least urgent task starts.

On a database of its own without services, because only the claim is measured: nobody else may take from the line.
"""

from __future__ import annotations

import statistics
import time

from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.house import House
from psycopg import AsyncConnection

from evertick.domain.dag import DagSpec, TaskSpec
from evertick.engine.claim_cursor import ClaimCursor
from evertick.engine.publish import publish
from evertick.engine.step import step
from evertick.store import dags, runners, runs, tasks
from evertick.store.db import Purpose, connect
from evertick.store.runners import NewRunner
from evertick.store.tasks import FROM_THE_HEAD, Look, StepRow

_DATABASE = "bench_ageing"
_SESSION = 1
_AGING_SECONDS = 0.1
_NEVER = 1e6


async def ageing(bench: Bench, _: House) -> list[Figure]:
    """A line for each of the ten priorities, so that every look-up of the question finds something."""
    url = await bench.server.make(_DATABASE)
    ratios, late = [], []
    try:
        async with await connect(url, purpose=Purpose.HOT) as conn:
            ids = await _publish(conn)
            for _ in bench.rounds():
                await _fill(conn, ids, 4 * bench.size.triggers)
                strict, fair = await _cost(conn, bench.size.triggers)
                ratios.append(fair / strict)
                late.append(await _seconds_late(conn, ids))
    finally:
        await bench.server.drop(_DATABASE)
    facts = {"rounds": bench.size.rounds, "aging_seconds": _AGING_SECONDS}
    asking = "a claim that asks who waited too long ÷ one that does not"
    starting = "priority 0 in an endless stream of priority 9: when it starts, after 9 × ageing"
    return [
        median("ageing.claim", asking, "ratio", ratios, at_most(1.5), facts),
        median("ageing.late", starting, "s", late, at_most(1.0), facts),
    ]


async def _publish(conn: AsyncConnection) -> dict[int, int]:
    """A DAG of one task for each priority; returns their ids."""
    await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    nowhere = {"host": "-", "boot_id": "-", "pid_namespace": "-"}
    new = NewRunner(session=_SESSION, runner_id="bench", **nowhere, pid=1, pid_started=0.0, queues=["default"], slots=1)
    await runners.register(conn, new)
    ids = {}
    for priority in range(10):
        spec = DagSpec(name=f"p{priority}", tasks=(TaskSpec(name="t", priority=priority),))
        done = await publish(conn, spec=spec, file="f.py", bundle_hash="b", actor="bench")
        ids[priority] = done.out_dag_id
    return ids


async def _fill(conn: AsyncConnection, ids: dict[int, int], count: int) -> None:
    for number in range(count):
        await runs.trigger(conn, dag_id=ids[number % 10], params={}, key=None, actor="bench")


async def _cost(conn: AsyncConnection, times: int) -> tuple[float, float]:
    """The median time of a claim of one task in both orders, in turn; what it claimed goes back."""
    seconds: dict[Look, list[float]] = {FROM_THE_HEAD: [], Look(None, _NEVER): []}
    looks = list(seconds)
    for number in range(2 * times):
        look = looks[number % 2]
        started = time.perf_counter()
        rows = await tasks.step(
            conn, session=_SESSION, reports_json=None, infra_retries=0, queues=["default"], free=1, look=look
        )
        seconds[look].append(time.perf_counter() - started)
        await _end(conn, rows)
    strict, fair = (statistics.median(seconds[look]) for look in looks)
    return strict, fair


async def _end(conn: AsyncConnection, claims: list[StepRow]) -> None:
    reports = [f'{{"r":{c.run_id},"i":{c.idx},"m":{c.map_index},"e":{c.epoch},"kind":"success"}}' for c in claims]
    await step(conn, session=_SESSION, reports=reports, queues=[], free=0, infra_retries=0)


async def _seconds_late(conn: AsyncConnection, ids: dict[int, int]) -> float:
    """Empties the line of all but priority 9, keeps that up, and waits for a task of priority 0."""
    await conn.execute("delete from ready where rank > 0")
    lowest = await runs.trigger(conn, dag_id=ids[0], params={}, key=None, actor="bench")
    assert lowest is not None
    began, cursor = time.perf_counter(), ClaimCursor(1, aging_seconds=_AGING_SECONDS)
    while True:
        await runs.trigger(conn, dag_id=ids[9], params={}, key=None, actor="bench")
        done = await step(
            conn, session=_SESSION, reports=[], queues=["default"], free=1, infra_retries=0, cursor=cursor
        )
        if any(claim.run_id == lowest.run_id for claim in done.claims):
            return time.perf_counter() - began - 9 * _AGING_SECONDS
        await _end(conn, done.claims)
