"""Rates: never more tasks of a key are let in than its limit in any period, by the database's clock (V6)."""

from __future__ import annotations

import asyncio
import random
from datetime import datetime, timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import gates
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.params import declare_params
from evertick.domain.explain import describe
from evertick.engine.gates import admit_gated_tasks, reconcile_gates, set_pool
from evertick.engine.runs import cancel, trigger
from evertick.engine.shards import poll_work
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start, states, value

HOST = declare_params({"host": "h"})


def rate(count: int, seconds: float, key: str = "api") -> GateSpec:
    return GateSpec(kind=GateKind.RATE, name=key, capacity=count, period_seconds=seconds)


async def limited(conn: AsyncConnection, name: str, *needed: GateSpec) -> None:
    await put(conn, make_dag(name, {"t": []}, task_gates=needed))


async def sound(conn: AsyncConnection) -> None:
    assert await invariants.gate_violations(conn) == []
    assert await value(conn, "select count(*) from gate_order") == 0


async def let_in(conn: AsyncConnection, runs: list[int]) -> list[bool]:
    return [(await states(conn, run))["t"] != "pending" for run in runs]


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, later(0))
    return conn


async def test_slots_come_back_by_time_and_not_by_the_end_of_a_task(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    await limited(db, "a", rate(2, 10))
    await limited(db, "k", GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE))
    for _ in range(2):
        await start(db, "k")
    (holder,) = await runner.claim()
    made = [await start(db, "a")]
    await set_clock(db, later(4))
    made += [await start(db, "a") for _ in range(4)]
    assert await let_in(db, made) == [True, True, False, False, False]
    await runner.step([(claim, "success", {}) for claim in await runner.claim()])
    done = await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    assert (done.admitted, done.next_opening) == (0, later(10)), "their end gives nothing back"
    await set_clock(db, later(9.999))
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)).admitted == 0
    await set_clock(db, later(10))
    done = await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    assert (done.admitted, done.next_opening) == (1, later(14))
    await sound(db)
    await set_clock(db, later(30))
    done = await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    assert (done.admitted, done.next_opening) == (2, None), "two slots have come back; nobody else waits for one"
    assert (await poll_work(db, shard=0, epoch=leader, lost_after=90)).next_opening is None
    await sound(db)
    await runner.finish(holder)


async def test_the_leader_knows_when_to_come_by(db: AsyncConnection) -> None:
    leader = await lead(db)
    await limited(db, "a", rate(1, 60))
    for _ in range(2):
        await start(db, "a")
    seen = await poll_work(db, shard=0, epoch=leader, lost_after=90)
    assert (seen.next_opening, seen.has_gates) == (later(60), False)


async def test_a_rate_counts_by_key_and_a_retry_counts_again(db: AsyncConnection) -> None:
    runner = await Runner.join(db)
    gate = rate(2, 10, "api:{params.host}")
    await put(db, make_dag("a", {"t": []}, task_gates=(gate,), params=HOST))
    one, two = [(await trigger(db, dag="a", params={"host": host}, actor=Actor("test"))).run_id for host in "xy"]
    (first, _) = await runner.claim()
    assert first.run_id == one
    await runner.finish(first, "given_back")
    (again,) = await runner.claim()
    await runner.finish(again, "given_back")
    assert await let_in(db, [one, two]) == [False, True]
    await sound(db)


async def test_who_waits_for_a_slot_of_a_rate_takes_nothing_else(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    key = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)
    await limited(db, "both", rate(1, 10), key)
    await limited(db, "keyed", key)
    first, second = await start(db, "both"), await start(db, "both")
    third = await start(db, "keyed")
    (claim,) = await runner.claim()
    assert claim.run_id == first
    ((claim,), _) = await runner.step([(claim, "success", {})], free=5)
    assert claim.run_id == third, "the one that waits for time does not keep the key"
    # Its time comes while the key is taken: it moves to the key's line, and its slot is taken only when it is let in.
    await set_clock(db, later(10))
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)).admitted == 0
    assert [each.detail["gate"] for each in await gates.explain_task(db, TaskKey(second, 0, -1))] == ["mutex"]
    await set_clock(db, later(15))
    ((claim,), _) = await runner.step([(claim, "success", {})], free=5)
    assert claim.run_id == second
    assert await value(db, "select until from rate_slot") == later(25)
    await sound(db)


async def test_why_says_until_when(db: AsyncConnection) -> None:
    await limited(db, "a", rate(2, 60))
    await start(db, "a")
    await set_clock(db, later(5))
    made = [await start(db, "a") for _ in range(5)][1:]
    until = []
    for run in made:
        (reason,) = await gates.explain_task(db, TaskKey(run, 0, -1))
        until.append(datetime.fromisoformat(reason.detail["until"]))
        assert "rate api is used up: 2/2 in 60 s; next slot at 2030-01-01T00:0" in describe(reason)
    assert until == [later(60), later(65), later(120), later(125)]
    leader = await lead(db)
    for run, instant in zip(made, until, strict=True):
        await set_clock(db, instant - timedelta(milliseconds=1))
        await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
        assert await let_in(db, [run]) == [False]
        await set_clock(db, instant)
        await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
        assert await let_in(db, [run]) == [True]


async def test_a_new_version_changes_the_rate_and_what_is_taken_stays_taken(db: AsyncConnection) -> None:
    leader = await lead(db)
    await limited(db, "a", rate(3, 10))
    made = [await start(db, "a") for _ in range(3)]
    await limited(db, "a", rate(1, 100))
    made.append(await start(db, "a"))
    assert await let_in(db, made) == [True, True, True, False]
    await set_clock(db, later(10))
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)).admitted == 1
    assert await value(db, "select until from rate_slot") == later(110)
    (row,) = await gates.list_gates(db, kinds=["rate"])
    assert (row.used, row.slots, row.period) == (1, 1, 100.0)


async def test_reconcile_adds_up_a_rate_and_deletes_one_that_nobody_needs(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    await limited(db, "a", rate(1, 10))
    first, second = await start(db, "a"), await start(db, "a")
    assert (await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)).drifted == 0
    await db.execute("update gate set used = 0")
    done = await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert (done.drifted, done.admitted) == (1, 0)
    await cancel(db, run_id=second, actor=Actor("test"))
    await set_clock(db, later(10))
    done = await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert done.drifted == 0
    await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert await value(db, "select count(*) from gate") == 0
    # The first one still runs: it held nothing of the rate.
    assert await runner.drain() == ["t"]
    assert await let_in(db, [first]) == [True]
    await sound(db)


@pytest.mark.requirement("D3", "V6")
async def test_no_window_has_more_than_the_limit_with_many_promoters(database: str) -> None:
    """By the times that the database itself wrote down: in any 50 ms at most three."""
    connections = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(6)]
    conn, *others = connections
    epoch = await lead(conn)
    await set_pool(conn, name="db", slots=2, actor=Actor("test"))
    await limited(conn, "a", rate(3, 0.05))
    await limited(conn, "b", rate(3, 0.05), GateSpec(kind=GateKind.POOL, name="db"))
    count, is_over = 60, asyncio.Event()

    async def make(each: AsyncConnection, dice: random.Random) -> None:
        for _ in range(count // 2):
            await start(each, dice.choice("ab"))

    async def work(each: AsyncConnection) -> None:
        runner = await Runner.join(each)
        while not is_over.is_set():
            await runner.drain()

    async def plan() -> None:
        while await value(conn, "select count(*) from run_status where state = 'success'") != count:
            await admit_gated_tasks(conn, shard=0, epoch=epoch, limit=10)
            assert (await reconcile_gates(conn, shard=0, epoch=epoch, after=0, limit=100)).drifted == 0
        is_over.set()

    await conn.execute("create table seen as select * from rate_slot")
    await conn.execute(
        "create function see() returns trigger language plpgsql as"
        " $$ begin insert into seen values (new.gate_id, new.until, new.seq); return new; end $$"
    )
    await conn.execute("create trigger see after insert on rate_slot for each row execute function see()")
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for n, each in enumerate(others[:2]):
            group.create_task(make(each, random.Random(n)))
        for each in others[2:]:
            group.create_task(work(each))
        group.create_task(plan())
    passed = [row[0] for row in await (await conn.execute("select until from seen order by until")).fetchall()]
    assert len(passed) == count
    assert all(b - a >= timedelta(seconds=0.05) for a, b in zip(passed, passed[3:], strict=False))
    for each in connections:
        await each.close()


async def test_a_slot_that_came_back_while_somebody_looked_elsewhere_is_not_forgotten(db: AsyncConnection) -> None:
    """A line of another gate takes the rate's lock and returns its slots: those who wait for the rate itself are next."""
    leader, runner = await lead(db), await Runner.join(db)
    key = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)
    await limited(db, "keyed", key)
    await limited(db, "both", rate(2, 10), key)
    await limited(db, "a", rate(2, 10))
    await start(db, "keyed")
    both = await start(db, "both")
    made = [await start(db, "a") for _ in range(3)]
    claims = {claim.run_id: claim for claim in await runner.claim()}
    assert await let_in(db, [both, *made]) == [False, True, True, False]
    await set_clock(db, later(11))
    await runner.finish(claims[1])
    assert await let_in(db, [both]) == [True]
    await sound(db)
    await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    assert await let_in(db, made) == [True, True, True]
    await sound(db)
