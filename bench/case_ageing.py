"""Fairness between priorities: the cost of the ageing query in a claim, and when the task with the lowest priority starts.

Uses its own database without services, because only the claim is measured: no other process may claim tasks.
"""

from __future__ import annotations

import statistics
import time

from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.house import House
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags, runners
from evertick.db.queries.runners import NewRunner
from evertick.db.queries.tasks import FROM_THE_HEAD, ClaimPosition, ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec, TaskSpec
from evertick.engine.finish_and_claim import ClaimCursor, _finish_and_claim, finish_and_claim
from evertick.engine.publish import publish
from evertick.engine.runs import trigger_run

_DATABASE = "bench_ageing"
_SESSION = 1
_AGING_SECONDS = 0.1
_NEVER = 1e6


async def ageing(bench: Bench, _: House) -> list[Figure]:
    """Measure with queued tasks of all ten priorities, so that every lookup of the query finds a row."""
    url = await bench.server.make(_DATABASE)
    ratios, late = [], []
    try:
        async with await connect(url, purpose=Purpose.RUNNER) as conn:
            ids = await _publish(conn)
            for _ in bench.rounds():
                await _fill(conn, ids, 4 * bench.size.triggers)
                strict, fair = await _cost(conn, bench.size.triggers)
                ratios.append(fair / strict)
                late.append(await _seconds_late(conn, ids))
    finally:
        await bench.server.drop(_DATABASE)
    facts = {"rounds": bench.size.rounds, "aging_seconds": _AGING_SECONDS}
    asking = "a claim with the ageing query ÷ one without it"
    starting = "priority 0 in an endless stream of priority 9: start after 9 × ageing"
    return [
        median("ageing.claim", asking, "ratio", ratios, at_most(1.5), facts),
        median("ageing.late", starting, "s", late, at_most(1.0), facts),
    ]


async def _publish(conn: AsyncConnection) -> dict[int, int]:
    """Publish a one-task DAG per priority. Returns their ids."""
    await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    nowhere = {"host": "-", "boot_id": "-", "pid_namespace": "-"}
    new = NewRunner(session=_SESSION, runner_id="bench", **nowhere, pid=1, pid_started=0.0, queues=["default"], slots=1)
    await runners.register(conn, new)
    ids = {}
    for priority in range(10):
        spec = DagSpec(name=f"p{priority}", tasks=(TaskSpec(name="t", priority=priority),))
        done = await publish(conn, spec=spec, file="f.py", bundle_hash="b", actor=Actor("bench"))
        ids[priority] = done.dag_id
    return ids


async def _fill(conn: AsyncConnection, ids: dict[int, int], count: int) -> None:
    for number in range(count):
        await trigger_run(conn, dag_id=ids[number % 10], params={}, key=None, actor=Actor("bench"))


async def _cost(conn: AsyncConnection, times: int) -> tuple[float, float]:
    """The median times of a claim of one task with and without the query, in turn; claimed tasks are returned."""
    seconds: dict[ClaimPosition, list[float]] = {FROM_THE_HEAD: [], ClaimPosition(None, _NEVER): []}
    looks = list(seconds)
    for number in range(2 * times):
        look = looks[number % 2]
        started = time.perf_counter()
        rows = await _finish_and_claim(
            conn, session=_SESSION, reports=None, infra_retries=0, queues=["default"], free=1, look=look
        )
        seconds[look].append(time.perf_counter() - started)
        await _end(conn, rows)
    strict, fair = (statistics.median(seconds[look]) for look in looks)
    return strict, fair


async def _end(conn: AsyncConnection, claims: list[ExchangeRow]) -> None:
    reports = [f'{{"r":{c.run_id},"i":{c.idx},"m":{c.map_index},"e":{c.epoch},"kind":"success"}}' for c in claims]
    await finish_and_claim(conn, session=_SESSION, reports=reports, queues=[], free=0, infra_retries=0)


async def _seconds_late(conn: AsyncConnection, ids: dict[int, int]) -> float:
    """Keep only tasks of priority 9 queued, and wait until a task of priority 0 is claimed."""
    await conn.execute("delete from ready_task where rank > 0")
    lowest = await trigger_run(conn, dag_id=ids[0], params={}, key=None, actor=Actor("bench"))
    assert lowest is not None
    began, cursor = time.perf_counter(), ClaimCursor(1, aging_seconds=_AGING_SECONDS)
    while True:
        await trigger_run(conn, dag_id=ids[9], params={}, key=None, actor=Actor("bench"))
        done = await finish_and_claim(
            conn, session=_SESSION, reports=[], queues=["default"], free=1, infra_retries=0, cursor=cursor
        )
        if any(claim.run_id == lowest.run_id for claim in done.claims):
            return time.perf_counter() - began - 9 * _AGING_SECONDS
        await _end(conn, done.claims)
