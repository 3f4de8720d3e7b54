"""How much is in line, by queue: counted by the leader alone, bounded, and never left at an old count."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from psycopg import AsyncConnection

from evertick.db.statements import sql
from evertick.observability import metrics
from evertick.scheduler import telemetry
from evertick.scheduler.telemetry import COUNT_SECONDS, QUEUE_SECONDS, QueueDepth
from tests.system.hosting import Said


@pytest.fixture
def leading() -> Iterator[None]:
    metrics.LEADER.set(1)
    yield
    metrics.LEADER.set(0)
    metrics.QUEUE_DEPTH.clear()


@pytest.fixture
async def depth(database: str) -> AsyncIterator[QueueDepth]:
    made = QueueDepth(database, log=Said().log)
    yield made
    await made._link.close()


async def put_in_line(conn: AsyncConnection, queue: str, count: int) -> None:
    await conn.execute(
        "insert into ready_task (queue, rank, run_id, idx, map_index) select %s, 5, n, 0, -1 from generate_series(1, %s) n",
        (queue, count),
    )


def told() -> dict[str, float]:
    return {sample.labels["queue"]: sample.value for sample in metrics.QUEUE_DEPTH.collect()[0].samples}


@pytest.mark.usefixtures("leading")
async def test_the_leader_counts_each_queue_and_tells_when_one_is_empty(
    conn: AsyncConnection, depth: QueueDepth, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_in_line(conn, "default", 7)
    await put_in_line(conn, "gpu", 30)
    monkeypatch.setattr(telemetry, "MOST_COUNTED", 20)
    assert await depth.tick() == COUNT_SECONDS
    assert told() == {"default": 7, "gpu": 20}
    await conn.execute("delete from ready_task where queue = 'gpu'")
    await depth.tick()
    assert told() == {"default": 7, "gpu": 0}


@pytest.mark.usefixtures("leading")
async def test_a_former_leader_counts_nothing(conn: AsyncConnection, depth: QueueDepth) -> None:
    await put_in_line(conn, "default", 1)
    await depth.tick()
    assert told() == {"default": 1}
    metrics.LEADER.set(0)
    assert await depth.tick() == QUEUE_SECONDS
    assert told() == {}


async def test_who_never_led_asks_the_database_nothing(depth: QueueDepth) -> None:
    await depth.tick()
    assert depth._link.reconnects == -1
    assert told() == {}


@pytest.mark.usefixtures("leading")
async def test_there_may_be_more_queues_than_anybody_wants_to_see(
    conn: AsyncConnection, depth: QueueDepth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MOST_QUEUES", 3)
    for number in range(5):
        await put_in_line(conn, f"q{number}", 1)
    await depth.tick()
    assert told() == {"q0": 1, "q1": 1, "q2": 1}


async def test_counting_reads_the_index_alone(conn: AsyncConnection) -> None:
    await put_in_line(conn, "default", 5000)
    await conn.execute("vacuum analyze ready_task")
    cursor = await conn.execute(f"explain {sql('runners', 'depths')}", {"cap": 1000, "most": 100})
    plan = "\n".join(str(row[0]) for row in await cursor.fetchall())
    assert "Seq Scan" not in plan, plan
    assert "Index Only Scan using ready_task_pkey on ready_task" in plan, plan
