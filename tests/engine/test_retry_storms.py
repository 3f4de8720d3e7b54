"""Many tasks that fail at once come back a few at a time: bounded by queue, in order, and never before new work (H5)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import tasks
from evertick.db.queries.runners import NewRunner, register
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.retry import Backoff, RetryPolicy, delay_before
from evertick.engine.dags import pause, unpause
from evertick.engine.maintenance import Promoted, promote_due_tasks, reconcile_runs
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, select_tasks
from tests.engine import invariants
from tests.engine.poison import cure, refuse
from tests.engine.world import Runner, later, lead, make_dag, names_of, put, set_clock, start, states, value

RETRIED = RetryPolicy(retries=3, delay_seconds=0)
MANY: dict[str, list[str]] = {f"t{number:03}": [] for number in range(40)}


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def storm(conn: AsyncConnection, shape: dict[str, list[str]] = MANY, **options: object) -> tuple[int, Runner]:
    """Everything of a run fails at once, and is due again five seconds later."""
    await put(conn, make_dag("storm", shape, task_retry=RETRIED, **options))
    run, runner = await start(conn, "storm"), await Runner.join(conn)
    claims = await runner.claim(len(shape))
    await runner.step([(claim, "failed", {"retry_in": 5}) for claim in claims])
    await set_clock(conn, later(6))
    return run, runner


async def let_in(conn: AsyncConnection, epoch: int, bound: int | None = 4) -> Promoted:
    return await promote_due_tasks(conn, shard=0, epoch=epoch, limit=1000, bound=bound)


async def finish_all(runner: Runner, claims: list[ExchangeRow], kind: str = "success") -> None:
    await runner.step([(claim, kind, {"retry_in": 5}) for claim in claims])


@pytest.mark.requirement("H5", "N26")
async def test_no_more_retries_are_active_than_the_bound(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    epoch = await lead(conn)
    run, runner = await storm(conn)
    first = await let_in(conn, epoch)
    assert (first.promoted, first.has_waiting_retries, first.next_due) == (4, True, None)
    assert (await let_in(conn, epoch)).promoted == 0, "those in line count"
    claims = await runner.claim()
    assert len(claims) == 4
    assert (await let_in(conn, epoch)).promoted == 0, "those that run count"
    await finish_all(runner, claims[:3])
    assert (await let_in(conn, epoch)).promoted == 3, "each that ends makes room"
    assert Counter((await states(conn, run)).values()) == {"success": 3, "running": 1, "available": 3, "pending": 33}
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("H5")
async def test_every_retry_comes_in_the_order_in_which_it_was_due(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    shape: dict[str, list[str]] = {f"t{number:02}": [] for number in range(12)}
    await put(conn, make_dag("storm", shape, task_retry=RETRIED))
    run, runner = await start(conn, "storm"), await Runner.join(conn)
    # The later it stands in the DAG, the sooner it is due again.
    await runner.step([(c, "failed", {"retry_in": 5 - c.idx / 10}) for c in await runner.claim(12)])
    await set_clock(conn, later(6))
    batches: list[list[str]] = []
    while (done := await let_in(conn, epoch)).promoted:
        claims = await runner.claim()
        batches.append(sorted(await names_of(conn, claims)))
        await finish_all(runner, claims)
    assert not done.has_waiting_retries
    names = sorted(shape)
    assert batches == [names[8:], names[4:8], names[:4]]
    assert set((await states(conn, run)).values()) == {"success"}


@pytest.mark.requirement("H5")
async def test_a_timer_of_a_task_that_is_in_line_gives_it_no_second_place(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await storm(conn)
    await let_in(conn, epoch)
    assert await value(conn, "select count(*) from retry_queue") == 36
    await conn.execute(
        "insert into task_timer (shard, due_at, run_id, idx, map_index)"
        " select shard, due_at, run_id, idx, map_index from retry_queue"
    )
    done = await let_in(conn, epoch)
    assert (done.promoted, done.has_waiting_retries, done.next_due) == (0, True, None)
    assert await value(conn, "select count(*) from retry_queue") == 36


@pytest.mark.requirement("H5")
async def test_a_place_in_line_for_another_instant_takes_no_room_from_others(conn: AsyncConnection) -> None:
    """A task was cleared, ran, failed, and waits for a later time by now; its old place is the first in line."""
    epoch = await lead(conn)
    run, _ = await storm(conn, {"moved": [], "other": []})
    await let_in(conn, epoch, 1)
    idx = await value(conn, "select idx from retry_queue")
    await conn.execute("update retry_queue set due_at = due_at - interval '1 second'")
    await conn.execute("update task set state = 'pending' where state = 'available'")
    await conn.execute(
        "insert into retry_queue (shard, queue, due_at, run_id, idx, map_index)"
        " select 0, 'default', clock(), run_id, idx, map_index from task where run_id = %s and idx <> %s",
        [run, idx],
    )
    await conn.execute("update task set not_before = clock() where idx <> %s", [idx])
    await conn.execute("delete from ready_task")
    assert (await let_in(conn, epoch, 1)).promoted == 1
    assert await value(conn, "select idx from ready_task") != idx


@pytest.mark.requirement("H5")
async def test_a_timer_for_another_instant_gives_no_place_in_line(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await storm(conn, {"moved": [], "other": []})
    assert (await let_in(conn, epoch, 1)).promoted == 1
    await conn.execute(
        "with moved as (delete from retry_queue returning *)"
        " insert into task_timer (shard, due_at, run_id, idx, map_index)"
        " select shard, due_at - interval '1 second', run_id, idx, map_index from moved"
    )
    done = await let_in(conn, epoch, 1)
    assert (done.promoted, done.has_waiting_retries, done.next_due) == (0, False, None), (
        "nobody asks for it again and again"
    )


@pytest.mark.requirement("H5")
async def test_a_retry_that_fails_again_leaves_room_for_the_next(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    _, runner = await storm(conn)
    await let_in(conn, epoch)
    await finish_all(runner, await runner.claim(), "failed")
    assert (await let_in(conn, epoch)).promoted == 4
    assert await value(conn, "select count(*) from task_timer") == 4


@pytest.mark.requirement("H5")
async def test_lost_canceled_and_cleared_retries_leave_room(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    run, runner = await storm(conn)
    await let_in(conn, epoch)
    await runner.claim(2)
    await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)
    # What was lost is in line once more, by the ordinary door. It was tried, and so is no retry of this kind.
    assert (await let_in(conn, epoch)).promoted == 2
    await cancel(conn, run_id=run, actor=Actor("me"))
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    done = await let_in(conn, epoch)
    assert (done.promoted, done.has_waiting_retries) == (0, False), (
        "what is in line for a task that waits no more is dropped"
    )
    assert await value(conn, "select count(*) from retry_slot") == 0, "and what was cleared is no retry"


@pytest.mark.requirement("H5")
async def test_the_bound_is_half_of_the_slots_of_the_live_runners_of_the_queue(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await storm(conn)
    await conn.execute("delete from runner")
    assert (await let_in(conn, epoch, None)).promoted == 1, "one goes on, whoever may take it"
    for session, queues, slots in [
        (1, ["default"], 6),
        (2, ["other"], 100),
        (3, ["x", "default"], 10),
        (4, ["default"], 50),
    ]:
        new = NewRunner(
            session=session,
            runner_id="r",
            host="h",
            boot_id="b",
            pid_namespace="p",
            pid=1,
            pid_started=0.0,
            queues=queues,
            slots=slots,
        )
        await register(conn, new)
    await mark_runner_dead(conn, session=4, reason="gone", infra_retries=3)
    assert (await let_in(conn, epoch, None)).promoted == (6 + 10) // 2 - 1


@pytest.mark.requirement("H5")
async def test_a_full_queue_holds_up_no_other(conn: AsyncConnection) -> None:
    """However many wait in front of it."""
    epoch = await lead(conn)
    rare = {"z": {"queue": "rare"}}
    run, _ = await storm(conn, {**MANY, "z": []}, per_task=rare)
    # The runner serves the default queue alone: what waits in the other was never claimed.
    assert (await states(conn, run))["z"] == "available"
    other = await Runner.join(conn)
    (claim,) = await other.claim(queues=("rare",))
    await other.finish(claim, "failed", retry_in=5)
    await set_clock(conn, later(12))
    done = await promote_due_tasks(conn, shard=0, epoch=epoch, limit=1000, bound=2)
    assert done.promoted == 2 + 1
    assert (await states(conn, run))["z"] == "available"


@pytest.mark.requirement("H5", "N26")
async def test_new_work_is_not_starved_by_a_storm(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    _, runner = await storm(conn)
    await let_in(conn, epoch)
    await put(conn, make_dag("new", {"n": []}))
    await start(conn, "new")
    claims = await runner.claim(5)
    assert "n" in await names_of(conn, claims)


@pytest.mark.requirement("H5", "V10")
async def test_a_retry_that_is_held_back_says_why(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    run, _ = await storm(conn)
    await let_in(conn, epoch)
    rows = await tasks.list_of_run(conn, run_id=run)
    held = {row.reason for row in rows if row.state == "pending"}
    assert held == {"held back: as many retries of its queue are active as max_active_retries allows"}
    assert {row.reason for row in rows if row.state == "available"} == {None}


async def test_retries_of_a_paused_dag_wait_for_it_and_take_no_room(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    run, _ = await storm(conn)
    await pause(conn, dag="storm", actor=Actor("me"))
    assert (await let_in(conn, epoch)).promoted == 0
    assert await value(conn, "select count(*) from retry_slot") == 0
    while (await let_in(conn, epoch)).has_waiting_retries:
        pass
    await unpause(conn, dag="storm", actor=Actor("me"))
    assert set((await states(conn, run)).values()) == {"available"}


@pytest.mark.requirement("V11", "A1")
async def test_a_retry_that_cannot_be_admitted_is_quarantined_and_tried_again(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    epoch = await lead(conn)
    await put(conn, make_dag("one", {"a": []}, task_retry=RETRIED))
    made = [await start(conn, "one") for _ in range(10)]
    runner = await Runner.join(conn)
    await runner.step([(claim, "failed", {"retry_in": 5}) for claim in await runner.claim()])
    await set_clock(conn, later(6))
    await refuse(conn, "task", f"new.run_id = {made[3]}")
    done = await let_in(conn, epoch, 100)
    assert (done.promoted, done.refused, done.has_waiting_retries) == (9, 1, False)
    assert await states(conn, made[3]) == {"a": "pending"}
    assert "poison" in str(await value(conn, "select reason from quarantine"))
    await cure(conn, "task")
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)).repaired == [], "not yet"
    await set_clock(conn, later(17))
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)).repaired == ["timer_missing"]
    assert (await let_in(conn, epoch, 100)).promoted == 1
    assert await invariants.violations(conn) == []


async def test_what_waits_in_line_needs_no_repair(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await storm(conn)
    await let_in(conn, epoch)
    done = await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)
    assert done.repaired == []
    assert await value(conn, "select count(*) from task_timer") == 0


@pytest.mark.requirement("N26", "H5")
def test_jitter_spreads_what_failed_together() -> None:
    """N26: at least four fifths of the retries do not come back in the same tenth of the window."""
    policy = RetryPolicy(retries=3, delay_seconds=60, backoff=Backoff.EXPONENTIAL, jitter=0.5)
    dice = random.Random(1)
    delays = [delay_before(policy, 1, dice.random()) for _ in range(5000)]
    tenths = Counter(int((delay - 30) / 3.0001) for delay in delays)
    assert len(tenths) == 10
    assert max(tenths.values()) < 0.2 * len(delays)


@pytest.mark.requirement("H5", "V11")
async def test_a_retry_whose_run_somebody_works_on_keeps_its_place_in_line(database: str) -> None:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as conn,
        await connect(database, purpose=Purpose.SCHEDULER) as person,
    ):
        await set_clock(conn, later(0))
        epoch = await lead(conn)
        run, runner = await storm(conn, {"a": [], "b": []})
        assert (await let_in(conn, epoch, 1)).promoted == 1
        await finish_all(runner, await runner.claim())
        async with person.transaction():
            await person.execute("select 1 from run_status where run_id = %s for no key update", [run])
            done = await let_in(conn, epoch, 1)
            assert (done.promoted, done.has_waiting_retries) == (0, True)
        assert (await let_in(conn, epoch, 1)).promoted == 1


@pytest.mark.requirement("N26", "H5")
async def test_thousands_of_failures_at_once_drain_through_the_bound(database: str) -> None:
    """Committed step by step, as it happens: within one transaction nothing of what is over could be forgotten."""
    async with await connect(database, purpose=Purpose.SCHEDULER) as conn:
        await set_clock(conn, later(0))
        epoch = await lead(conn)
        size, bound = 10_000, 500
        run, runner = await storm(conn, {f"t{number}": [] for number in range(size)})
        let, rounds = 0, 0
        while True:
            done = await promote_due_tasks(conn, shard=0, epoch=epoch, limit=2_000, bound=bound)
            claims = await runner.claim(bound)
            assert len(claims) == done.promoted <= bound
            if not claims:
                break
            let, rounds = let + len(claims), rounds + 1
            await finish_all(runner, claims)
        assert (let, rounds) == (size, size // bound)
        assert Counter((await states(conn, run)).values()) == {"success": size}
