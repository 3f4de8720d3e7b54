"""depends_on_past: a task starts only when the same task of the run before succeeded or was skipped."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import gates
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.errors import UserError
from evertick.domain.explain import describe
from evertick.domain.retention import Pace
from evertick.engine.backfills import BackfillRequest, advance, create
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.gates import admit_gated_tasks, reconcile_gates, set_pool
from evertick.engine.maintenance import admit_queued_runs
from evertick.engine.retention import PruneGrant, prune_runs
from evertick.engine.runs import cancel
from evertick.engine.shards import poll_work
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

PAST = {"gates": (GateSpec(kind=GateKind.PAST, name=""),)}


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, later(0))
    await lead(conn)
    return conn


async def hourly(conn: AsyncConnection, **options: object) -> None:
    shape = {"up": [], "t": ["up"]}
    await put(conn, make_dag("a", shape, per_task={"t": PAST}, every=timedelta(hours=1), **options))


async def epoch_of(conn: AsyncConnection) -> int:
    return int(str(await value(conn, "select epoch from shard")))


async def fired(conn: AsyncConnection, hour: int) -> int:
    """The run of that hour."""
    await set_clock(conn, later(3600 * hour))
    await fire_schedules(conn, shard=0, epoch=await epoch_of(conn), batch=10)
    return int(str(await value(conn, "select max(run_id) from run")))


async def sound(conn: AsyncConnection) -> None:
    assert await invariants.gate_violations(conn) == []


async def state(conn: AsyncConnection, run: int) -> str:
    return (await states(conn, run))["t"]


async def finish_ups(runner: Runner) -> None:
    claims = await runner.claim()
    await runner.step([(claim, "success", {}) for claim in claims if claim.idx == 0])


@pytest.mark.requirement("D1")
@pytest.mark.parametrize("way", ["success", "skipped", "failed", "marked", "cleared", "canceled", "upstream_skipped"])
async def test_it_waits_for_the_run_before(db: AsyncConnection, way: str) -> None:
    await hourly(db)
    runner = await Runner.join(db)
    first = await fired(db, 1)
    (up,) = await runner.claim()
    if way == "upstream_skipped":
        second = await fired(db, 2)
        (next_up,) = await runner.claim()
        await runner.finish(next_up)
        assert await state(db, second) == "pending"
        await runner.finish(up, "skipped")
        assert [await state(db, run) for run in (first, second)] == ["skipped", "available"]
        await sound(db)
        return
    await runner.finish(up)
    assert await state(db, first) == "available", "the first one has no past"
    second = await fired(db, 2)
    t, next_up = await runner.claim()
    await runner.finish(next_up)
    (reason,) = await gates.explain_task(db, TaskKey(second, 1, -1))
    assert describe(reason) == f"it waits for t of run {first} (the previous run, running), which is running"
    if way == "canceled":
        await cancel(db, run_id=first, actor=Actor("test"))
        await runner.finish(t, "killed")
    else:
        await runner.finish(t, "failed" if way in ("marked", "cleared") else way, no_retry=True)
    if way in ("success", "skipped"):
        assert await state(db, second) == "available"
        await sound(db)
        return
    assert await state(db, second) == "pending"
    (reason,) = await gates.explain_task(db, TaskKey(second, 1, -1))
    assert f"`evertick tasks clear {first} t`" in describe(reason)
    await sound(db)
    if way == "cleared":
        await clear(db, run_id=first, chosen=await select_tasks(db, run_id=first, names=["t"]), actor=Actor("test"))
        assert await state(db, second) == "pending"
        (claim,) = await runner.claim()
        await runner.finish(claim)
    else:
        await mark(db, TaskKey(first, 1, -1), state="success", actor=Actor("test"))
    assert await state(db, second) == "available"
    await sound(db)


async def test_it_waits_for_the_tasks_after_it_in_the_run_before(db: AsyncConnection) -> None:
    """As with wait_for_downstream, of a mapped task as well: `t` waits for `t` and `down`, whatever index they have there."""
    gates = (GateSpec(kind=GateKind.PAST, name=""), GateSpec(kind=GateKind.PAST, name="down"))
    mapping = Mapping(lists=(MappedList(argument="x", length=2),))
    shape = {"t": [], "down": ["t"]}
    per_task = {"t": {"gates": gates, "mapping": mapping}}
    await put(db, make_dag("a", {"z": [], **shape}, every=timedelta(hours=1)))
    runner = await Runner.join(db)
    first = await fired(db, 1)
    await put(db, make_dag("a", shape, per_task=per_task, every=timedelta(hours=1)))
    second = await fired(db, 2)
    third = await fired(db, 3)
    order = []
    while claims := await runner.claim():
        order += [(claim.run_id, claim.idx) for claim in claims]
        await runner.step([(claim, "success", {}) for claim in claims])
        await sound(db)
    expected = [(first, 0), (first, 1), (first, 2)]
    expected += [(run, idx) for run in (second, third) for idx in (0, 0, 1)]
    assert order == expected


async def test_many_runs_at_once_go_one_after_the_other_and_nothing_is_left(db: AsyncConnection) -> None:
    leader = await epoch_of(db)
    await hourly(db, misfire="all")
    await set_clock(db, later(3600 * 6))
    await fire_schedules(db, shard=0, epoch=leader, batch=10)
    runner = await Runner.join(db)
    await finish_ups(runner)
    order = []
    claims = await runner.claim()
    while claims:
        (claim,) = claims
        order.append(claim.run_id)
        claims, _ = await runner.step([(claim, "success", {})], free=10)
        await sound(db)
    assert order == sorted(order) and len(order) == 6
    await reconcile_gates(db, shard=0, epoch=leader, after=0, limit=100)
    assert await value(db, "select count(*) from gate") == 0


async def test_manual_runs_have_no_past_and_are_none(db: AsyncConnection) -> None:
    await hourly(db)
    runner = await Runner.join(db)
    first = await fired(db, 1)
    by_hand = await start(db, "a")
    second = await fired(db, 2)
    await finish_ups(runner)
    assert [await state(db, run) for run in (first, by_hand, second)] == ["available", "available", "pending"]
    (reason,) = await gates.explain_task(db, TaskKey(second, 1, -1))
    assert reason.detail["run_id"] == first


async def test_a_task_that_is_new_or_has_moved_is_found_by_its_name(db: AsyncConnection) -> None:
    await hourly(db)
    runner = await Runner.join(db)
    first = await fired(db, 1)
    per_task = {"t": PAST, "new": PAST}
    shape = {"up": [], "new": ["up"], "t": ["up"]}
    await put(db, make_dag("a", shape, per_task=per_task, every=timedelta(hours=1)))
    second = await fired(db, 2)
    await finish_ups(runner)
    found = await states(db, second)
    assert (found["new"], found["t"]) == ("available", "pending")
    (reason,) = await gates.explain_task(db, TaskKey(second, 2, -1))
    assert (reason.detail["run_id"], reason.detail["task"]) == (first, "t")
    await mark(db, TaskKey(first, 1, -1), state="skipped", actor=Actor("test"))
    assert await state(db, second) == "available"


async def test_a_run_that_was_pruned_keeps_nobody_waiting(db: AsyncConnection) -> None:
    await hourly(db)
    runner, leader = await Runner.join(db), await epoch_of(db)
    first, second = await fired(db, 1), await fired(db, 2)
    await finish_ups(runner)
    await cancel(db, run_id=first, actor=Actor("test"))
    third = await fired(db, 3)
    await finish_ups(runner)
    assert [await state(db, run) for run in (second, third)] == ["pending", "pending"]
    await set_pool(db, name="lane", slots=1, actor=Actor("test"))
    mandate = PruneGrant(shard=0, epoch=leader, before=later(3600 * 4), actor=Actor("test"))
    await prune_runs(db, mandate, after=0, pace=Pace(batch=10), now=later(3600 * 4))
    seen = await poll_work(db, shard=0, epoch=leader, lost_after=90)
    assert seen.has_gates, "the leader comes by"
    assert await value(db, "select array_agg(name) from gate where needs_admission") == [f"{first}/1"], (
        "for that one alone"
    )
    await admit_gated_tasks(db, shard=0, epoch=leader, limit=10)
    assert [await state(db, run) for run in (second, third)] == ["available", "pending"]
    await sound(db)


async def wants_admission(conn: AsyncConnection) -> bool:
    return bool((await poll_work(conn, shard=0, epoch=await epoch_of(conn), lost_after=90)).dags_with_free_slots)


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_cleared_run_is_admitted_past_the_limit_if_a_running_one_waits_for_it(
    database: str, db: AsyncConnection, is_early: bool
) -> None:
    """Otherwise the two would wait for each other for ever."""
    await hourly(db, max_active_runs=1)
    runner = await Runner.join(db)
    leader = await epoch_of(db)
    first = await fired(db, 1)
    (claim,) = await runner.claim()
    ((claim,), _) = await runner.step([(claim, "success", {})], free=1)
    await runner.finish(claim, "failed", no_retry=True)
    second = await fired(db, 2)
    third = await fired(db, 3)
    chosen = await select_tasks(db, run_id=first, names=["t"])
    if is_early:
        await clear(db, run_id=first, chosen=chosen, actor=Actor("test"))
        assert await run_state(db, first) == "queued", "nobody waits for it yet"
        # Neither a key of that name, for which a task waits, nor its own gate, for which none does, is a reason.
        await put(
            db,
            make_dag("b", {"x": [], "y": []}, task_gates=(GateSpec(kind=GateKind.KEY, name=f"{first}/1", capacity=1),)),
        )
        await start(db, "b")
        assert not await wants_admission(db)
        await finish_ups(runner)
        assert await wants_admission(db)
        async with await connect(database, purpose=Purpose.SCHEDULER) as other, other.transaction():
            await other.execute("select from run_status where run_id = %s for update", [first])
            await db.execute("set lock_timeout = '30ms'")
            assert (await admit_queued_runs(db, shard=0, epoch=leader)).admitted == 0, "it is skipped, not waited for"
        await admit_queued_runs(db, shard=0, epoch=leader)
    else:
        await finish_ups(runner)
        await clear(db, run_id=first, chosen=chosen, actor=Actor("test"))
    assert [await run_state(db, run) for run in (first, second, third)] == ["running", "running", "queued"]
    assert not await wants_admission(db), "the one that is waited for runs"
    claim = next(each for each in await runner.claim() if each.run_id == first)
    ((claim,), _) = await runner.step([(claim, "success", {})], free=5)
    assert claim.run_id == second
    assert await run_state(db, third) == "queued"


@pytest.mark.parametrize("way", ["a task after it", "an older version"])
async def test_a_cleared_run_is_admitted_whatever_makes_the_running_one_wait_for_it(
    db: AsyncConnection, way: str
) -> None:
    """The cleared task has no such gate itself: another one names it, or only the next version has the gate."""
    is_after = way == "a task after it"
    own, other = GateSpec(kind=GateKind.PAST, name=""), GateSpec(kind=GateKind.PAST, name="down")
    gated = {"t": {"gates": (own, other) if is_after else (own,)}}
    shape: dict[str, list[str]] = {"t": [], "down": ["t"]}
    first_gates = gated if is_after else {}
    await put(db, make_dag("a", shape, per_task=first_gates, every=timedelta(hours=1), max_active_runs=1))
    runner = await Runner.join(db)
    first = await fired(db, 1)
    cleared = "down" if is_after else "t"
    await runner.drain({cleared: "failed"})
    await put(db, make_dag("a", shape, per_task=gated, every=timedelta(hours=1), max_active_runs=1))
    second = await fired(db, 2)
    assert await state(db, second) == "pending"
    chosen = await select_tasks(db, run_id=first, names=[cleared])
    await clear(db, run_id=first, chosen=chosen, actor=Actor("test"))
    assert [await run_state(db, run) for run in (first, second)] == ["running", "running"]
    (claim,) = await runner.claim()
    assert claim.run_id == first
    await runner.finish(claim)
    assert await state(db, second) == "available"
    await sound(db)


async def test_a_backfill_depends_on_its_own_past_and_goes_forward_only(db: AsyncConnection) -> None:
    await hourly(db)
    await set_clock(db, later(3600 * 3.5))
    leader, runner = await epoch_of(db), await Runner.join(db)
    wish = BackfillRequest(dag="a", schedule="main", first=later(-7200), last=later(0), parallel=10)
    with pytest.raises(UserError, match=r"newest first.*depends_on_past"):
        await create(db, BackfillRequest(dag="a", schedule="main", first=later(-7200), last=later(0), newest_first=True),
                     request="r1", actor=Actor("test"))  # fmt: skip
    made, _ = await create(db, wish, request="r2", actor=Actor("test"))
    await advance(db, shard=0, epoch=leader, backfill_id=made.id)
    await fire_schedules(db, shard=0, epoch=leader, batch=10)
    await finish_ups(runner)
    runs = [int(row[0]) for row in await (await db.execute("select run_id from run order by run_id")).fetchall()]
    *backfilled, scheduled = runs
    assert len(backfilled) == 3
    assert [await state(db, run) for run in runs] == ["available", "pending", "pending", "available"]
    assert await run_state(db, scheduled) == "running"
    first = {claim.run_id: claim for claim in await runner.claim()}
    assert set(first) == {backfilled[0], scheduled}
    ((claim,), _) = await runner.step([(first[backfilled[0]], "success", {})], free=5)
    assert claim.run_id == backfilled[1]
    await sound(db)


async def test_a_run_of_a_version_that_had_no_past_is_one(db: AsyncConnection) -> None:
    """depends_on_past came with the second version: the run of the first one still says when it is over."""
    shape = {"up": [], "t": ["up"]}
    await put(db, make_dag("a", shape, every=timedelta(hours=1)))
    runner = await Runner.join(db)
    await fired(db, 1)
    await finish_ups(runner)
    await hourly(db)
    (claim,) = await runner.claim()
    second = await fired(db, 2)
    await finish_ups(runner)
    assert await state(db, second) == "pending"
    await runner.finish(claim)
    assert await state(db, second) == "available"
    await sound(db)
