"""`why`: the explanation is the decision. It changes exactly when that does, and what it names is what frees the task."""

from __future__ import annotations

import random
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import gates
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.explain import Explained, Reason, describe
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause, unpause
from evertick.engine.gates import release_admissions, set_pool
from evertick.engine.maintenance import promote_due_tasks
from tests.engine.reasons import explain
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

POOL = GateSpec(kind=GateKind.POOL, name="db")
KEY = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)
GATES = {
    "pool": POOL,
    "mutex": KEY,
    "key": GateSpec(kind=GateKind.KEY, name="host", capacity=1),
    "task": GateSpec(kind=GateKind.TASK, name="", capacity=1),
}


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, later(0))
    await set_pool(conn, name="db", slots=1, actor=Actor("test"))
    return conn


async def reasons(conn: AsyncConnection, run: int, task: str = "t") -> list[Reason]:
    found = await explain(conn, run_id=run, task=task)
    assert all(describe(each) for each in found.reasons)
    return list(found.reasons)


async def only(conn: AsyncConnection, run: int, task: str = "t") -> tuple[str, dict[str, Any]]:
    (reason,) = await reasons(conn, run, task)
    return reason.kind, dict(reason.detail)


@pytest.mark.parametrize("kind", GATES)
async def test_a_gate_is_named_with_its_holder_until_it_lets_in(db: AsyncConnection, kind: str) -> None:
    await put(db, make_dag("a", {"t": []}, task_gates=(GATES[kind],)))
    first, second, third = [await start(db, "a") for _ in range(3)]
    runner = await Runner.join(db)
    assert (await only(db, first))[0] == "in_line"
    for run, ahead in ((second, 0), (third, 1)):
        name, detail = await only(db, run)
        assert (name, detail["gate"], detail["ahead"]) == ("gate", kind, ahead)
        assert [each["run_id"] for each in detail["holders"]] == [first]
        assert detail["used"] + detail["need"] > detail["capacity"]
    (claim,) = await runner.claim()
    assert (await only(db, first))[0] == "running"
    await runner.finish(claim)
    assert (await only(db, first))[0] == "ended"
    assert ((await only(db, second))[0], (await states(db, second))["t"]) == ("in_line", "available")
    name, detail = await only(db, third)
    assert (name, detail["ahead"], detail["holders"][0]["run_id"]) == ("gate", 0, second)


async def test_a_group_and_a_dag_limit_are_named(db: AsyncConnection) -> None:
    group = GateSpec(kind=GateKind.GROUP, name="g", capacity=1)
    await put(db, make_dag("a", {"g.x": [], "g.y": []}, task_gates=(group,), task_group="g"))
    await put(db, make_dag("b", {"x": [], "y": []}, max_active_tasks=1))
    one, two = await start(db, "a"), await start(db, "b")
    assert (await only(db, one, "g.y"))[1]["gate"] == "group"
    name, detail = await only(db, two, "y")
    assert (detail["gate"], detail["name"], detail["capacity"]) == ("dag", "b", 1)
    assert "max_active_tasks of b is full" in describe(Reason(name, detail))


async def test_every_gate_that_is_full_is_told_the_binding_one_first(db: AsyncConnection) -> None:
    await put(db, make_dag("pool_user", {"t": []}, task_gates=(POOL,)))
    await put(db, make_dag("key_user", {"t": []}, task_gates=(KEY,)))
    await put(db, make_dag("both", {"t": []}, task_gates=(POOL, KEY)))
    for name in ("pool_user", "key_user"):
        await start(db, name)
    run = await start(db, "both")
    runner = await Runner.join(db)
    claims = await runner.claim()
    assert [each.detail["gate"] for each in await reasons(db, run)] == ["pool", "mutex"]
    await runner.finish(claims[0])
    assert [each.detail["gate"] for each in await reasons(db, run)] == ["mutex"]
    await runner.finish(claims[1])
    assert (await only(db, run))[0] == "in_line"


async def test_a_pool_that_is_too_small_says_what_to_do(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"t": []}, task_gates=(POOL,)))
    await set_pool(db, name="db", slots=0, actor=Actor("test"))
    run = await start(db, "a")
    name, detail = await only(db, run)
    assert "evertick pools set db 1" in describe(Reason(name, detail))
    await set_pool(db, name="db", slots=1, actor=Actor("test"))
    assert (await only(db, run))[0] != "gate"


async def test_an_upstream_is_named_with_its_own_reason(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"x": [], "y": ["x"], "z": ["y"]}, per_task={"x": {"gates": (KEY,)}}))
    await put(db, make_dag("b", {"t": []}, task_gates=(KEY,)))
    holder = await start(db, "b")
    run = await start(db, "a")
    found: Explained | None = await explain(db, run_id=run, task="z")
    chain = []
    while found is not None:
        chain.append((found.task, found.state, found.reasons[0].kind))
        last, found = found, found.upstream
    assert chain == [("z", "waiting", "upstream"), ("y", "waiting", "upstream"), ("x", "pending", "gate")]
    assert last.reasons[0].detail["holders"][0]["run_id"] == holder


async def test_time_pause_limits_and_runners_are_reasons(db: AsyncConnection) -> None:
    leader = await lead(db)
    await put(db, make_dag("a", {"t": []}, task_retry=RetryPolicy(retries=1), max_active_runs=1))
    first, second = await start(db, "a"), await start(db, "a")
    assert (await only(db, first))[0] == "no_runner"
    runner = await Runner.join(db)
    assert (await only(db, first))[0] == "in_line"
    name, detail = await only(db, second)
    assert (name, detail["active"], detail["limit"], detail["ahead"]) == ("run_queued", 1, 1, 0)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=50)
    name, detail = await only(db, first)
    assert name == "time" and detail["until"].startswith("2030-01-01T00:00:50")
    await set_clock(db, later(60))
    assert (await only(db, first))[0] == "retry_line"
    await promote_due_tasks(db, shard=0, epoch=leader, limit=10)
    await pause(db, dag="a", actor=Actor("test"))
    assert (await states(db, first))["t"] == "pending"
    assert [each.kind for each in await reasons(db, first)] == ["dag_paused"]
    assert [each.kind for each in await reasons(db, second)] == ["dag_paused", "run_queued"]
    await unpause(db, dag="a", actor=Actor("test"))
    assert (await only(db, first))[0] == "in_line"
    await db.execute("update runner set ended_at = clock() where session = %s", [runner.session])
    name, detail = await only(db, first)
    assert (name, detail["last"]["runner"]) == ("no_runner", f"r{runner.session}")


async def test_what_was_taken_back_says_that_no_runner_serves_it(db: AsyncConnection) -> None:
    leader = await lead(db)
    await put(db, make_dag("a", {"t": []}, task_gates=(KEY,), task_queue="gpu"))
    run = await start(db, "a")
    await set_clock(db, later(100))
    assert await release_admissions(db, shard=0, epoch=leader, grace=10, limit=10) == 1
    name, detail = await only(db, run)
    assert (name, detail["queue"], (await states(db, run))["t"]) == ("no_runner", "gpu", "pending")
    (blocked,) = await gates.blocked(db, limit=10)
    assert (blocked.kind, blocked.name, blocked.waiting) == ("no_runner", "gpu", 1)


async def test_a_quarantined_run_is_reported_as_such(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"t": []}))
    run = await start(db, "a")
    await Runner.join(db)
    await db.execute("select quarantine_row('run', %s, 'reconcile', 'poison', true)", [run])
    assert [each.kind for each in await reasons(db, run)] == ["quarantined", "in_line"]


async def test_blocked_counts_what_waits_for_what(db: AsyncConnection) -> None:
    await Runner.join(db)
    await put(db, make_dag("a", {"t": []}, task_gates=(POOL,)))
    await put(db, make_dag("b", {"t": []}, max_active_runs=1))
    for name, times in (("a", 4), ("b", 3)):
        for _ in range(times):
            await start(db, name)
    found = {(each.kind, each.name): each.waiting for each in await gates.blocked(db, limit=10)}
    assert found == {("gate", "pool db"): 3, ("run_queued", "b"): 2}
    await pause(db, dag="b", actor=Actor("test"))
    found = {(each.kind, each.name): each.waiting for each in await gates.blocked(db, limit=10)}
    assert found[("dag_paused", "b")] in (1, 2)


@pytest.mark.parametrize("seed", range(3))
async def test_what_why_names_is_what_lets_the_task_in(db: AsyncConnection, seed: int) -> None:
    """Some task at the head of its line: ending the holders that why names, one by one, lets it past exactly that gate as soon as
    there is room, and not before."""
    dice = random.Random(seed)
    await set_pool(db, name="db", slots=3, actor=Actor("test"))
    choices = [
        GateSpec(kind=GateKind.POOL, name="db", weight=2),
        POOL,
        KEY,
        GateSpec(kind=GateKind.MUTEX, name="k"),
        GATES["key"],
        GATES["task"],
    ]
    for name in "abcdef":
        await put(db, make_dag(name, {"t": []}, task_gates=tuple(dice.sample(choices, dice.randint(1, 3)))))
    runner = await Runner.join(db)
    held: dict[int, ExchangeRow] = {}
    checked = 0
    for _ in range(120):
        if dice.random() < 0.5:
            await start(db, dice.choice("abcdef"))
        held |= {claim.run_id: claim for claim in await runner.claim(1)}
        waiting = await (await db.execute("select run_id from gate_waiter order by run_id")).fetchall()
        if not waiting:
            continue
        run = int(dice.choice(waiting)[0])
        first = (await reasons(db, run))[0]
        if first.kind != "gate" or first.detail["ahead"]:
            continue
        checked += 1
        held |= {claim.run_id: claim for claim in await runner.claim(100)}
        before, now = first.detail, first
        while now.kind == "gate" and now.detail["name"] == before["name"]:
            assert (await states(db, run))["t"] == "pending"
            assert now.detail["used"] + now.detail["need"] > now.detail["capacity"]
            assert now.detail["ahead"] == 0
            # What needs less than this one may have slipped in before it.
            held |= {claim.run_id: claim for claim in await runner.claim(100)}
            await runner.finish(held.pop(now.detail["holders"][0]["run_id"]))
            now = (await reasons(db, run))[0]
        assert now.kind in ("gate", "in_line")
        assert (await states(db, run))["t"] == ("available" if now.kind == "in_line" else "pending")
    assert checked > 5
    for claim in held.values():
        await runner.finish(claim)
    await runner.drain()
    assert await value(db, "select count(*) from gate_waiter") == 0
    assert await run_state(db, 1) == "success"


async def test_an_unknown_task_is_refused_and_an_unknown_key_explains_nothing(db: AsyncConnection) -> None:
    assert await gates.explain_task(db, TaskKey(99, 0, -1)) == []
