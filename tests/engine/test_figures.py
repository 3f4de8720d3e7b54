"""The figures of DAGs and tasks: what they add up, each run once, and which of them are metrics."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.db.queries.monitoring import figures
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.monitoring.busiest import OTHER, Busiest
from evertick.domain.retry import RetryPolicy
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.monitoring.figures import AddedFigures, count_figures
from evertick.engine.tasks import clear, select_tasks
from evertick.observability import metrics
from evertick.scheduler.figures import Figures
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start

ACTOR = Actor("test")


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def count(conn: AsyncConnection, limit: int = 100) -> list[AddedFigures]:
    epoch = await lead(conn)
    return await count_figures(conn, shard=0, epoch=epoch, limit=limit, settle_seconds=0)


async def test_a_run_is_counted_once_with_its_waits_retries_and_landing(conn: AsyncConnection) -> None:
    await set_pool(conn, name="p", slots=1, actor=ACTOR)
    pool = GateSpec(kind=GateKind.POOL, name="p", weight=1)
    retry = RetryPolicy(retries=1, delay_seconds=10)
    await put(conn, make_dag("d", {"a": [], "b": [], "c": ["a", "b"]}, task_gates=(pool,), task_retry=retry))
    assert await count(conn) == [], "it begins with the runs that end from now on"
    runner = await Runner.join(conn)
    await set_clock(conn, later(10))
    run_id = await start(conn, "d")
    (first,) = await runner.claim()
    await set_clock(conn, later(14))
    (second,) = (await runner.step([(first, "success", {"cpu": 2.0, "mem": 100})], free=1))[0]
    await set_clock(conn, later(15))
    await runner.finish(second, "failed", retry_in=10, cpu=1.0, mem=300)
    await set_clock(conn, later(25))
    await promote_due_tasks(conn, shard=0, epoch=await lead(conn), limit=10)
    await set_clock(conn, later(28))
    (again,) = await runner.claim()
    await set_clock(conn, later(30))
    (third,) = (await runner.step([(again, "success", {"cpu": 1.0, "mem": 200})], free=1))[0]
    assert await count(conn) == [], "the run is open"
    await set_clock(conn, later(33))
    await runner.finish(third)
    added = {each.task: each for each in await count(conn)}
    assert await count(conn) == [], "each run once"
    assert {
        name: (each.succeeded, each.retries, each.duration_seconds, each.wait_seconds) for name, each in added.items()
    } == {"": (1, 0, 23, 0), "a": (1, 0, 4, 0), "b": (1, 1, 2, 3), "c": (1, 0, 3, 0)}
    assert {name: each.landing_seconds for name, each in added.items()} == {"": 23, "a": 4, "b": 20, "c": 23}
    assert [(added[name].cpu_seconds, added[name].peak_memory_bytes) for name in "abc"] == [
        (2, 100),
        (2, 300),
        (0, None),
    ]
    # Cleared: only what ran again counts again, and nothing lands.
    await clear(conn, run_id=run_id, chosen=await select_tasks(conn, run_id=run_id, names=["c"]), actor=ACTOR)
    (claim,) = await runner.claim()
    await set_clock(conn, later(99))
    await runner.finish(claim, "failed", no_retry=True)
    (whole, only) = await count(conn)
    assert (whole.task, whole.failed, only.task, only.failed, only.landed) == ("", 1, "c", 1, 0)
    row = await dags.find(conn, "d")
    assert row is not None
    stored = await figures.of_tasks(conn, dag_id=row.dag_id, after="", is_first=True, limit=10)
    assert [(each.task, each.succeeded, each.failed, each.durations) for each in stored] == [
        ("", 1, 1, [23.0]),
        ("a", 1, 0, [4.0]),
        ("b", 1, 0, [16.0]),
        ("c", 1, 1, [3.0]),
    ]


async def test_a_slice_is_bounded_and_the_next_continues(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"t": []}))
    await count(conn)
    runner = await Runner.join(conn)
    for second in range(1, 6):
        await set_clock(conn, later(second))
        await start(conn, "d")
        await runner.drain()
    found = [await count(conn, limit=2) for _ in range(4)]
    assert [[each.runs for each in added] for added in found] == [[2, 2], [2, 2], [1, 1], []]
    assert sum(each.succeeded for added in found for each in added if each.task) == 5


async def test_the_series_are_bounded_and_end_when_others_are_far_busier(conn: AsyncConnection) -> None:
    await put(conn, make_dag("counted", {"t": []}))
    leader, counting = {"shard": 0, "epoch": await lead(conn)}, Figures()
    await counting.run_slice(conn, leader)  # type: ignore[arg-type]
    runner = await Runner.join(conn)
    await set_clock(conn, later(5))
    await start(conn, "counted")
    await runner.drain()
    await set_clock(conn, later(60))
    assert (await counting.run_slice(conn, leader)).in_seconds >= 10  # type: ignore[arg-type]
    ended = metrics.TASKS_ENDED.labels("counted", "t", "success")._value
    assert ended.get() == 1
    counting.begin()
    assert not next(iter(metrics.TASKS_ENDED.collect())).samples


def test_a_name_keeps_its_series_until_another_is_twice_as_active() -> None:
    busiest = Busiest(2)
    a, b, c = ("d", "a"), ("d", "b"), ("d", "c")
    other = (OTHER, OTHER)
    assert [busiest.add(each, 10)[0] for each in (a, b, c)] == [a, b, other]
    assert busiest.add(c, 9) == (other, None)
    busiest.add(a, 5)
    assert busiest.add(c, 2) == (c, b)
    busiest.age()
    assert busiest.add(b, 6) == (other, None)
    assert busiest.add(b, 20) == (b, a)
