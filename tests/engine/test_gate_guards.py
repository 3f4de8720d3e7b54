"""Guards of the gates, one by one: what keeps lines apart, what is locked and what is passed by, what the tables refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, UniqueViolation

from evertick.db.connect import Purpose, connect
from evertick.db.queries import gates
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.errors import Conflict
from evertick.engine.gates import admit_gated_tasks, delete_pool, reconcile_gates, release_admissions, set_pool
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value
from tests.waiting import eventually

PATIENCE = "set lock_timeout = '300ms'"


def pool(name: str, slots: int = 1) -> GateSpec:
    return GateSpec(kind=GateKind.POOL, name=name, weight=slots)


def mutex(key: str) -> GateSpec:
    return GateSpec(kind=GateKind.MUTEX, name=key, weight=EXCLUSIVE)


async def one_task(conn: AsyncConnection, name: str, *needed: GateSpec, **options: object) -> None:
    await put(conn, make_dag(name, {"t": []}, task_gates=needed, **options))


async def state(conn: AsyncConnection, run: int) -> str:
    return (await states(conn, run))["t"]


async def sound(conn: AsyncConnection) -> None:
    assert await invariants.gate_violations(conn) == []


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, later(0))
    await set_pool(conn, name="db", slots=2, actor=Actor("test"))
    return conn


@pytest.fixture
async def pair(database: str) -> AsyncIterator[tuple[AsyncConnection, AsyncConnection]]:
    """One that acts and has little patience, and one that holds locks."""
    async with AsyncExitStack() as stack:
        actor, holder = [
            await stack.enter_async_context(await connect(database, purpose=Purpose.SCHEDULER)) for _ in range(2)
        ]
        await set_clock(actor, later(0))
        await set_clock(holder, later(0))
        yield actor, holder


async def locked(conn: AsyncConnection, name: str) -> None:
    await conn.execute("select from gate where name = %s for no key update", [name])


# Lines and names --------------------------------------------------------------------------------------------------------


async def test_gates_of_one_name_and_different_kinds_do_not_meet(db: AsyncConnection) -> None:
    await set_pool(db, name="k", slots=1, actor=Actor("test"))
    await one_task(db, "pooled", pool("k"))
    await one_task(db, "locked", mutex("k"))
    await one_task(db, "keyed", GateSpec(kind=GateKind.KEY, name="k", capacity=1))
    made = [await start(db, name) for name in ("pooled", "locked", "keyed")]
    assert [await state(db, run) for run in made] == ["available"] * 3
    assert await value(db, "select count(*) from gate where name = 'k' and used > 0") == 3
    # Another version changes the limit of its own kind, and only that.
    await one_task(db, "keyed", GateSpec(kind=GateKind.KEY, name="k", capacity=2))
    made.append(await start(db, "keyed"))
    assert await state(db, made[-1]) == "available"
    cursor = await db.execute("select kind::text, capacity from gate g where name = 'k' order by g.kind")
    assert await cursor.fetchall() == [("pool", 1), ("mutex", EXCLUSIVE), ("key", 2)]
    for run in made:
        await cancel(db, run_id=run, actor=Actor("test"))
    await one_task(db, "pooled")
    for _ in range(2):
        await start(db, "locked")  # somebody waits, but not for the pool
    await delete_pool(db, name="k", actor=Actor("test"))
    assert await value(db, "select count(*) from gate where name = 'k' and kind <> 'pool'") == 2
    await sound(db)


async def test_those_who_wait_for_different_keys_are_different_lines(db: AsyncConnection) -> None:
    runner = await Runner.join(db)
    for key in ("j", "k"):
        await one_task(db, key, mutex(key))
    made = {key: [await start(db, key), await start(db, key)] for key in ("j", "k")}
    claims = {claim.run_id: claim for claim in await runner.claim()}
    await runner.finish(claims[made["k"][0]])
    assert [await state(db, made[key][1]) for key in ("j", "k")] == ["pending", "available"]
    await runner.finish(claims[made["j"][0]])
    assert await state(db, made["j"][1]) == "available"
    await sound(db)


async def test_a_run_of_an_older_version_does_not_bring_the_old_limit_back(db: AsyncConnection) -> None:
    key = [GateSpec(kind=GateKind.KEY, name="k", capacity=count) for count in (3, 1)]
    shape = {"up": [], "t": ["up"]}
    await put(db, make_dag("a", shape, per_task={"t": {"gates": (key[0],)}}))
    old = await start(db, "a")
    runner = await Runner.join(db)
    (up,) = await runner.claim()
    await put(db, make_dag("a", shape, per_task={"t": {"gates": (key[1],)}}))
    new = await start(db, "a")
    (next_up,) = await runner.claim()
    await runner.finish(next_up)
    await runner.finish(up)
    assert [await state(db, run) for run in (new, old)] == ["available", "pending"]
    assert await value(db, "select capacity from gate where name = 'k'") == 1


async def test_a_task_that_is_marked_leaves_the_others_of_its_run_in_line(db: AsyncConnection) -> None:
    await one_task(db, "holder", mutex("k"))
    await start(db, "holder")
    await put(db, make_dag("a", {"x": [], "y": []}, task_gates=(mutex("k"),)))
    run = await start(db, "a")
    await mark(db, TaskKey(run, 0, -1), state="success", actor=Actor("test"))
    assert await value(db, "select array_agg(idx) from gate_waiter") == [1]
    await sound(db)


async def test_a_mark_that_changes_nothing_in_a_queued_run_leaves_nobody_before_his_gate(db: AsyncConnection) -> None:
    """It begins the run; whatever becomes pending by that passes its gates, also if the task has that state already."""
    runner = await Runner.join(db)
    gated = {"y": {"gates": (mutex("k"),)}}
    await put(db, make_dag("a", {"x": [], "y": []}, per_task=gated, max_active_runs=1))
    run = await start(db, "a")
    await runner.drain()
    await start(db, "a")
    await clear(db, run_id=run, chosen=await select_tasks(db, run_id=run, names=["y"]), actor=Actor("test"))
    assert await run_state(db, run) == "queued"
    with pytest.raises(Conflict):
        await mark(db, TaskKey(run, 0, -1), state="success", actor=Actor("test"))
    await sound(db)


@pytest.mark.parametrize("verb", ["cancel", "mark"])
async def test_what_was_taken_back_can_be_ended(db: AsyncConnection, verb: str) -> None:
    leader = await lead(db)
    await one_task(db, "a", mutex("k"), task_queue="gpu")
    run = await start(db, "a")
    await set_clock(db, later(61))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 1
    if verb == "cancel":
        await cancel(db, run_id=run, actor=Actor("test"))
    else:
        await mark(db, TaskKey(run, 0, -1), state="success", actor=Actor("test"))
    assert await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    assert await value(db, "select count(*) from gate_queue") == 0


async def test_only_what_holds_gates_is_taken_back_and_only_after_the_grace(db: AsyncConnection) -> None:
    leader = await lead(db)
    await Runner.join(db, queues=("elsewhere",))
    gone = await Runner.join(db, queues=("gpu",))
    await one_task(db, "a", mutex("k"), task_queue="gpu")
    await one_task(db, "free", task_queue="gpu")
    await one_task(db, "served", mutex("j"), task_queue="elsewhere")
    made = [await start(db, name) for name in ("a", "free", "served")]
    await set_clock(db, later(100))
    await db.execute("update runner set ended_at = clock() where session = %s", [gone.session])
    await set_clock(db, later(130))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 0, (
        "its runner left half a minute ago"
    )
    assert (await gates.explain_task(db, TaskKey(made[0], 0, -1)))[0].kind == "no_runner"
    await set_clock(db, later(161))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 1
    assert [await state(db, run) for run in made] == ["pending", "available", "available"]
    assert await value(db, "select count(*) from ready_task") == 2
    await sound(db)


# Reserved ---------------------------------------------------------------------------------------------------------------


async def test_a_gate_is_reserved_for_who_needs_much_and_not_for_who_waits_longest(db: AsyncConnection) -> None:
    await one_task(db, "light", pool("db"))
    await one_task(db, "heavy", pool("db", 2))
    runner = await Runner.join(db)
    for _ in range(2):
        await start(db, "light")
    first, second = await runner.claim()
    light = await start(db, "light")
    await set_clock(db, later(1))
    heavy = await start(db, "heavy")
    await set_clock(db, later(70))
    await runner.finish(first)
    assert [await state(db, run) for run in (light, heavy)] == ["pending", "pending"]
    await runner.finish(second)
    assert [await state(db, run) for run in (light, heavy)] == ["available", "pending"], "with room for both, by age"


async def test_who_needs_more_than_there_is_reserves_nothing(db: AsyncConnection) -> None:
    await one_task(db, "light", pool("db"))
    await one_task(db, "heavy", pool("db", 2))
    await set_pool(db, name="db", slots=1, actor=Actor("test"))
    heavy = await start(db, "heavy")
    await set_clock(db, later(100))
    light = await start(db, "light")
    assert [await state(db, run) for run in (heavy, light)] == ["pending", "available"]


async def test_who_waits_at_another_gate_reserves_nothing_here(db: AsyncConnection) -> None:
    runner = await Runner.join(db)
    await set_pool(db, name="other", slots=2, actor=Actor("test"))
    await one_task(db, "light", pool("db"))
    await one_task(db, "elsewhere", pool("other", 2))
    for name in ("light", "light", "elsewhere", "elsewhere"):
        await start(db, name)
    (first, *_) = await runner.claim()
    await set_clock(db, later(100))
    waiting = await start(db, "light")
    assert await state(db, waiting) == "pending"
    await runner.finish(first)
    assert await state(db, waiting) == "available"


# Pools ------------------------------------------------------------------------------------------------------------------


async def test_a_pool_for_which_somebody_waits_is_in_use(db: AsyncConnection) -> None:
    await one_task(db, "a", pool("db"))
    await set_pool(db, name="db", slots=0, actor=Actor("test"))
    await start(db, "a")
    await one_task(db, "a")
    with pytest.raises(Conflict, match="is in use"):
        await delete_pool(db, name="db", actor=Actor("test"))


async def test_a_pool_that_is_just_being_taken_is_not_deleted(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    actor, holder = pair
    await set_pool(actor, name="db", slots=1, actor=Actor("test"))
    await one_task(actor, "a", pool("db"))
    await one_task(actor, "b")
    async with holder.transaction():
        await start(holder, "a")
        # It needs the pool no more once it is published anew; but its run does.
        await holder.execute("delete from task_gate where kind = 'pool'")
        deleting = asyncio.ensure_future(delete_pool(actor, name="db", actor=Actor("test")))
        query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        await eventually(lambda: value(holder, query, actor.info.backend_pid))
    with pytest.raises(Conflict, match="is in use"):
        await deleting


# Locks ------------------------------------------------------------------------------------------------------------------


async def test_whoever_enters_waits_for_the_gate(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    actor, holder = pair
    await one_task(actor, "a", mutex("k"))
    await start(actor, "a")
    await actor.execute(PATIENCE)
    async with holder.transaction():
        await locked(holder, "k")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await start(actor, "a")


async def test_a_key_that_two_make_at_once_is_one(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    actor, holder = pair
    await one_task(actor, "a", mutex("k"))
    async with holder.transaction():
        first = await start(holder, "a")
        starting = asyncio.ensure_future(start(actor, "a"))
        query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        await eventually(lambda: value(holder, query, actor.info.backend_pid))
    second = await starting
    assert [await state(actor, run) for run in (first, second)] == ["available", "pending"]
    await sound(actor)


@pytest.mark.parametrize("is_later", [True, False])
async def test_a_line_takes_the_locks_of_all_its_gates(
    pair: tuple[AsyncConnection, AsyncConnection], is_later: bool
) -> None:
    """One that comes later in the order is waited for; an earlier one is only tried, and the leader comes by again."""
    actor, holder = pair
    leader, runner = await lead(actor), await Runner.join(actor)
    for name in ("early", "late"):
        await set_pool(actor, name=name, slots=1, actor=Actor("test"))
    mine, other = ("early", "late") if is_later else ("late", "early")
    await one_task(actor, "mine", pool(mine))
    await one_task(actor, "both", pool("early"), pool("late"))
    await start(actor, "mine")
    waiting = await start(actor, "both")
    (claim,) = await runner.claim()
    await actor.execute(PATIENCE)
    async with holder.transaction():
        await locked(holder, other)
        if is_later:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await runner.finish(claim)
        else:
            await runner.finish(claim)
            assert await state(actor, waiting) == "pending"
            assert await value(actor, "select needs_admission from gate where name = %s", mine) is True
    if is_later:
        await runner.finish(claim)
    else:
        await admit_gated_tasks(actor, shard=0, epoch=leader, limit=10)
    assert await state(actor, waiting) == "available"
    await sound(actor)


async def test_a_slot_that_somebody_is_just_taking_is_not_taken_twice(
    pair: tuple[AsyncConnection, AsyncConnection],
) -> None:
    """What a line finds free is looked at under the lock, not before it."""
    actor, holder = pair
    runner = await Runner.join(actor)
    for name in ("early", "late"):
        await set_pool(actor, name=name, slots=1, actor=Actor("test"))
    await one_task(actor, "mine", pool("early"))
    await one_task(actor, "both", pool("early"), pool("late"))
    await one_task(actor, "other", pool("late"))
    await start(actor, "mine")
    waiting = await start(actor, "both")
    (claim,) = await runner.claim()
    async with holder.transaction():
        await start(holder, "other")
        finishing = asyncio.ensure_future(runner.finish(claim))
        query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        await eventually(lambda: value(holder, query, actor.info.backend_pid))
    await finishing
    assert await state(actor, waiting) == "pending"
    assert await value(actor, "select used from gate where name = 'late'") == 1
    await sound(actor)


async def test_who_is_just_being_taken_away_is_passed_by(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    actor, holder = pair
    runner = await Runner.join(actor)
    await one_task(actor, "a", mutex("k"))
    _, second, third = [await start(actor, "a") for _ in range(3)]
    (claim,) = await runner.claim()
    await actor.execute(PATIENCE)
    async with holder.transaction(force_rollback=True):
        await holder.execute("delete from gate_waiter where run_id = %s", [second])
        await runner.finish(claim)
        assert [await state(actor, run) for run in (second, third)] == ["pending", "available"]


@pytest.mark.parametrize("verb", ["tend", "unadmit"])
async def test_the_leader_passes_by_runs_that_somebody_works_on(
    pair: tuple[AsyncConnection, AsyncConnection], verb: str
) -> None:
    actor, holder = pair
    leader = await lead(actor)
    await one_task(actor, "a", mutex("k"), task_queue="gpu")
    await one_task(actor, "b", mutex("j"), task_queue="gpu")
    busy, free = await start(actor, "a"), await start(actor, "b")
    await set_clock(actor, later(100))
    if verb == "tend":
        assert await release_admissions(actor, shard=0, epoch=leader, grace=60, limit=10) == 2
        await Runner.join(actor, queues=("gpu",))
    await actor.execute(PATIENCE)
    async with holder.transaction():
        await holder.execute("select from run_status where run_id = %s for no key update", [busy])
        if verb == "tend":
            assert (await admit_gated_tasks(actor, shard=0, epoch=leader, limit=10)).admitted == 1
            assert [await state(actor, run) for run in (busy, free)] == ["pending", "available"]
        else:
            assert await release_admissions(actor, shard=0, epoch=leader, grace=60, limit=10) == 1
            assert [await state(actor, run) for run in (busy, free)] == ["available", "pending"]
    await sound(actor)


async def test_reconcile_passes_by_gates_that_somebody_works_on(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    actor, holder = pair
    leader = await lead(actor)
    for name in ("x", "y"):
        await set_pool(actor, name=name, slots=5, actor=Actor("test"))
    await one_task(actor, "a", pool("x"), pool("y"))
    run = await start(actor, "a")
    await cancel(actor, run_id=run, actor=Actor("test"))
    await actor.execute("update gate set used = 1")
    await actor.execute(
        "insert into gate_holder select %s, 0, -1, array_agg(gate_id), array[1, 1], clock() from gate", [run]
    )
    await actor.execute("update gate set used = 3 where name = 'x'")
    await actor.execute(PATIENCE)
    async with holder.transaction():
        await locked(holder, "y")
        assert (await reconcile_gates(actor, shard=0, epoch=leader, after=0, limit=10)).drifted == 1
        cursor = await actor.execute("select name, used from gate order by name")
        assert await cursor.fetchall() == [("x", 1), ("y", 1)], "a hold goes with all of its gates, or not at all"
    await reconcile_gates(actor, shard=0, epoch=leader, after=0, limit=10)
    assert await value(actor, "select sum(used) from gate") == 0
    assert await value(actor, "select count(*) from gate_holder") == 0


async def test_reconcile_goes_from_slice_to_slice(db: AsyncConnection) -> None:
    leader = await lead(db)
    for name in ("x", "y", "z"):
        await set_pool(db, name=name, slots=5, actor=Actor("test"))
    await db.execute("update gate set used = 1")
    after: int | None = 0
    found, steps = 0, 0
    while after is not None:
        done = await reconcile_gates(db, shard=0, epoch=leader, after=after, limit=1)
        after, found, steps = done.last_gate_id, found + done.drifted, steps + 1
        assert done.drifted <= 1 and steps < 10
    assert (found, await value(db, "select sum(used) from gate")) == (4, 0)


# What the tables refuse ---------------------------------------------------------------------------------------------------

_GATE = "insert into task_gate (version_id, idx, place, kind, name, parts, weight, capacity, version, period) values "


@pytest.mark.parametrize(
    "statement",
    [
        "insert into gate (kind, name, capacity) values ('pool', 'x', -1)",
        _GATE + "(1, 0, 0, 'pool', 'x', null, 0, null, null, null)",
        _GATE + "(1, 0, 0, 'key', 'x', null, 1, 0, null, null)",
        _GATE + "(1, 0, 0, 'pool', null, null, 1, null, null, null)",
        _GATE + "(1, 0, 0, 'pool', 'x', '[]', 1, null, null, null)",
        _GATE + "(1, 0, 0, 'order', 'x', null, 1, null, null, null)",
        _GATE + "(1, 0, 0, 'rate', 'x', null, 1, 1, null, null)",
        _GATE + "(1, 0, 0, 'rate', 'x', null, 1, 1, null, 0)",
    ],
)
async def test_the_tables_refuse_what_makes_no_sense(db: AsyncConnection, statement: str) -> None:
    with pytest.raises(CheckViolation):
        await db.execute(statement)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "statement",
    [
        "insert into gate (kind, name, capacity) values ('key', 'x', 1)",
        _GATE + "(1, 0, 0, 'pool', 'x', null, 1, null, null, null)",
        "insert into gate_holder values (1, 0, -1, '{}', '{}', clock())",
        "insert into gate_order values (1, 7, 1, 0, -1, clock())",
        "insert into rate_slot overriding system value values (1, '2030-01-01', 1)",
        "insert into gate_waiter overriding system value values (1, 0, 1, (select count(*) from gate_waiter), 0, -1, 1, clock())",
        "insert into gate_waiter values (1, 0, default, 1, 0, -1, 1, clock())",
        "insert into gate_order values (1, (select count(*) from gate_order), 1, 0, -1, clock())",
        "insert into gate_queue values (default, '{1}', '{1}', '{}', '{}', null, 1, 1, 0, 0, clock())",
    ],
)
async def test_the_tables_refuse_what_is_there(db: AsyncConnection, statement: str) -> None:
    await db.execute(statement)  # type: ignore[arg-type]
    with pytest.raises(UniqueViolation):
        await db.execute(statement)  # type: ignore[arg-type]
