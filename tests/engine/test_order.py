"""Ordered keys: a version becomes available only when no smaller one is pending, available, queued or running (D5)."""

from __future__ import annotations

import asyncio
import random

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import gates
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.params import declare_params
from evertick.domain.errors import InvalidParams
from evertick.domain.explain import describe
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause, unpause
from evertick.engine.gates import admit_gated_tasks, reconcile_gates, release_admissions, set_pool
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs, time_out_queued_tasks
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel, trigger
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start, states, value

PARAMS = declare_params({"account": "a", "seq": 0})
ORDER = GateSpec(kind=GateKind.ORDER, name="account:{params.account}", version="{params.seq}")

KEY = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)


async def ordered(conn: AsyncConnection, name: str = "a", *also: GateSpec, **options: object) -> None:
    await put(conn, make_dag(name, {"t": []}, task_gates=(ORDER, *also), params=PARAMS, **options))


async def begin(conn: AsyncConnection, seq: int, dag: str = "a", account: str = "a") -> int:
    return (await trigger(conn, dag=dag, params={"seq": seq, "account": account}, actor=Actor("test"))).run_id


async def state(conn: AsyncConnection, run: int) -> str:
    return (await states(conn, run))["t"]


async def sound(conn: AsyncConnection) -> None:
    assert await invariants.gate_violations(conn) == []


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, later(0))
    return conn


@pytest.mark.requirement("D1", "D5")
async def test_smaller_versions_go_first_whatever_the_order_in_which_they_come(db: AsyncConnection) -> None:
    await ordered(db)
    await ordered(db, "b")
    runner = await Runner.join(db)
    first = await begin(db, 5)
    made = {seq: await begin(db, seq, dag) for seq, dag in ((9, "a"), (7, "b"), (8, "a"), (6, "b"))}
    other, behind = await begin(db, 8, account="other"), await begin(db, 9, account="other")
    claims = await runner.claim()
    assert [claim.run_id for claim in claims] == [first, other], "the one that was there, and another key's"
    order: list[int] = []
    claim = claims[0]
    while True:
        found, _ = await runner.step([(claim, "success", {})], free=5)
        await sound(db)
        if not found:
            break
        (claim,) = found
        order.append(claim.run_id)
    assert order == [made[seq] for seq in (6, 7, 8, 9)]
    assert await state(db, behind) == "pending", "the same version of another key is another line"
    await runner.finish(claims[1])
    assert await state(db, behind) == "available"
    assert await value(db, "select count(*) from gate_order") == 1


@pytest.mark.requirement("D5")
async def test_equal_versions_go_together(db: AsyncConnection) -> None:
    await ordered(db)
    runner = await Runner.join(db)
    first = await begin(db, 1)
    twos = [await begin(db, 2), await begin(db, 2)]
    (claim,) = await runner.claim()
    assert claim.run_id == first
    claims, _ = await runner.step([(claim, "success", {})], free=5)
    assert [each.run_id for each in claims] == twos
    third, fourth = await begin(db, 2), await begin(db, 3)
    assert [await state(db, run) for run in (third, fourth)] == ["available", "pending"]
    await sound(db)


@pytest.mark.requirement("D5")
async def test_versions_of_a_dag_that_starts_all_at_once(db: AsyncConnection) -> None:
    """Numbers that the tasks themselves have, in one transaction: only the smallest gets in."""
    own = {f"v{n}": {"gates": (GateSpec(kind=GateKind.ORDER, name="schema", version=n),)} for n in (3, 1, 2, 2**63 - 1)}
    await put(db, make_dag("migrate", {name: [] for name in own}, per_task=own))
    await start(db, "migrate")
    assert await (await Runner.join(db)).drain() == ["v1", "v2", "v3", f"v{2**63 - 1}"]
    await sound(db)


@pytest.mark.requirement("D5")
@pytest.mark.parametrize("way", ["retry_later", "pause", "unadmit", "pool", "given_back", "lost"])
async def test_who_has_a_place_keeps_it_while_it_waits(db: AsyncConnection, way: str) -> None:
    """It is pending again, for whatever reason: larger versions of the key stay behind it, of paused DAGs, too."""
    await set_pool(db, name="db", slots=1, actor=Actor("test"))
    pool = (GateSpec(kind=GateKind.POOL, name="db"),) if way == "pool" else ()
    await ordered(db, "a", *pool, task_retry=RetryPolicy(retries=1))
    await ordered(db, "b")
    leader, runner = await lead(db), await Runner.join(db)
    if way == "pool":
        await set_pool(db, name="db", slots=0, actor=Actor("test"))
    first, second = await begin(db, 1), await begin(db, 2, "b")
    if way in ("retry_later", "given_back", "lost"):
        (claim,) = await runner.claim()
        if way == "lost":
            await mark_runner_dead(db, session=runner.session, reason="agent_lost: test", infra_retries=3)
            runner = await Runner.join(db)
        else:
            await runner.finish(claim, "failed" if way == "retry_later" else way, retry_in=50)
    elif way == "pause":
        await pause(db, dag="a", actor=Actor("test"))
    elif way == "unadmit":
        await db.execute("update runner set ended_at = clock()")
        await set_clock(db, later(100))
        assert await release_admissions(db, shard=0, epoch=leader, grace=60, limit=10) == 1
        runner = await Runner.join(db)
    assert await state(db, second) == "pending"
    await sound(db)
    kind = (await gates.explain_task(db, TaskKey(second, 0, -1)))[0]
    assert (kind.detail["gate"], kind.detail["smaller"][0]["run_id"]) == ("order", first)
    await set_clock(db, later(200))
    await promote_due_tasks(db, shard=0, epoch=leader, limit=10)
    await unpause(db, dag="a", actor=Actor("test"))
    await set_pool(db, name="db", slots=1, actor=Actor("test"))
    await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    (claim,) = await runner.claim()
    assert claim.run_id == first
    ((claim,), _) = await runner.step([(claim, "success", {})], free=5)
    assert claim.run_id == second
    await sound(db)


@pytest.mark.requirement("D5")
async def test_one_that_becomes_pending_in_a_pause_has_its_place(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"up": [], "t": ["up"]}, per_task={"t": {"gates": (ORDER, KEY)}}, params=PARAMS))
    await ordered(db, "b")
    runner = await Runner.join(db)
    first = await begin(db, 1)
    (up,) = await runner.claim()
    await pause(db, dag="a", actor=Actor("test"))
    await runner.finish(up)
    assert await state(db, first) == "pending"
    second = await begin(db, 2, "b")
    assert await state(db, second) == "pending"
    await sound(db)
    assert await value(db, "select array_agg(kind::text) from gate") == ["order"], "nothing else was looked at"
    await unpause(db, dag="a", actor=Actor("test"))
    assert [await state(db, run) for run in (first, second)] == ["available", "pending"]
    await sound(db)


@pytest.mark.requirement("D5")
@pytest.mark.parametrize("door", ["success", "failed", "skipped", "cancel", "cancel_waiting", "mark", "mark_waiting",
                                  "queue_timeout", "cancel_paused"])  # fmt: skip
async def test_whatever_ends_a_version_the_next_one_is_let_in(db: AsyncConnection, door: str) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    await ordered(db, task_queue_timeout_seconds=50.0)
    await ordered(db, "b", KEY)
    if door.endswith("_waiting"):
        await put(db, make_dag("k", {"t": []}, task_gates=(KEY,)))
        await start(db, "k")
    first, second = await begin(db, 1, "b" if door.endswith("_waiting") else "a"), await begin(db, 2, "a")
    assert await state(db, second) == "pending"
    match door:
        case "cancel" | "cancel_waiting":
            await cancel(db, run_id=first, actor=Actor("test"))
        case "cancel_paused":
            await pause(db, dag="a", actor=Actor("test"))
            assert await value(db, "select count(*) from gate_holder") == 0
            await cancel(db, run_id=first, actor=Actor("test"))
            await unpause(db, dag="a", actor=Actor("test"))
        case "mark" | "mark_waiting":
            await mark(db, TaskKey(first, 0, -1), state="skipped", actor=Actor("test"))
        case "queue_timeout":
            await set_clock(db, later(100))
            await time_out_queued_tasks(db, shard=0, epoch=leader, limit=100)
        case _:
            (claim,) = await runner.claim(1)
            await runner.finish(claim, door, no_retry=True)
    assert await state(db, second) == "available"
    await sound(db)


@pytest.mark.requirement("D5")
async def test_a_clear_takes_its_place_again(db: AsyncConnection) -> None:
    await ordered(db)
    runner = await Runner.join(db)
    first = await begin(db, 1)
    (claim,) = await runner.claim()
    await runner.finish(claim)
    second, third = await begin(db, 2), await begin(db, 3)
    (running,) = await runner.claim()
    assert running.run_id == second
    await clear(db, run_id=first, chosen=await select_tasks(db, run_id=first), actor=Actor("test"))
    assert await state(db, first) == "available", "the larger one was let in before there was a smaller one"
    # One that is asked to start anew while it runs stays on the key, too.
    await clear(db, run_id=second, chosen=await select_tasks(db, run_id=second), actor=Actor("test"))
    await runner.finish(running, "killed")
    assert [await state(db, run) for run in (first, second, third)] == ["available", "pending", "pending"]
    assert await value(db, "select count(*) from gate_order") == 3
    await sound(db)


async def test_why_and_keys_name_the_smaller_version(db: AsyncConnection) -> None:
    await ordered(db)
    first, second, third = await begin(db, 10), await begin(db, 20), await begin(db, 30)
    await Runner.join(db)
    (reason,) = await gates.explain_task(db, TaskKey(third, 0, -1))
    assert reason.detail["ahead"] == 2
    assert [each["version"] for each in reason.detail["smaller"]] == [10, 20]
    text = describe(reason)
    assert f"version 30 on key account:a waits for version 10: a.t of run {first} (available)" in text
    (row,) = await gates.list_gates(db, kinds=["order"])
    assert (row.name, row.version, row.holders, row.waiters) == ("account:a", 10, 1, 2)
    assert [(each.run_id, each.weight) for each in await gates.holders(db, row.gate_id)] == [(first, 10)]
    assert [(each.run_id, each.weight) for each in await gates.waiters(db, row.gate_id)] == [(second, 20), (third, 30)]
    (blocked,) = await gates.blocked(db, limit=10)
    assert (blocked.name, blocked.waiting, blocked.detail["smaller"][0]["run_id"]) == ("order account:a", 2, first)


async def test_a_place_without_its_task_is_dropped_and_counted(db: AsyncConnection) -> None:
    leader, runner = await lead(db), await Runner.join(db)
    await ordered(db)
    first = await begin(db, 1)
    (claim,) = await runner.claim()
    await runner.finish(claim)
    await db.execute("insert into gate_order select gate_id, 1, %s, 0, -1, clock() from gate", [first])
    second = await begin(db, 2)
    assert await state(db, second) == "pending"
    done = await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert (done.drifted, done.admitted, await state(db, second)) == (1, 1, "available")
    # A key that somebody has a place on is not deleted, also if nobody is in line or holds something.
    await pause(db, dag="a", actor=Actor("test"))
    assert (await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)).drifted == 0
    assert await value(db, "select count(*) from gate_order join gate using (gate_id)") == 1
    await cancel(db, run_id=second, actor=Actor("test"))
    await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert await value(db, "select count(*) from gate") == 0


async def test_a_version_that_is_no_number_is_refused_when_a_run_is_made(db: AsyncConnection) -> None:
    params = declare_params({"account": "a", "seq": None})
    await put(db, make_dag("a", {"t": []}, task_gates=(ORDER,), params=params))
    for bad in (None, "7", 1.5, True, 2**63):
        with pytest.raises(InvalidParams, match=r"task 't'.*version from seq, which is .*whole number"):
            await trigger(db, dag="a", params={"seq": bad}, actor=Actor("test"))
    assert await value(db, "select count(*) from run") == 0


@pytest.mark.requirement("D3", "D5")
async def test_order_holds_with_many_promoters_at_once(database: str) -> None:
    """Runs of all versions are made, ended, paused and repaired by eight at once: whoever enters or leaves takes the key's lock."""
    connections = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(8)]
    conn, watcher, *others = connections
    epoch = await lead(conn)
    await set_pool(conn, name="db", slots=2, actor=Actor("test"))
    await ordered(conn, "a", task_retry=RetryPolicy(retries=1))
    await ordered(conn, "b", GateSpec(kind=GateKind.POOL, name="db"))
    doing = asyncio.Event()

    async def make(each: AsyncConnection, dice: random.Random) -> None:
        for _ in range(25):
            await begin(each, dice.randint(1, 30), dice.choice("ab"), dice.choice("xy"))

    async def work(each: AsyncConnection, dice: random.Random) -> None:
        runner = await Runner.join(each)
        held: list[ExchangeRow] = []
        for _ in range(40):
            kinds = [dice.choice(["success", "failed", "given_back"]) for _ in held]
            ends = [(claim, kind, {"retry_in": 0}) for claim, kind in zip(held, kinds, strict=True)]
            held, refused = await runner.step(ends, free=3)  # type: ignore[arg-type]
            assert refused == []
        await runner.step([(claim, "success", {}) for claim in held])

    async def plan() -> None:
        while not doing.is_set():
            await pause(conn, dag="a", actor=Actor("test"))
            await unpause(conn, dag="a", actor=Actor("test"))
            await admit_gated_tasks(conn, shard=0, epoch=epoch, limit=10)
            assert (await reconcile_gates(conn, shard=0, epoch=epoch, after=0, limit=100)).drifted == 0
            await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)

    async def watch() -> None:
        while not doing.is_set():
            found = await invariants.gate_violations(watcher)
            assert [text for text in found if "could be let in" not in text and "pending for nothing" not in text] == []

    async with asyncio.TaskGroup() as group:
        for each in (plan(), watch()):
            group.create_task(each)
        busy = [group.create_task(make(each, random.Random(n))) for n, each in enumerate(others[:3])]
        busy += [group.create_task(work(each, random.Random(n))) for n, each in enumerate(others[3:])]
        await asyncio.wait(busy)
        doing.set()
    await unpause(conn, dag="a", actor=Actor("test"))
    await admit_gated_tasks(conn, shard=0, epoch=epoch, limit=100)
    await promote_due_tasks(conn, shard=0, epoch=epoch, limit=1000)
    await (await Runner.join(conn)).drain()
    assert await invariants.gate_violations(conn) == []
    assert await value(conn, "select count(*) from run_status where state in ('queued', 'running')") == 0
    assert await value(conn, "select count(*) from gate_order") == 0
    for each in connections:
        await each.close()
