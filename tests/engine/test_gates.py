"""Gates: pools, keys and limits hold, hand over at once, and are given back by whatever door a task leaves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags, gates
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.params import declare_params
from evertick.domain.errors import Conflict, InvalidDag, NotFound, PreconditionFailed, UserError
from evertick.domain.explain import describe
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause, unpause
from evertick.engine.gates import admit_gated_tasks, delete_pool, reconcile_gates, release_admissions, set_pool
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs, time_out_queued_tasks
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel, trigger_run
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, names_of, put, set_clock, start, states, value


def pool(name: str, slots: int = 1) -> GateSpec:
    return GateSpec(kind=GateKind.POOL, name=name, weight=slots)


def mutex(key: str, *, shared: bool = False) -> GateSpec:
    return GateSpec(kind=GateKind.MUTEX, name=key, weight=1 if shared else EXCLUSIVE)


async def one_task(conn: AsyncConnection, name: str, *needed: GateSpec, **options: object) -> None:
    options.setdefault("task_priority", 5)
    await put(conn, make_dag(name, {"t": []}, task_gates=needed, **options))


async def begin(conn: AsyncConnection, dag: str, **params: object) -> int:
    row = await dags.find(conn, dag)
    assert row is not None
    made = await trigger_run(conn, dag_id=row.dag_id, params=params, key=None, actor=Actor("test"))
    assert made is not None
    return made.run_id


async def used(conn: AsyncConnection) -> dict[str, int]:
    cursor = await conn.execute("select name, used from gate where used <> 0")
    return dict(await cursor.fetchall())


async def sound(conn: AsyncConnection) -> None:
    assert await invariants.gate_violations(conn) == []


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, later(0))
    await set_pool(conn, name="db", slots=2, actor=Actor("test"))
    return conn


@pytest.mark.requirement("D1", "D3", "D4")
async def test_a_pool_lets_in_as_many_as_it_has_slots(db: AsyncConnection) -> None:
    await one_task(db, "a", pool("db"))
    runs_made = [await start(db, "a") for _ in range(5)]
    runner = await Runner.join(db)
    first = await runner.claim()
    assert [claim.run_id for claim in first] == runs_made[:2]
    assert await used(db) == {"db": 2}
    # what is released goes to the next in the same step
    (third,), _ = await runner.step([(first[0], "success", {})], free=10)
    assert third.run_id == runs_made[2]
    await sound(db)
    while third is not None:
        claims, _ = await runner.step([(third, "success", {})], free=1)
        third = claims[0] if claims else None  # type: ignore[assignment]
    await runner.finish(first[1])
    assert await used(db) == {}
    await sound(db)


async def test_slots_are_weighted_and_a_heavy_head_blocks_nobody(db: AsyncConnection) -> None:
    await one_task(db, "light", pool("db"))
    await one_task(db, "heavy", pool("db", 2))
    runner = await Runner.join(db)
    await start(db, "light")
    heavy, light = await start(db, "heavy"), await start(db, "light")
    claims = await runner.claim()
    assert [claim.run_id for claim in claims] == [1, light]
    await runner.finish(claims[0])
    assert await runner.claim() == []
    await runner.finish(claims[1])
    (claim,) = await runner.claim()
    assert claim.run_id == heavy
    assert await used(db) == {"db": 2}
    await sound(db)


async def test_in_a_line_the_urgent_come_first_then_the_oldest(db: AsyncConnection) -> None:
    await one_task(db, "low", pool("db"), task_priority=1)
    await one_task(db, "high", pool("db"), task_priority=8)
    await one_task(db, "wide", pool("db", 2), task_priority=5)
    await set_pool(db, name="db", slots=0, actor=Actor("test"))
    made = [await start(db, name) for name in ("low", "low", "wide", "high", "high", "high")]
    await set_pool(db, name="db", slots=2, actor=Actor("test"))
    runner = await Runner.join(db)
    order = []
    claims = await runner.claim()
    while claims:
        order += [claim.run_id for claim in claims]
        claims, _ = await runner.step([(claim, "success", {}) for claim in claims], free=10)
    # Two of the urgent, the third; the wide one does not fit beside it, so a light one goes along; then the rest.
    assert order == [made[3], made[4], made[5], made[0], made[2], made[1]]
    await sound(db)


@pytest.mark.requirement("D1", "D4")
async def test_a_mutex_key_holds_across_dags_and_is_made_of_params(db: AsyncConnection) -> None:
    params = declare_params({"table": "x"})
    key = mutex("table:{params.table}")
    await one_task(db, "load", key, params=params)
    await one_task(db, "clean", key, params=params)
    a, b, c = (
        await begin(db, "load", table="orders"),
        await begin(db, "clean", table="orders"),
        await begin(db, "clean", table="users"),
    )
    runner = await Runner.join(db)
    claims = {claim.run_id: claim for claim in await runner.claim()}
    assert set(claims) == {a, c}
    assert await used(db) == {"table:orders": EXCLUSIVE, "table:users": EXCLUSIVE}
    (next_one,), _ = await runner.step([(claims[a], "failed", {"no_retry": True})], free=1)
    assert next_one.run_id == b
    await sound(db)


async def test_shared_holders_go_together_and_an_exclusive_one_alone(db: AsyncConnection) -> None:
    await one_task(db, "read", mutex("k", shared=True))
    await one_task(db, "write", mutex("k"))
    runner = await Runner.join(db)
    reads = [await start(db, "read") for _ in range(3)]
    write = await start(db, "write")
    claims = await runner.claim()
    assert [claim.run_id for claim in claims] == reads
    ends = [(claim, "success", {}) for claim in claims]
    (alone,), _ = await runner.step(ends, free=10)  # type: ignore[arg-type]
    assert alone.run_id == write
    late = await start(db, "read")
    assert await runner.claim() == []
    (reader,), _ = await runner.step([(alone, "success", {})], free=10)
    assert reader.run_id == late


@pytest.mark.requirement("D4")
async def test_limits_of_group_task_dag_and_key(db: AsyncConnection) -> None:
    group = GateSpec(kind=GateKind.GROUP, name="g", capacity=2)
    shape: Mapping[str, list[str]] = {f"g.t{i}": [] for i in range(4)}
    await put(db, make_dag("grouped", shape, task_gates=(group,), task_group="g"))
    await one_task(db, "single", GateSpec(kind=GateKind.TASK, name="", capacity=1))
    await put(db, make_dag("narrow", {f"t{i}": [] for i in range(3)}, max_active_tasks=2))
    await one_task(db, "api", GateSpec(kind=GateKind.KEY, name="host", capacity=3))
    for name in ["grouped", "grouped", "single", "single", "narrow", *["api"] * 5]:
        await start(db, name)
    runner = await Runner.join(db)
    counts: dict[str, int] = {}
    for claim in await runner.claim():
        dag = str(await value(db, "select d.name from run r join dag d using (dag_id) where run_id = %s", claim.run_id))
        counts[dag] = counts.get(dag, 0) + 1
    assert counts == {"grouped": 4, "single": 1, "narrow": 2, "api": 3}
    await sound(db)


async def test_all_or_nothing_and_a_line_waits_for_one_gate_only(db: AsyncConnection) -> None:
    await set_pool(db, name="db", slots=1, actor=Actor("test"))
    await one_task(db, "both", pool("db"), mutex("k"))
    await one_task(db, "poolish", pool("db"))
    await one_task(db, "keyed", mutex("k"))
    runner = await Runner.join(db)
    keyed = await start(db, "keyed")
    both = await start(db, "both")
    poolish = await start(db, "poolish")
    claims = {claim.run_id: claim for claim in await runner.claim()}
    assert set(claims) == {keyed, poolish}, "what waits for the key holds no slot of the pool"
    claims_now, _ = await runner.step([(claims[keyed], "success", {})], free=5)
    assert claims_now == []
    ((claim,), _) = await runner.step([(claims[poolish], "success", {})], free=5)
    assert claim.run_id == both
    await runner.finish(claim)
    assert await used(db) == {}
    await sound(db)


async def doors(name: str, conn: AsyncConnection, run: int, runner: Runner, leader: int) -> None:
    """Ways by which a task that holds a gate stops holding it."""
    match name:
        case "cancel":
            await cancel(conn, run_id=run, actor=Actor("test"))
        case "mark":
            await mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("test"))
        case "pause":
            await pause(conn, dag="a", actor=Actor("test"))
        case "queue_timeout":
            await set_clock(conn, later(100))
            await time_out_queued_tasks(conn, shard=0, epoch=leader, limit=100)
        case "unadmit":
            await set_clock(conn, later(100))
            await conn.execute("update runner set ended_at = '2030-01-01'")
            assert await release_admissions(conn, shard=0, epoch=leader, grace=60, limit=100) == 1
        case _:
            (claim,) = await runner.claim(1)
            assert claim.run_id == run
            if name == "lost":
                await mark_runner_dead(conn, session=runner.session, reason="agent_lost: test", infra_retries=0)
            elif name == "cancel_running":
                await cancel(conn, run_id=run, actor=Actor("test"))
                assert await used(conn) == {"k": EXCLUSIVE}, "it holds the key until its body is dead"
                await runner.finish(claim, "killed")
            elif name == "retry_later":
                await runner.finish(claim, "failed", retry_in=50)
            else:
                await runner.finish(claim, name, no_retry=True)


@pytest.mark.parametrize(
    "door",
    ["success", "failed", "skipped", "retry_later", "given_back", "lost", "cancel", "cancel_running", "mark", "pause",
     "queue_timeout", "unadmit"],
)  # fmt: skip
async def test_whatever_door_a_task_leaves_by_the_next_one_is_let_in(db: AsyncConnection, door: str) -> None:
    leader = await lead(db)
    runner = await Runner.join(db)
    retry = RetryPolicy(retries=1)
    await one_task(db, "a", mutex("k"), task_retry=retry, task_queue_timeout_seconds=50.0)
    await one_task(db, "b", mutex("k"))
    first, second = await start(db, "a"), await start(db, "b")
    assert (await states(db, second))["t"] == "pending"
    await doors(door, db, first, runner, leader)
    assert (await states(db, second))["t"] == "available"
    assert await used(db) == {"k": EXCLUSIVE}
    await sound(db)


@pytest.mark.parametrize("verb", ["cancel", "mark", "pause"])
async def test_a_waiting_task_can_be_taken_out_of_its_line(db: AsyncConnection, verb: str) -> None:
    await one_task(db, "a", mutex("k"))
    await one_task(db, "b", mutex("k"))
    await start(db, "b")
    waiting = await start(db, "a")
    leader, runner = await lead(db), await Runner.join(db)
    await doors(verb, db, waiting, runner, leader)
    await sound(db)
    (claim,) = await runner.claim()
    assert (await runner.step([(claim, "success", {})], free=5))[0] == []
    assert await used(db) == {}
    if verb == "pause":
        await unpause(db, dag="a", actor=Actor("test"))
        assert [claim.run_id for claim in await runner.claim()] == [waiting]
    await sound(db)


async def test_a_retry_and_a_clear_pass_the_gates_again(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    await one_task(db, "a", mutex("k"), task_retry=RetryPolicy(retries=1))
    first, second = await start(db, "a"), await start(db, "a")
    (claim,) = await runner.claim()
    claims, _ = await runner.step([(claim, "failed", {"retry_in": 5})], free=5)
    assert [each.run_id for each in claims] == [second]
    await set_clock(db, later(10))
    await promote_due_tasks(db, shard=0, epoch=leader, limit=100)
    assert (await states(db, first))["t"] == "pending"
    await sound(db)
    claims, _ = await runner.step([(claims[0], "success", {})], free=5)
    assert [each.run_id for each in claims] == [first]
    await clear(db, run_id=second, chosen=await select_tasks(db, run_id=second), actor=Actor("test"))
    assert (await states(db, second))["t"] == "pending"
    claims, _ = await runner.step([(claims[0], "success", {})], free=5)
    assert [each.run_id for each in claims] == [second]
    await sound(db)


async def test_a_lowered_pool_lets_work_finish_and_nothing_new_in(db: AsyncConnection) -> None:
    await one_task(db, "a", pool("db"))
    made = [await start(db, "a") for _ in range(4)]
    runner = await Runner.join(db)
    claims = await runner.claim()
    await set_pool(db, name="db", slots=1, actor=Actor("test"))
    assert [row.used for row in await gates.list_gates(db, kinds=["pool"])] == [2]
    assert (await runner.step([(claims[0], "success", {})], free=5))[0] == []
    (third,), _ = await runner.step([(claims[1], "success", {})], free=5)
    assert third.run_id == made[2]
    await set_pool(db, name="db", slots=2, actor=Actor("test"))
    assert [claim.run_id for claim in await runner.claim()] == [made[3]]
    await sound(db)


async def test_what_was_taken_back_for_want_of_a_runner_comes_again_with_one(db: AsyncConnection) -> None:
    leader = await lead(db)
    await one_task(db, "a", mutex("k"), task_queue="gpu")
    run = await start(db, "a")
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 0
    await set_clock(db, later(61))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 1
    assert (await states(db, run))["t"] == "pending"
    assert await used(db) == {}
    await sound(db)
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)).admitted == 0
    assert (await reconcile_runs(db, shard=0, epoch=leader, limit=100)).repaired == []
    runner = await Runner.join(db, queues=("gpu",))
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)).admitted == 1
    assert [claim.run_id for claim in await runner.claim(queues=("gpu",))] == [run]
    await sound(db)


async def test_reconcile_adds_up_again_and_deletes_what_nobody_needs(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    await one_task(db, "a", pool("db"), mutex("k"))
    first, second = await start(db, "a"), await start(db, "a")
    done = await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert (done.drifted, done.admitted, done.last_gate_id) == (0, 0, None)
    (claim,) = await runner.claim()
    # somebody wrote to the tables: counters too high, a hold without its task
    await db.execute("update gate set used = used + 1 where kind = 'pool'")
    await db.execute("insert into gate_holder select %s, 0, -1, gate_ids, weights, since from gate_holder", [second])
    done = await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert done.drifted == 1
    assert await used(db) == {"db": 1, "k": EXCLUSIVE}
    await sound(db)
    # a counter too low, and a release that nobody noticed
    await db.execute("delete from gate_holder where run_id = %s", [first])
    await db.execute("update gate set used = 0")
    done = await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert (done.drifted, done.admitted) == (0, 1)
    (again,) = await runner.claim()
    assert again.run_id == second
    await runner.step([(claim, "success", {}), (again, "success", {})])
    await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert [(row.kind, row.name) for row in await gates.list_gates(db, kinds=["pool", "mutex"])] == [("pool", "db")]


async def test_a_key_that_was_deleted_meanwhile_is_made_again(db: AsyncConnection) -> None:
    leader = await lead(db)
    runner = await Runner.join(db)
    await one_task(db, "a", mutex("k"))
    for _ in range(3):
        run = await start(db, "a")
        (claim,) = await runner.claim()
        assert claim.run_id == run
        await runner.finish(claim)
        await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert await value(db, "select count(*) from gate where kind = 'mutex'") == 0


async def test_who_holds_and_who_waits_is_shown_in_order(db: AsyncConnection) -> None:
    await one_task(db, "a", pool("db", 2))
    made = [await start(db, "a") for _ in range(3)]
    (row,) = await gates.list_gates(db, kinds=["pool"])
    assert (row.used, row.slots, row.holders, row.waiters) == (2, 2, 1, 2)
    assert [(each.run_id, each.weight, each.state) for each in await gates.holders(db, row.gate_id)] == [
        (made[0], 2, "available")
    ]
    assert [each.run_id for each in await gates.waiters(db, row.gate_id)] == made[1:]


async def test_bad_pools_are_refused_with_the_reason(db: AsyncConnection) -> None:
    with pytest.raises(InvalidDag, match=r"did you mean 'db'.*pools set dbb"):
        await one_task(db, "a", pool("dbb"))
    with pytest.raises(InvalidDag, match="needs 3 slots of pool 'db', which has 2"):
        await one_task(db, "a", pool("db", 3))
    with pytest.raises(UserError, match="cannot have -1 slots"):
        await set_pool(db, name="db", slots=-1, actor=Actor("test"))
    with pytest.raises(UserError, match="is not a valid name for a pool"):
        await set_pool(db, name="a b", slots=1, actor=Actor("test"))
    with pytest.raises(NotFound, match="Did you mean 'db'"):
        await delete_pool(db, name="dbb", actor=Actor("test"))
    await one_task(db, "a", pool("db"))
    with pytest.raises(Conflict, match="DAG 'a' needs pool 'db'"):
        await delete_pool(db, name="db", actor=Actor("test"))
    run = await start(db, "a")
    with pytest.raises(Conflict, match="is in use"):
        await delete_pool(db, name="db", actor=Actor("test"))
    await cancel(db, run_id=run, actor=Actor("test"))
    await one_task(db, "a")
    await delete_pool(db, name="db", actor=Actor("test"))
    assert await gates.list_gates(db, kinds=["pool"]) == []


async def test_a_pool_is_changed_and_deleted_only_at_the_revision_that_was_read(db: AsyncConnection) -> None:
    (before,) = await gates.list_gates(db, kinds=["pool"])
    await set_pool(db, name="db", slots=before.slots, actor=Actor("test"))
    assert (await gates.list_gates(db, kinds=["pool"]))[0].revision == before.revision
    await set_pool(db, name="db", slots=5, actor=Actor("test"), revision=before.revision)
    for stale in (before.revision, "x"):
        with pytest.raises(PreconditionFailed, match="has changed"):
            await set_pool(db, name="db", slots=7, actor=Actor("test"), revision=stale)
        with pytest.raises(PreconditionFailed, match="has changed"):
            await delete_pool(db, name="db", actor=Actor("test"), revision=stale)
    with pytest.raises(PreconditionFailed):
        await set_pool(db, name="other", slots=7, actor=Actor("test"), revision=before.revision)
    (now,) = await gates.list_gates(db, kinds=["pool"])
    assert now.slots == 5 and now.revision != before.revision
    await delete_pool(db, name="db", actor=Actor("test"), revision=now.revision)
    assert await gates.list_gates(db, kinds=["pool"]) == []


async def test_successors_enter_their_gates_in_the_transaction_that_readied_them(db: AsyncConnection) -> None:
    gated = {"b": {"gates": (mutex("k"),)}, "c": {"gates": (mutex("k"),)}}
    await put(db, make_dag("flow", {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}, per_task=gated))
    run = await start(db, "flow")
    runner = await Runner.join(db)
    (a,) = await runner.claim()
    (b,), _ = await runner.step([(a, "success", {})], free=5)
    assert await names_of(db, [b]) == ["b"]
    assert (await states(db, run))["c"] == "pending"
    (c,), _ = await runner.step([(b, "success", {})], free=5)
    (d,), _ = await runner.step([(c, "success", {})], free=5)
    assert await names_of(db, [c, d]) == ["c", "d"]
    await sound(db)


async def test_a_run_with_hundreds_of_gates_begins_at_once(db: AsyncConnection) -> None:
    """Each of its tasks has a gate of its own: they are let in as one, and given back as one."""
    own = {f"t{i}": {"gates": (mutex(f"k{i}"), pool("db"))} for i in range(600)}
    await set_pool(db, name="db", slots=450, actor=Actor("test"))
    await put(db, make_dag("wide", {name: [] for name in own}, per_task=own))
    run = await start(db, "wide")
    assert await value(db, "select count(*) from task where run_id = %s and state = 'available'", run) == 450
    runner = await Runner.join(db)
    assert len(await runner.drain(batch=500)) == 600
    assert await used(db) == {}
    await sound(db)


async def test_what_one_transaction_leaves_over_the_leader_lets_in(db: AsyncConnection) -> None:
    """A gate with more lines than one transaction looks at is marked, and the mark goes with what was left."""
    leader, runner = await lead(db), await Runner.join(db)
    own = {f"t{i}": {"gates": (mutex(f"k{i}"), pool("db"))} for i in range(700)}
    await put(db, make_dag("wide", {name: [] for name in own}, per_task=own))
    await set_pool(db, name="db", slots=0, actor=Actor("test"))
    await start(db, "wide")
    await set_pool(db, name="db", slots=1000, actor=Actor("test"))
    assert (await used(db))["db"] == 500
    assert await value(db, "select needs_admission from gate where name = 'db'") is True
    assert (await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)).admitted == 200
    assert await value(db, "select needs_admission from gate where name = 'db'") is False
    assert len(await runner.claim(1000)) == 700
    await sound(db)


async def test_after_a_minute_the_oldest_that_needs_many_slots_reserves_them(db: AsyncConnection) -> None:
    """Until then those who need less go before it, whenever they fit."""
    await one_task(db, "light", pool("db"))
    await one_task(db, "heavy", pool("db", 2))
    runner = await Runner.join(db)
    await start(db, "light")
    heavy = await start(db, "heavy")
    await start(db, "light")
    first, second = await runner.claim()
    waiting = await start(db, "light")
    await set_clock(db, later(59))
    (third,), _ = await runner.step([(first, "success", {})], free=5)
    assert third.run_id == waiting
    late = await start(db, "light")
    await set_clock(db, later(61))
    assert (await runner.step([(second, "success", {})], free=5))[0] == []
    reason = (await gates.explain_task(db, TaskKey(late, 0, -1)))[0]
    assert (
        "pool db is reserved for heavy.t of run" in describe(reason)
        and reason.detail["reserved_for"]["run_id"] == heavy
    )
    ((claim,), _) = await runner.step([(third, "success", {})], free=5)
    assert claim.run_id == heavy
    ((claim,), _) = await runner.step([(claim, "success", {})], free=5)
    assert claim.run_id == late
    await sound(db)


@pytest.mark.parametrize("verb", ["cancel", "mark", "pause"])
async def test_what_was_reserved_for_a_task_that_is_taken_away_goes_to_the_next(db: AsyncConnection, verb: str) -> None:
    await one_task(db, "light", pool("db"))
    await one_task(db, "a", pool("db", 2))
    leader, runner = await lead(db), await Runner.join(db)
    await start(db, "light")
    heavy = await start(db, "a")
    await set_clock(db, later(61))
    light = await start(db, "light")
    assert (await states(db, light))["t"] == "pending"
    await doors(verb, db, heavy, runner, leader)
    assert (await states(db, light))["t"] == "available"
    await sound(db)


async def test_a_task_of_a_backfill_that_is_taken_back_stays_behind_the_others(db: AsyncConnection) -> None:
    """Whatever its own priority: as it stood in line."""
    leader = await lead(db)
    await one_task(db, "low", mutex("k"), task_priority=2)
    await one_task(db, "past", mutex("j"), task_priority=9)
    low, past = await start(db, "low"), await start(db, "past")
    await db.execute("update run set kind = 'backfill' where run_id = %s", [past])
    await set_clock(db, later(61))
    assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 2
    cursor = await db.execute("select run_id, rank from gate_waiter order by run_id")
    assert await cursor.fetchall() == [(low, 7), (past, 9)]
