"""Many at once at the same gates: runners, people and the leader, each on a connection of its own (V6).

The limits hold at every instant that anybody can see, nobody deadlocks, nothing is left over, and everything gets its turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.errors import UserError
from evertick.engine.dags import pause, unpause
from evertick.engine.gates import admit_gated_tasks, reconcile_gates, set_pool
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.runs import cancel, trigger
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, lead, make_dag, put, start, value

DAGS = ("one", "two", "three")
POOLS = ("red", "blue")
STEPS = 60


def some_gates(dice: random.Random) -> tuple[GateSpec, ...]:
    choices = [
        GateSpec(kind=GateKind.POOL, name=dice.choice(POOLS), weight=dice.choice([1, 2])),
        GateSpec(kind=GateKind.MUTEX, name=dice.choice("xyz"), weight=dice.choice([1, EXCLUSIVE])),
        GateSpec(kind=GateKind.KEY, name="k", capacity=2),
        GateSpec(kind=GateKind.TASK, name="", capacity=1),
        GateSpec(kind=GateKind.ORDER, name=dice.choice("vw"), version=dice.randint(1, 5)),
        GateSpec(kind=GateKind.RATE, name="r", capacity=5, period_seconds=0.02),
    ]
    return tuple(dice.sample(choices, dice.choice([0, 1, 1, 2, 3])))


async def work(conn: AsyncConnection, dice: random.Random) -> None:
    """A runner: claims, ends some of what it holds, and at last all of it."""
    runner = await Runner.join(conn)
    held = []
    for _ in range(STEPS):
        ending = dice.sample(held, dice.randint(0, len(held)))
        held = [claim for claim in held if claim not in ending]
        kinds = [dice.choice(["success", "success", "failed", "given_back", "killed"]) for _ in ending]
        claims, refused = await runner.step(
            [(claim, kind, {"retry_in": 0}) for claim, kind in zip(ending, kinds, strict=True)], free=dice.randint(0, 4)
        )
        assert refused == []
        held += claims
        await asyncio.sleep(0)
    await runner.step([(claim, "success", {}) for claim in held])


async def meddle(conn: AsyncConnection, dice: random.Random) -> None:
    """People: trigger, cancel, clear, mark, pause, and change pools."""
    for _ in range(STEPS):
        newest = int(str(await value(conn, "select coalesce(max(run_id), 1) from run")))
        run = max(1, newest - dice.randint(0, 10))
        verbs: list[Callable[[], Awaitable[object]]] = [
            lambda: trigger(conn, dag=dice.choice(DAGS), params={}, actor=Actor("test")),
            lambda: trigger(conn, dag=dice.choice(DAGS), params={}, actor=Actor("test")),
            lambda run=run: cancel(conn, run_id=run, actor=Actor("test")),  # type: ignore[misc]
            lambda run=run: mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("test")),  # type: ignore[misc]
            lambda run=run: clear_all(conn, run),  # type: ignore[misc]
            lambda: pause(conn, dag=dice.choice(DAGS), actor=Actor("test")),
            lambda: unpause(conn, dag=dice.choice(DAGS), actor=Actor("test")),
            lambda: set_pool(conn, name=dice.choice(POOLS), slots=dice.choice([1, 2, 3]), actor=Actor("test")),
        ]
        try:
            await dice.choice(verbs)()
        except UserError:
            continue  # people get clear refusals


async def clear_all(conn: AsyncConnection, run: int) -> None:
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("test"))


async def tend_for(conn: AsyncConnection, epoch: int) -> None:
    for _ in range(STEPS):
        await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)
        await admit_gated_tasks(conn, shard=0, epoch=epoch, limit=10)
        done = await reconcile_gates(conn, shard=0, epoch=epoch, after=0, limit=100)
        assert done.drifted == 0
        await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)


async def watch(conn: AsyncConnection, is_over: asyncio.Event) -> None:
    """V6 at any instant. What is let in a moment later is no violation here, only at the end."""
    while not is_over.is_set():
        found = [text for text in await invariants.gate_violations(conn) if "could be let in" not in text]
        assert found == []
        await asyncio.sleep(0)


@pytest.mark.requirement("D3", "D4", "D5", "V6")
@pytest.mark.parametrize("seed", range(2))
async def test_limits_hold_while_everybody_moves(database: str, seed: int) -> None:
    dice = random.Random(seed)
    connections = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(8)]
    conn, watcher, *others = connections
    epoch = await lead(conn)
    for name in POOLS:
        await set_pool(conn, name=name, slots=2, actor=Actor("test"))
    for name in DAGS:
        shape = {f"t{i}": [f"t{i - 1}"] if i > 2 else [] for i in range(5)}
        per_task = {task: {"gates": some_gates(dice)} for task in shape}
        await put(conn, make_dag(name, shape, per_task=per_task, max_active_tasks=dice.choice([None, 4])))
        for _ in range(3):
            await start(conn, name)
    before = await value(conn, "select deadlocks from pg_stat_database where datname = current_database()")
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(watch(watcher, is_over))
        doing = [group.create_task(work(each, random.Random(seed * 100 + n))) for n, each in enumerate(others[:4])]
        doing += [
            group.create_task(meddle(each, random.Random(seed * 100 + 50 + n))) for n, each in enumerate(others[4:])
        ]
        doing.append(group.create_task(tend_for(conn, epoch)))
        await asyncio.wait(doing)
        is_over.set()
    await conn.execute("select pg_stat_force_next_flush()")
    assert await value(conn, "select deadlocks from pg_stat_database where datname = current_database()") == before
    # Everything that was left gets its turn.
    for name in DAGS:
        await unpause(conn, dag=name, actor=Actor("test"))
    for name in POOLS:
        await set_pool(conn, name=name, slots=2, actor=Actor("test"))
    runner = await Runner.join(conn)
    while await value(conn, "select count(*) from run_status where state in ('queued', 'running')"):
        await admit_gated_tasks(conn, shard=0, epoch=epoch, limit=100)
        await reconcile_gates(conn, shard=0, epoch=epoch, after=0, limit=100)
        await runner.drain()
    assert await invariants.gate_violations(conn) == []
    assert await value(conn, "select count(*) from run_status where state in ('queued', 'running')") == 0
    assert await value(conn, "select coalesce(sum(used), 0) from gate where kind <> 'rate'") == 0
    assert await value(conn, "select count(*) from gate_order") == 0
    for each in connections:
        await each.close()
