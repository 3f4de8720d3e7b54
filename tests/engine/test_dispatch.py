"""From available to queued, and what becomes of attempts that never began (A5, A11, A16, B3)."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.db.queries.runners import QueuedRow
from evertick.db.queries.tasks import ClaimPosition
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict
from evertick.domain.explain import describe
from evertick.domain.retry import RetryPolicy
from evertick.domain.routing import read_pattern
from evertick.engine.finish_and_claim import RANKS, PatternClaims
from evertick.engine.maintenance import reconcile_runs
from evertick.engine.remote_attempts import (
    DispatchResult,
    NotStarted,
    _claim_for_dispatch,
    adopt_dispatches,
    claim_for_dispatch,
    claim_matching_for_dispatch,
    delete_dispatches,
    end_queued,
)
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine.invariants import install, violations
from tests.engine.reasons import explain
from tests.engine.remote_agents import as_claim, begin
from tests.engine.world import Runner, lead, make_dag, put, run_state, start, states, value
from tests.waiting import eventually

KEYS = "select count(*) from dispatch"


def key_of(row: QueuedRow) -> TaskKey:
    return TaskKey(row.run_id, row.idx, row.map_index)


async def claim(runner: Runner, free: int = 100, queues: tuple[str, ...] = ("default",)) -> list[QueuedRow]:
    return await claim_for_dispatch(runner.conn, session=runner.session, queues=list(queues), free=free)


async def end(
    conn: AsyncConnection, row: QueuedRow, kind: DispatchResult, *, infra_retries: int = 3, **changed: int
) -> bool:
    """Whether it moved."""
    place = {"epoch": row.epoch, "session": row.session, **changed}
    one = NotStarted(key=key_of(row), kind=kind, reason=f"{kind}: because", **place)
    done = await end_queued(conn, [one], infra_retries=infra_retries)
    return bool(done.moved_sessions)


async def repair(conn: AsyncConnection) -> list[str]:
    return (await reconcile_runs(conn, shard=0, epoch=await lead(conn), limit=10)).repaired


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await install(rollback_conn)
    return rollback_conn


async def world(conn: AsyncConnection, tasks: int = 1, *, slots: int = 100, **options: object) -> tuple[Runner, int]:
    await put(conn, make_dag("d", {f"t{n}": [] for n in range(tasks)}, **options))
    runner = await Runner.join(conn, executor="far", slots=slots)
    return runner, await start(conn, "d")


async def test_a_claim_for_an_executor_leaves_tasks_queued_with_a_session_of_their_own(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, 2)
    rows = await claim(runner)
    assert [(row.idx, row.epoch) for row in rows] == [(0, 1), (1, 1)]
    assert len({row.session for row in rows} | {runner.session}) == 3
    assert set((await states(conn, run_id)).values()) == {"queued"}
    assert await value(conn, "select count(*) from lease") == 0
    assert await value(conn, "select count(*) from task where started_at is null and attempt = 1") == 2
    listed = await runners.list_of(conn, owner=runner.session)
    assert [(row.key, row.session, row.state, row.tries) for row in listed] == [
        (key_of(row), row.session, "queued", 0) for row in rows
    ]
    assert await violations(conn) == []


@pytest.mark.requirement("K8")
async def test_what_a_runner_looks_after_counts_against_its_slots_until_it_is_off_the_list(
    conn: AsyncConnection,
) -> None:
    runner, _ = await world(conn, 5, slots=3)
    rows = await claim(runner)
    assert len(rows) == 3
    assert await claim(runner) == []
    await end(conn, rows[0], DispatchResult.FAILED)
    assert len(await claim(runner)) == 1


@pytest.mark.requirement("A5")
@pytest.mark.requirement("K8")
async def test_two_claims_at_once_of_one_runner_stay_within_its_slots(database: str) -> None:
    """The first one's answer was lost, and the server is still at it."""
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as one,
        await connect(database, purpose=Purpose.SCHEDULER) as other,
        await connect(database, purpose=Purpose.SCHEDULER) as witness,
    ):
        runner, _ = await world(one, 2, slots=1)

        async def is_waiting() -> bool:
            query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
            return bool(await value(witness, query, other.info.backend_pid))

        async with asyncio.TaskGroup() as group:
            async with one.transaction():
                assert len(await claim(runner)) == 1
                again = group.create_task(claim(Runner(other, runner.session)))
                await eventually(is_waiting)
        assert again.result() == [] and await value(witness, KEYS) == 1


async def test_what_there_is_no_room_for_stays_available(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, 4)
    assert len(await claim(runner, free=1)) == 1
    assert sorted((await states(conn, run_id)).values()) == ["available"] * 3 + ["queued"]


async def test_a_runner_that_drains_or_is_gone_claims_nothing(conn: AsyncConnection) -> None:
    runner, _ = await world(conn)
    await conn.execute("update runner set request = 'drain'")
    assert await claim(runner) == []
    await conn.execute("update runner set request = null, ended_at = clock(), end_reason = 'x'")
    assert await claim(runner) == []


async def test_queues_are_served_in_their_order_and_the_urgent_go_first(conn: AsyncConnection) -> None:
    per_task = {"a": {"queue": "second"}, "b": {"priority": 1}, "c": {"priority": 9}}
    await put(conn, make_dag("d", {"a": [], "b": [], "c": []}, per_task=per_task))
    runner = await Runner.join(conn, executor="far")
    await start(conn, "d")
    assert [row.idx for row in await claim(runner, 1, ("default", "second"))] == [2]
    assert [row.idx for row in await claim(runner, 9, ("default", "second"))] == [1, 0]


async def test_who_waited_too_long_goes_first_and_once(conn: AsyncConnection) -> None:
    per_task = {"a": {"priority": 0}, "b": {"priority": 9}, "c": {"priority": 0}}
    await put(conn, make_dag("d", {"a": [], "b": [], "c": []}, per_task=per_task))
    runner = await Runner.join(conn, executor="far")
    await start(conn, "d")
    await conn.execute("update ready_task set enqueued_at = clock() - interval '1 hour' where idx = 0")

    async def claimed(look: ClaimPosition) -> list[QueuedRow]:
        sessions = [1, 2, 3]
        return await _claim_for_dispatch(
            conn, session=runner.session, queues=["default"], free=3, look=look, sessions=sessions
        )

    assert await claimed(ClaimPosition([10**12] * RANKS, 1.0)) == [], "all of them lie before the cursor"
    assert [(row.idx, row.session) for row in await claimed(ClaimPosition(None, 1.0))] == [(0, 1), (1, 2), (2, 3)]


async def test_a_runner_of_some_names_claims_only_those(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, 3)
    matching = PatternClaims([read_pattern("t1")], ["default"])
    rows = await claim_matching_for_dispatch(conn, matching, session=runner.session, free=9)
    assert [row.idx for row in rows] == [1]
    assert (await states(conn, run_id))["t1"] == "queued"


@pytest.mark.requirement("B3")
async def test_a_lost_dispatch_is_tried_again_within_the_retries_of_the_house_and_then_fails(
    conn: AsyncConnection,
) -> None:
    runner, run_id = await world(conn)
    for _ in range(2):
        (row,) = await claim(runner)
        assert await end(conn, row, DispatchResult.LOST, infra_retries=2)
        assert await value(conn, KEYS) == 0
        await conn.execute("delete from task_timer")
        await conn.execute("update task set not_before = null where state = 'pending'")
        await repair(conn)
    (row,) = await claim(runner)
    assert row.epoch == 3
    assert await end(conn, row, DispatchResult.LOST, infra_retries=2)
    assert await states(conn, run_id) == {"t0": "failed"}
    assert await run_state(conn, run_id) == "failed"
    assert await value(conn, "select reason from task") == "lost: because"
    assert await value(conn, "select attempt from task") == 1, "never from the user's own retries"
    assert await value(conn, "select count(*) from all_attempts where outcome = 'lost' and started_at is null") == 2
    assert await violations(conn) == []


async def test_what_the_executor_refused_is_the_tasks_own_failure(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, task_retry=RetryPolicy(retries=1))
    (row,) = await claim(runner)
    assert await end(conn, row, DispatchResult.FAILED)
    assert await states(conn, run_id) == {"t0": "available"}
    (row,) = await claim(runner)
    assert await end(conn, row, DispatchResult.FAILED)
    assert await states(conn, run_id) == {"t0": "failed"}
    assert await value(conn, "select count(*) from all_attempts") == 2


async def test_what_is_given_back_is_available_at_once_and_has_cost_nothing(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn)
    (row,) = await claim(runner)
    assert await end(conn, row, DispatchResult.GIVEN_BACK)
    assert await states(conn, run_id) == {"t0": "available"}
    assert await value(conn, "select (attempt, lost_attempts) = (0, 0) and session is null from task")
    assert await violations(conn) == []


@pytest.mark.parametrize("changed", [{"epoch": 2}, {"session": 77}])
async def test_an_end_of_another_epoch_or_session_changes_nothing(
    conn: AsyncConnection, changed: dict[str, int]
) -> None:
    runner, run_id = await world(conn)
    (row,) = await claim(runner)
    assert not await end(conn, row, DispatchResult.LOST, **changed)
    assert await states(conn, run_id) == {"t0": "queued"}
    assert await value(conn, KEYS) == 1


async def test_an_attempt_that_has_begun_is_not_ended_as_one_that_never_did(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn)
    (row,) = await claim(runner)
    assert await begin(conn, session=row.session, epoch=row.epoch)
    assert not await end(conn, row, DispatchResult.LOST)
    assert await states(conn, run_id) == {"t0": "running"}
    assert await value(conn, KEYS) == 1


async def test_an_end_takes_nothing_off_the_list_but_its_own_attempt(conn: AsyncConnection) -> None:
    runner, _ = await world(conn)
    (first,) = await claim(runner)
    assert await begin(conn, session=first.session, epoch=first.epoch)
    assert await mark_runner_dead(conn, session=first.session, reason="agent_lost: gone", infra_retries=3) == 1
    (second,) = await claim(runner)
    assert await end(conn, second, DispatchResult.FAILED)
    left = await value(conn, "select array_agg(session) from dispatch")
    assert left == [first.session], "the executor may still have something of it"


async def test_a_cancel_waits_for_the_word_that_nothing_is_left(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn)
    (row,) = await claim(runner)
    await cancel(conn, run_id=run_id, actor=Actor("me"))
    assert await states(conn, run_id) == {"t0": "queued"}
    (listed,) = await runners.list_of(conn, owner=runner.session)
    assert listed.request == "cancel"
    assert await end(conn, row, DispatchResult.STOPPED)
    assert (await states(conn, run_id), await run_state(conn, run_id)) == ({"t0": "canceled"}, "canceled")
    assert await violations(conn) == []


@pytest.mark.parametrize("state", ["success", "failed", "skipped"])
async def test_a_mark_waits_as_well(conn: AsyncConnection, state: str) -> None:
    runner, run_id = await world(conn, task_retry=RetryPolicy(retries=1))
    (row,) = await claim(runner)
    try:
        await mark(conn, key_of(row), state=state, actor=Actor("me"))
    except Conflict:
        pytest.fail("a queued task can be marked")
    assert await states(conn, run_id) == {"t0": "queued"}
    assert await end(conn, row, DispatchResult.STOPPED)
    assert await states(conn, run_id) == {"t0": state}
    assert await violations(conn) == []


async def test_a_clear_starts_it_anew(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn)
    (row,) = await claim(runner)
    chosen = await select_tasks(conn, run_id=run_id, names=["t0"])
    await clear(conn, run_id=run_id, chosen=chosen, actor=Actor("me"))
    assert await end(conn, row, DispatchResult.STOPPED)
    assert await states(conn, run_id) == {"t0": "available"}
    (again,) = await claim(runner)
    assert again.epoch == 2 and again.session != row.session
    assert await violations(conn) == []


# The work list ----------------------------------------------------------------------------------------------------------


async def test_a_try_is_stamped_only_for_what_may_still_begin(conn: AsyncConnection) -> None:
    runner, _run_id = await world(conn, 4)
    mine, begun, asked, other = await claim(runner)
    assert await begin(conn, session=begun.session, epoch=begun.epoch)
    await conn.execute("update task set request = 'cancel' where session = %s", [asked.session])
    await conn.execute("update dispatch set owner = 5 where session = %s", [other.session])
    sessions = [row.session for row in (mine, begun, asked, other)]
    assert await runners.note_tries(conn, owner=runner.session, sessions=sessions) == {mine.session}
    assert await value(conn, "select array_agg(tries order by idx) from dispatch") == [1, 0, 0, 0]


async def test_an_attempt_is_taken_off_the_list_only_when_it_is_over(conn: AsyncConnection) -> None:
    runner, _run_id = await world(conn, 7)
    rows = await claim(runner)
    queued, running, ended, lost, older, foreign, unnamed = rows
    for row in (running, ended):
        assert await begin(conn, session=row.session, epoch=row.epoch)
    await Runner(conn, ended.session).finish(as_claim(ended))
    for row in (lost, unnamed):
        await conn.execute("update task set state = 'pending', session = null where session = %s", [row.session])
    await conn.execute("update task set epoch = epoch + 1 where session = %s", [older.session])
    await conn.execute("update task set session = 77 where session = %s", [foreign.session])
    assert await delete_dispatches(conn, [row.session for row in rows if row is not unnamed]) == 4
    left = {row.session for row in await runners.list_of(conn, owner=runner.session)}
    assert left == {queued.session, running.session, unnamed.session}


async def test_what_was_pruned_meanwhile_is_still_cleaned_up(conn: AsyncConnection) -> None:
    runner, _ = await world(conn)
    (row,) = await claim(runner)
    await conn.execute("delete from task")
    (listed,) = await runners.list_of(conn, owner=runner.session)
    assert listed.state is None
    assert await delete_dispatches(conn, [row.session]) == 1


async def adopt(runner: Runner) -> int:
    return await adopt_dispatches(runner.conn, session=runner.session, silent_seconds=30, most=100)


@pytest.mark.requirement("A16")
async def test_what_a_dead_or_silent_runner_looked_after_is_adopted_once(conn: AsyncConnection) -> None:
    first, _ = await world(conn, 4)
    await claim(first, 2)
    second = await Runner.join(conn, executor="far", slots=1)
    third = await Runner.join(conn, executor="far")
    assert len(await claim(third, 1)) == 1
    assert await adopt(second) == 0, "its owner is alive"
    await conn.execute("update runner set silent_seconds = 31 where session = %s", [first.session])
    assert await adopt(second) == 2, "beyond its slots: they are there already"
    assert await adopt(third) == 0
    assert await claim(second) == []
    await conn.execute("update runner set ended_at = clock() where session = %s", [second.session])
    assert await adopt(third) == 2
    await conn.execute("delete from runner where session = %s", [third.session])
    assert await adopt(first) == 3
    assert len(await runners.list_of(conn, owner=first.session)) == 3
    assert await adopt(first) == 0, "what is its own is not adopted, however silent it was"


@pytest.mark.parametrize(("executor", "queue"), [("other", "default"), ("far", "elsewhere")])
async def test_only_a_runner_of_the_same_executor_and_queue_adopts(
    conn: AsyncConnection, executor: str, queue: str
) -> None:
    first, _ = await world(conn)
    await claim(first)
    await conn.execute("update runner set ended_at = clock()")
    await Runner.join(conn, executor="far")
    assert await adopt(await Runner.join(conn, executor=executor, queues=(queue,))) == 0, "another one could"


async def test_a_runner_that_is_gone_itself_adopts_nothing(conn: AsyncConnection) -> None:
    first, _ = await world(conn)
    await claim(first)
    second = await Runner.join(conn, executor="far")
    await conn.execute("update runner set ended_at = clock()")
    assert await adopt(second) == 0


async def test_reconcile_gives_back_what_is_queued_and_on_nobodys_list(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn)
    await claim(runner)
    assert await repair(conn) == []
    await conn.execute("delete from dispatch")
    assert await repair(conn) == ["dispatch_missing"]
    assert await states(conn, run_id) == {"t0": "available"}
    assert await violations(conn) == []


async def test_why_tells_who_looks_after_a_queued_task_and_what_was_wrong(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, 2)
    rows = await claim(runner)
    told = await _why(conn, run_id, 1)
    assert f"by runner r{runner.session}, 0 ahead; not submitted yet" in told
    sessions = [row.session for row in rows]
    await runners.note_tries(conn, owner=runner.session, sessions=sessions)
    trouble = {"session": rows[1].session, "trouble": "quota exceeded", "seconds": 60}
    await runners.note_troubles(conn, owner=runner.session, troubles=[trouble])
    told = await _why(conn, run_id, 1)
    assert "submission was tried once " in told and "next try" in told and told.endswith(": quota exceeded")
    await runners.note_submitted(conn, owner=runner.session, sessions=sessions)
    assert "executor far accepted it" in await _why(conn, run_id, 1)
    await Runner.join(conn, executor="other")
    await conn.execute("update runner set ended_at = clock() where session = %s", [runner.session])
    assert "no live runner of executor far that serves queue default" in await _why(conn, run_id, 1)


async def test_why_counts_those_that_its_own_runner_has_still_to_hand_over_before_it(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, 5)
    elsewhere, submitted, begun, _ahead, _asked = await claim(runner)
    other = await Runner.join(conn, executor="far")
    await conn.execute("update dispatch set queued_at = queued_at - interval '1 second' * (5 - idx)")
    await conn.execute("update dispatch set owner = %s where session = %s", [other.session, elsewhere.session])
    await runners.note_submitted(conn, owner=runner.session, sessions=[submitted.session])
    assert await begin(conn, session=begun.session, epoch=begun.epoch)
    assert f"by runner r{runner.session}, 1 ahead" in await _why(conn, run_id, 4)
    await conn.execute("update runner set ended_at = clock() where session = %s", [runner.session])
    assert "by a runner that stopped responding, 1 ahead" in await _why(conn, run_id, 4), (
        "another one is there to adopt it"
    )


async def test_why_counts_what_a_runner_looks_after_elsewhere_as_busy_slots(conn: AsyncConnection) -> None:
    runner, run_id = await world(conn, 3, slots=2)
    assert len(await claim(runner)) == 2
    assert "2/2 slots of its runners busy" in await _why(conn, run_id, 2)


async def _why(conn: AsyncConnection, run_id: int, idx: int) -> str:
    return describe((await explain(conn, run_id=run_id, task=f"t{idx}")).reasons[0])


async def test_an_agent_is_not_checked_by_peers_while_its_runner_lives(conn: AsyncConnection) -> None:
    runner, _ = await world(conn)
    (row,) = await claim(runner)
    assert await begin(conn, session=row.session, epoch=row.epoch)

    async def neighbours() -> set[int]:
        found = await runners.peers(conn, host="far", boot_id="", pid_namespace="")
        return {each.session for each in found}

    assert await neighbours() == set()
    await conn.execute("update runner set ended_at = clock() where session = %s", [runner.session])
    assert await neighbours() == {row.session}
