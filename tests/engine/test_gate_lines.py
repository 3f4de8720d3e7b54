"""Who is in which line before a gate, and who looks at it: what keeps lines apart, and what is never put into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.errors import NotFound
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause
from evertick.engine.gates import admit_gated_tasks, delete_pool, reconcile_gates, release_admissions, set_pool
from evertick.engine.runners import drain
from evertick.engine.runs import cancel
from evertick.engine.tasks import mark
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start, states, value
from tests.waiting import eventually

ENTER = """select apply_effects(row(array[row(run_id, {}, -1, version_id, 'pending')::task_ref], null, null, null, null)::effects)
             from run where run_id = %s"""


def pool(name: str, slots: int = 1) -> GateSpec:
    return GateSpec(kind=GateKind.POOL, name=name, weight=slots)


def mutex(key: str) -> GateSpec:
    return GateSpec(kind=GateKind.MUTEX, name=key, weight=EXCLUSIVE)


def rate(key: str, count: int = 1) -> GateSpec:
    return GateSpec(kind=GateKind.RATE, name=key, capacity=count, period_seconds=10)


def ordered(key: str, version: int) -> GateSpec:
    return GateSpec(kind=GateKind.ORDER, name=key, version=version)


async def one_task(conn: AsyncConnection, name: str, *needed: GateSpec, **options: object) -> None:
    await put(conn, make_dag(name, {"t": []}, task_gates=needed, **options))


async def state(conn: AsyncConnection, run: int) -> str:
    return (await states(conn, run))["t"]


async def sound(conn: AsyncConnection) -> None:
    assert await invariants.gate_violations(conn) == []


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


@pytest.fixture
async def pair(database: str) -> AsyncIterator[tuple[AsyncConnection, AsyncConnection]]:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as actor,
        await connect(database, purpose=Purpose.SCHEDULER) as holder,
    ):
        for conn in (actor, holder):
            await set_clock(conn, later(0))
        yield actor, holder


# Who may be in a line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["ended", "waits for its time", "its run is queued", "in line already"])
async def test_who_is_noted_but_has_gone_on_since_does_not_enter(db: AsyncConnection, why: str) -> None:
    await one_task(db, "holder", mutex("k"))
    await start(db, "holder")
    retry = {"t": {"gates": (mutex("k"),), "retry": RetryPolicy(retries=1)}}
    await put(db, make_dag("a", {"other": [], "t": []}, per_task=retry))
    run = await start(db, "a")
    assert await value(db, "select count(*) from gate_waiter") == 1
    if why == "ended":
        await mark(db, TaskKey(run, 1, -1), state="skipped", actor=Actor("test"))
    elif why != "in line already":
        await db.execute("delete from gate_waiter")
        await db.execute("delete from gate_queue")
    if why == "waits for its time":
        await db.execute("update task set not_before = %s where run_id = %s and idx = 1", [later(60), run])
    elif why == "its run is queued":
        await db.execute("update run_status set state = 'queued' where run_id = %s", [run])
    await db.execute(ENTER.format(1), [run])  # type: ignore[arg-type]
    assert await value(db, "select count(*) from gate_waiter") == (why == "in line already")


@pytest.mark.parametrize("why", ["runs", "waits for its time"])
async def test_who_waits_no_more_is_not_let_in(db: AsyncConnection, why: str) -> None:
    await one_task(db, "a", task_retry=RetryPolicy(retries=1))
    run = await start(db, "a")
    runner = await Runner.join(db)
    (claim,) = await runner.claim()
    if why != "runs":
        await runner.finish(claim, "failed", retry_in=60)
    before = await state(db, run)
    arrival = (
        "select enqueued from run, admit_tasks(array[row(run_id, 0, -1, version_id, 5, '{}', '{}', '{}', '{}')"
        "::gate_candidate], null)"
    )
    assert await value(db, arrival + " where run_id = %s", run) is None
    assert await state(db, run) == before
    assert await value(db, "select count(*) from gate_holder") == 0


async def test_an_instance_that_is_marked_leaves_the_others_in_line(db: AsyncConnection) -> None:
    await one_task(db, "holder", mutex("k"))
    await start(db, "holder")
    three = Mapping(lists=(MappedList(argument="x", length=3),))
    await put(db, make_dag("a", {"t": []}, per_task={"t": {"mapping": three, "gates": (mutex("k"),)}}))
    run = await start(db, "a")
    await mark(db, TaskKey(run, 0, 1), state="success", actor=Actor("test"))
    assert await value(db, "select array_agg(map_index order by seq) from gate_waiter") == [0, 2]
    await sound(db)


async def test_a_place_is_taken_under_the_lock_of_its_own_key_alone(
    pair: tuple[AsyncConnection, AsyncConnection],
) -> None:
    """In a pause nobody is let in: the place alone is written down, and a key of another kind has nothing to do with it."""
    actor, holder = pair
    await one_task(actor, "other", mutex("o"), task_queue="elsewhere")
    await start(actor, "other")
    await put(actor, make_dag("a", {"up": [], "t": ["up"]}, per_task={"t": {"gates": (ordered("o", 1),)}}))
    await start(actor, "a")
    (claim,) = await (runner := await Runner.join(actor)).claim()
    await pause(actor, dag="a", actor=Actor("test"))
    await actor.execute("set lock_timeout = '300ms'")
    async with holder.transaction():
        await holder.execute("select from gate where kind = 'mutex' for no key update")
        await runner.finish(claim)
    assert await value(actor, "select count(*) from gate_order") == 1


# Lines apart ------------------------------------------------------------------------------------------------------------------


async def test_those_who_need_different_things_are_different_lines(db: AsyncConnection) -> None:
    """By weight, by rate, by version: each line says what its first needs."""
    await set_pool(db, name="db", slots=2, actor=Actor("test"))
    needs: list[tuple[GateSpec, ...]] = [(pool("db", 2),), (pool("db"),), (rate("x"),), (rate("y"),)]
    needs += [(ordered("o", 1),), (ordered("o", 2),), (ordered("o", 3),)]
    for number, needed in enumerate(needs):
        await one_task(db, f"d{number}", *needed)
    for _ in range(2):
        for number in range(len(needs)):
            await start(db, f"d{number}")
    counted = "select array_agg(n order by n) from (select count(*) as n from gate_waiter group by queue_id) x"
    assert await value(db, counted) == [1, 1, 1, 2, 2, 2]
    await sound(db)


async def test_a_task_with_an_ordered_key_and_a_rate_passes_the_rate_alone(db: AsyncConnection) -> None:
    await one_task(db, "a", ordered("o", 1), rate("x"))
    await start(db, "a")
    cursor = await db.execute(
        "select kind::text, used, (select count(*) from rate_slot p where p.gate_id = g.gate_id) from gate g"
    )
    assert sorted(await cursor.fetchall()) == [("order", 0, 0), ("rate", 1, 1)]


async def test_a_line_whose_first_is_gone_is_looked_at_again_in_its_new_place(db: AsyncConnection) -> None:
    await set_pool(db, name="db", slots=3, actor=Actor("test"))
    for name, slots in (("all", 3), ("one", 1), ("two", 2)):
        await one_task(db, name, pool("db", slots))
    runner = await Runner.join(db)
    await start(db, "all")
    (claim,) = await runner.claim()
    first, second, third = [await start(db, name) for name in ("one", "two", "one")]
    await cancel(db, run_id=first, actor=Actor("test"))
    await runner.finish(claim)
    assert [await state(db, run) for run in (second, third)] == ["available", "available"]
    await sound(db)


async def test_lines_with_different_needs_take_turns_by_age(db: AsyncConnection) -> None:
    await set_pool(db, name="db", slots=4, actor=Actor("test"))
    for name, slots in (("all", 4), ("one", 1), ("two", 2)):
        await one_task(db, name, pool("db", slots))
    runner = await Runner.join(db)
    await start(db, "all")
    (claim,) = await runner.claim()
    made = [await start(db, name) for name in ("one", "two", "one", "one")]
    await runner.finish(claim)
    assert [await state(db, run) for run in made] == ["available", "available", "available", "pending"]
    await sound(db)


async def test_a_line_that_cannot_be_looked_at_blocks_nobody_behind_it(
    pair: tuple[AsyncConnection, AsyncConnection],
) -> None:
    actor, holder = pair
    for name in ("early", "late"):
        await set_pool(actor, name=name, slots=1, actor=Actor("test"))
    await one_task(actor, "single", pool("late"))
    await one_task(actor, "both", pool("early"), pool("late"))
    runner = await Runner.join(actor)
    await start(actor, "single")
    (claim,) = await runner.claim()
    both, single = await start(actor, "both"), await start(actor, "single")
    async with holder.transaction():
        await holder.execute("select from gate where name = 'early' for no key update")
        await runner.finish(claim)
        assert [await state(actor, run) for run in (both, single)] == ["pending", "available"]


# What the leader looks at -----------------------------------------------------------------------------------------------------


async def test_a_pool_for_which_somebody_waits_has_no_time_at_which_it_opens(db: AsyncConnection) -> None:
    await set_pool(db, name="db", slots=3, actor=Actor("test"))
    await one_task(db, "light", pool("db"))
    await one_task(db, "heavy", pool("db", 3))
    await one_task(db, "both", pool("db"), rate("x"))
    for name in ("light", "heavy", "both"):
        await start(db, name)
    assert await value(db, "select count(*) from gate where next_opening is not null") == 0


async def test_the_leader_begins_with_the_gates_that_were_left_to_it(db: AsyncConnection) -> None:
    leader = await lead(db)
    for name in ("first", "second"):
        await set_pool(db, name=name, slots=1, actor=Actor("test"))
        await one_task(db, name, pool(name))
        await set_pool(db, name=name, slots=0, actor=Actor("test"))
    run = await start(db, "second")
    await db.execute("update gate set capacity = 1, needs_admission = true where name = 'second'")
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=1)).admitted == 1
    assert await state(db, run) == "available"


async def test_an_empty_line_is_left_to_who_holds_its_gate(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    """Somebody may just be joining it. The leader clears away only its own lines: those for want of a runner."""
    actor, holder = pair
    leader = await lead(actor)
    await one_task(actor, "a", mutex("k"))
    await start(actor, "a")
    await cancel(actor, run_id=await start(actor, "a"), actor=Actor("test"))
    assert (
        await value(actor, "select count(*) from gate_queue where queue_id not in (select queue_id from gate_waiter)")
        == 1
    )
    await actor.execute("set lock_timeout = '300ms'")
    async with holder.transaction():
        last = await start(holder, "a")
        await admit_gated_tasks(actor, shard=0, epoch=leader, limit=10)
    assert await state(actor, last) == "pending"
    await sound(actor)


async def test_reconcile_looks_at_its_slice_alone(db: AsyncConnection) -> None:
    leader = await lead(db)
    for name in ("x", "y"):
        await set_pool(db, name=name, slots=5, actor=Actor("test"))
    await db.execute("insert into gate_holder select -gate_id, 0, -1, array[gate_id], array[1], clock() from gate")
    await db.execute("update gate set used = 1")
    await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=1)
    assert await value(db, "select array_agg(used order by name) from gate") == [0, 1]
    assert await value(db, "select count(*) from gate_holder") == 1


async def test_what_runs_hides_nobody_who_is_to_be_taken_back(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db, queues=("gpu",))
    for key in ("j", "k"):
        await one_task(db, key, mutex(key), task_queue="gpu")
    running = await start(db, "j")
    await runner.claim(1, ("gpu",))
    waiting = await start(db, "k")
    await drain(db, sessions=[runner.session], actor=Actor("test"))
    await set_clock(db, later(61))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=1) == 1
    assert [await state(db, run) for run in (running, waiting)] == ["running", "pending"]


async def test_what_one_of_the_special_runners_takes_is_not_taken_back(db: AsyncConnection) -> None:
    leader = await lead(db)
    await Runner.join(db, match=("k::*",))
    for key in ("j", "k"):
        await one_task(db, key, mutex(key))
    others, its_own = await start(db, "j"), await start(db, "k")
    await set_clock(db, later(61))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 1
    assert [await state(db, run) for run in (others, its_own)] == ["pending", "available"]


async def test_reconcile_keeps_a_key_that_it_has_repaired_and_that_somebody_holds(db: AsyncConnection) -> None:
    leader = await lead(db)
    await one_task(db, "a", mutex("k"))
    await start(db, "a")
    await db.execute("update gate set used = used + 1")
    assert (await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=10)).drifted == 1
    assert await value(db, "select used from gate") == EXCLUSIVE
    await sound(db)


# Pools ------------------------------------------------------------------------------------------------------------------------


async def test_the_journal_knows_what_a_pool_really_had_before(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    actor, holder = pair
    await set_pool(actor, name="db", slots=2, actor=Actor("test"))
    async with holder.transaction():
        await set_pool(holder, name="db", slots=5, actor=Actor("first"))
        setting = asyncio.ensure_future(set_pool(actor, name="db", slots=7, actor=Actor("second")))
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        await eventually(lambda: value(holder, waits, actor.info.backend_pid))
    await setting
    assert await value(actor, "select detail->>'was' from audit_log where actor = 'second'") == "5"


async def test_a_pool_is_another_gate_than_a_key_of_its_name(db: AsyncConnection) -> None:
    await one_task(db, "a", mutex("k"))
    await start(db, "a")
    await set_pool(db, name="k", slots=1, actor=Actor("test"))
    await set_pool(db, name="k", slots=3, actor=Actor("test"))
    cursor = await db.execute("select kind::text, capacity from gate g order by g.kind")
    assert await cursor.fetchall() == [("pool", 3), ("mutex", EXCLUSIVE)]
    await delete_pool(db, name="k", actor=Actor("test"))
    with pytest.raises(NotFound):
        await delete_pool(db, name="k", actor=Actor("test"))
    assert await value(db, "select array_agg(kind::text) from gate") == ["mutex"]
