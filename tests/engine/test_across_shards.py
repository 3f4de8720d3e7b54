"""What DAGs have to do with each other does not end at a shard: who runs after whom, who starts whom, who waits for whose slot.

Each leader acts for its own shard alone. DAGs change their shard in between, and what hangs on them comes after.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick import Asset, after
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateSpec
from evertick.domain.dags.spec import ChildSpec, DagSpec, NamedSchedule, TaskKind
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import deliver_dependencies
from evertick.engine.shards import acquire_shard, rebalance_shard, set_shards
from evertick.engine.waits import wake
from tests.engine import invariants
from tests.engine.test_gates import mutex, pool
from tests.engine.world import T0, Runner, later, make_dag, put, run_state, set_clock, start, states, value

ONE: dict[str, list[str]] = {"t": []}


class Leaders:
    """One for each of two shards."""

    def __init__(self, conn: AsyncConnection, epochs: list[int]) -> None:
        self.conn, self.epochs = conn, epochs

    @classmethod
    async def of_two(cls, conn: AsyncConnection) -> Leaders:
        await invariants.install(conn)
        await set_clock(conn, T0)
        await set_shards(conn, shards=2, actor=Actor("test"))
        taken = [await acquire_shard(conn, shard=shard, owner=f"leader-{shard}", seconds=1e6) for shard in range(2)]
        return cls(conn, [epoch for epoch in taken if epoch is not None])

    async def place(self, **shard_of: int) -> None:
        """DAGs are where they are wanted, with what hangs on them; each has a name that would put it somewhere."""
        for dag, shard in shard_of.items():
            await self.send(dag, shard)
        await self.conn.execute(
            "update schedule_state s set shard = d.shard from schedule c join dag d using (dag_id)"
            " where c.schedule_id = s.schedule_id"
        )
        await self.conn.execute(
            "update deferral x set shard = d.shard from run r join dag d using (dag_id) where r.run_id = x.run_id"
        )

    async def send(self, dag: str, shard: int) -> None:
        """The DAG alone is in another shard, as in the middle of a move."""
        await self.conn.execute("update dag set shard = %s where name = %s", [shard, dag])

    async def bring_home(self) -> None:
        """By the leaders themselves, to where their names put them."""
        while sum(
            [(await rebalance_shard(self.conn, shard=s, epoch=e, limit=5)).moved for s, e in enumerate(self.epochs)]
        ):
            pass
        assert await value(self.conn, "select sum(misplaced_count(shard, 1000)) from shard") == 0

    async def fire(self, shard: int) -> int:
        settled = (await fire_schedules(self.conn, shard=shard, epoch=self.epochs[shard], batch=100)).settled
        assert await invariants.violations(self.conn) == []
        return settled

    async def hear(self) -> int:
        """What arrives is read by one for all."""
        return (await deliver_dependencies(self.conn, shard=0, epoch=self.epochs[0], limit=100)).became_due

    async def wake(self, shard: int) -> int:
        done = await wake(self.conn, shard=shard, epoch=self.epochs[shard], batch=100)
        assert await invariants.violations(self.conn) == []
        return done.looked_at


@pytest.fixture
async def leaders(conn: AsyncConnection) -> Leaders:
    return await Leaders.of_two(conn)


async def run_to_its_end(runner: Runner, dag: str) -> int:
    run_id = await start(runner.conn, dag)
    (claim,) = [each for each in await runner.claim() if each.run_id == run_id]
    await runner.finish(claim)
    return run_id


async def runs_of(conn: AsyncConnection, dag: str) -> object:
    return await value(conn, "select count(*) from run r join dag d using (dag_id) where d.name = %s", dag)


# after -------------------------------------------------------------------------------------------------------------------


async def waiting_dag(leaders: Leaders) -> Runner:
    """`w` runs after `a` and after what `b` writes."""
    conn = leaders.conn
    await put(conn, make_dag("a", ONE))
    await put(conn, make_dag("b", ONE, per_task={"t": {"outlets": ("data",)}}))
    schedule = NamedSchedule(name="main", spec=parse_schedule(after("a", Asset("data"))))
    await put(conn, replace(make_dag("w", ONE), schedules=(schedule,)))
    return await Runner.join(conn)


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(("a", "b", "w"), [(0, 1, 1), (1, 0, 0), (1, 1, 0), (0, 0, 1)])
async def test_a_run_that_ends_in_one_shard_is_delivered_to_another(leaders: Leaders, a: int, b: int, w: int) -> None:
    runner = await waiting_dag(leaders)
    await leaders.place(a=a, b=b, w=w)
    for count in (1, 2):
        await set_clock(leaders.conn, later(count))
        await run_to_its_end(runner, "a")
        assert await leaders.hear() == 0
        await run_to_its_end(runner, "b")
        assert await leaders.hear() == 1
        assert await leaders.fire(1 - w) == 0, "its own leader fires it"
        assert await leaders.fire(w) == 1
        assert await runs_of(leaders.conn, "w") == count
        await runner.drain()


@pytest.mark.requirement("V1")
async def test_the_dependency_state_moves_with_its_dag(leaders: Leaders) -> None:
    """Once between the two that it waits for, and once between being due and being fired."""
    conn, runner = leaders.conn, await waiting_dag(leaders)
    await leaders.place(a=0, b=1, w=1)
    await run_to_its_end(runner, "a")
    await leaders.hear()
    await leaders.place(w=0)
    await run_to_its_end(runner, "b")
    assert await leaders.hear() == 1
    await leaders.place(w=1)
    assert (await leaders.fire(0), await leaders.fire(1)) == (0, 1)
    await runner.drain()
    # Due, and its DAG has moved, but its cursor has not: its old leader fires it.
    await set_clock(conn, later(1))
    await run_to_its_end(runner, "a")
    await run_to_its_end(runner, "b")
    assert await leaders.hear() == 1
    await leaders.send("w", 0)
    assert (await leaders.fire(0), await leaders.fire(1)) == (0, 1)
    await leaders.bring_home()
    assert (await leaders.fire(0), await leaders.fire(1)) == (0, 0)
    assert await runs_of(conn, "w") == 2


async def test_an_event_during_a_rebalance_is_delivered_once(leaders: Leaders) -> None:
    conn, runner = leaders.conn, await waiting_dag(leaders)
    for count, number in enumerate((1, 2, 1, 2), 1):
        await set_clock(conn, later(count))
        await run_to_its_end(runner, "a")
        await set_shards(conn, shards=number, actor=Actor("test"))
        await run_to_its_end(runner, "b")
        await leaders.bring_home()
        await leaders.hear()
        assert await leaders.fire(0) + await leaders.fire(1) == 1
        await runner.drain()
        assert await runs_of(conn, "w") == count
    assert await value(conn, "select count(*) from dependency_event") == 0


# runs that start runs ------------------------------------------------------------------------------------------------------


def parent() -> DagSpec:
    options = {"call": {"kind": TaskKind.TRIGGER, "child": ChildSpec(dag="child", params={}, waits=True)}}
    return make_dag("parent", {"call": [], "last": ["call"]}, per_task=options)


@pytest.mark.parametrize("moves", ["never", "before it starts", "while it runs", "when it has ended"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["with its wait", "the DAG alone"])
async def test_a_run_that_another_shards_run_waits_for(leaders: Leaders, moves: str, is_whole: bool) -> None:
    """The parent is in shard 1, the child in 0; the parent goes to 0 at some time. Its wait is where it says that it is."""
    conn = leaders.conn
    runner = await Runner.join(conn)
    await put(conn, make_dag("child", ONE))
    await put(conn, parent())
    await leaders.place(child=0, parent=1)
    run = await start(conn, "parent")
    where = 1

    async def move(moment: str) -> None:
        nonlocal where
        if moves != moment:
            return
        if is_whole:
            await leaders.place(parent=0)
            where = 0
        else:
            await leaders.send("parent", 0)

    await move("before it starts")
    assert await leaders.wake(1 - where) == 0
    assert await leaders.wake(where) == 1
    (work,) = await runner.claim()
    await move("while it runs")
    await runner.finish(work)
    await move("when it has ended")
    assert await leaders.wake(1 - where) == 0
    assert await leaders.wake(where) == 1
    assert await states(conn, run) == {"call": "success", "last": "available"}
    await leaders.bring_home()
    assert await runner.drain() == ["last"]
    assert await run_state(conn, run) == "success"
    assert await runs_of(conn, "child") == 1


# gates ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V6")
@pytest.mark.parametrize("gate", [mutex("key"), pool("narrow")], ids=["key", "pool"])
async def test_a_key_and_a_pool_hold_across_shards_that_change(leaders: Leaders, gate: GateSpec) -> None:
    """Whoever holds it gives it to the next one in the same step, wherever both of them are by then."""
    conn = leaders.conn
    await set_pool(conn, name="narrow", slots=1, actor=Actor("test"))
    runner = await Runner.join(conn)
    names = [f"d{number}" for number in range(6)]
    for number, name in enumerate(names):
        await put(conn, make_dag(name, ONE, task_gates=(gate,), every="@every 60s"))
        await leaders.place(**{name: number % 2})
    await set_clock(conn, later(60))
    assert [await leaders.fire(shard) for shard in range(2)] == [3, 3]
    claims, done = await runner.claim(), 0
    while claims:
        (held,) = claims
        done += 1
        await leaders.place(**{name: (number + done) % 2 for number, name in enumerate(names)})
        claims, _ = await runner.step([(held, "success", {})], free=10)
        assert await invariants.gate_violations(conn) == []
    assert done == len(names)
