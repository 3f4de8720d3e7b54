"""Work is linear in edges: ten times the tasks cost at most twelve times as much, for fan-out and fan-in.

Measured as processor time of the server's process, because the machine is shared and a wall clock would see the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.engine.publish import dag_row
from tests.engine.world import Runner, make_dag, put, start, states

_USER_TICKS, _SYSTEM_TICKS = 11, 12


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


async def _spend(conn: AsyncConnection, name: str, runner: Runner, times: int, result: object = None) -> float:
    """What one run costs the server, from its trigger to its end, in batches of 200. Its first task returns `result`."""
    before = _processor_seconds(conn.info.backend_pid)
    for _ in range(times):
        run = await start(conn, name)
        claims = await runner.claim(200)
        fields: dict[str, object] = {} if result is None else {"result": result}
        while claims:
            claims, refused = await runner.step([(claim, "success", fields) for claim in claims], free=200)
            fields = {} if result is None else {"result": {"a": 1}}
            assert refused == []
    spent = _processor_seconds(conn.info.backend_pid) - before
    assert set((await states(conn, run)).values()) == {"success"}
    return spent / times


async def _proportion(
    small: Callable[[], Awaitable[float]], large: Callable[[], Awaitable[float]], most: float
) -> str | None:
    """None when the large one costs at most so many times the small one, each at its best: a neighbour that shares the
    processor's caches makes either dearer for a while, and what does not grow in proportion is too dear each time."""
    cheap, dear = await small(), await large()
    for _ in range(4):
        if dear / cheap <= most:
            return None
        cheap, dear = min(cheap, await small()), min(dear, await large())
    return None if dear / cheap <= most else f"{dear:.2f} s for ten times as many, {cheap:.2f} s for the few"


async def test_fan_out_and_fan_in_cost_in_proportion_to_their_edges(database: str) -> None:
    async with await connect(database, purpose=Purpose.RUNNER) as conn:
        runner = await Runner.join(conn)
        for size in (500, 5_000):
            middle = {f"m{i}": ["first"] for i in range(size)}
            await put(conn, make_dag(f"fan{size}", {"first": [], **middle, "last": list(middle)}))
        await _spend(conn, "fan500", runner, 1)
        assert not await _proportion(
            lambda: _spend(conn, "fan500", runner, 6), lambda: _spend(conn, "fan5000", runner, 1), 12
        )


async def test_a_mapped_task_costs_in_proportion_to_its_instances(database: str) -> None:
    over = Mapping(lists=(MappedList(argument="x", task="first"),))
    options = {"work": {"mapping": over}, "last": {"inputs": ("work",)}}
    async with await connect(database, purpose=Purpose.RUNNER) as conn:
        runner = await Runner.join(conn)
        await put(conn, make_dag("mapped", {"first": [], "work": ["first"], "last": ["work"]}, per_task=options))
        rows = [{"id": number, "name": f"row {number}"} for number in range(10_000)]
        await _spend(conn, "mapped", runner, 1, rows[:1000])
        assert not await _proportion(
            lambda: _spend(conn, "mapped", runner, 4, rows[:1000]), lambda: _spend(conn, "mapped", runner, 1, rows), 13
        )


def test_the_rows_of_a_published_dag_cost_in_proportion_to_its_tasks() -> None:
    def spent(size: int) -> float:
        dag = make_dag("fan", {"first": [], **{f"m{i}": ["first"] for i in range(size)}})
        began = time.process_time()
        dag_row(dag, file="fan.py", bundle_hash="b")
        return time.process_time() - began

    # Ten times as many, and twice that for a machine that is busy: what looks at all edges for each task costs a hundred times.
    assert min(spent(10_000) for _ in range(2)) < 20 * min(spent(1_000) for _ in range(3))


async def test_a_cascade_over_ten_thousand_tasks_is_one_step(conn: AsyncConnection) -> None:
    shape = {"first": [], **{f"t{i}": ["first" if i == 0 else f"t{(i - 1) // 10}"] for i in range(10_000)}}
    await put(conn, make_dag("tree", shape))
    run = await start(conn, "tree")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    assert await runner.finish(claim, "failed") == []
    found = await states(conn, run)
    assert (found.pop("first"), set(found.values())) == ("failed", {"upstream_failed"})
