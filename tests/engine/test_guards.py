"""Guards of attempts: who may claim and report, and what each leaves alone. One test per guard.

`make mutants` removes each guard and expects one of these, or another test, to go red.
"""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel, trigger_run
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, run_state, set_clock, start, states, value

ONE: dict[str, list[str]] = {"a": []}
THREE: dict[str, list[str]] = {"a": [], "b": [], "c": []}
CHAIN = {"a": [], "b": ["a"]}
RETRIED = RetryPolicy(retries=3, delay_seconds=0)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    """One connection is enough here, so nothing is committed."""
    return rollback_conn


async def one_task(conn: AsyncConnection, **options: object) -> int:
    await put(conn, make_dag("one", ONE, **options))
    return await start(conn, "one")


# claim ---------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("K11")
async def test_claim_gives_nothing_to_a_session_that_never_joined(conn: AsyncConnection) -> None:
    await one_task(conn)
    await Runner.join(conn)
    assert await Runner(conn, session=999_999).claim() == []


async def test_claim_gives_nothing_to_a_runner_that_is_gone(conn: AsyncConnection) -> None:
    await one_task(conn)
    runner, _other = await Runner.join(conn), await Runner.join(conn)
    await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)
    assert await runner.claim() == []


@pytest.mark.requirement("K8")
async def test_claim_takes_no_more_than_there_is_room_for_over_all_queues(conn: AsyncConnection) -> None:
    queues = {"a": {"queue": "x"}, "b": {"queue": "y"}, "c": {"queue": "y"}}
    await put(conn, make_dag("three", THREE, per_task=queues))
    await start(conn, "three")
    runner = await Runner.join(conn)
    assert len(await runner.claim(2, queues=("x", "y"))) == 2
    assert len(await runner.claim(2, queues=("x", "y"))) == 1


# finish --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F8")
async def test_finish_by_another_session_leaves_the_owners_lease(conn: AsyncConnection) -> None:
    await one_task(conn)
    owner, other = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await owner.claim()
    await other.finish(claim)
    assert await value(conn, "select session from lease") == owner.session


@pytest.mark.requirement("F8")
async def test_finish_of_an_old_epoch_leaves_the_lease_of_the_new_one(conn: AsyncConnection) -> None:
    await one_task(conn)
    runner = await Runner.join(conn)
    (old,) = await runner.claim()
    await runner.finish(old, "given_back")
    (new,) = await runner.claim()
    assert await runner.finish(old) == [(key_of(old), old.epoch)]
    assert await value(conn, "select epoch from lease") == new.epoch


@pytest.mark.requirement("F5")
async def test_finish_refuses_what_was_reported_about_an_attempt_before_the_one_that_ended(
    conn: AsyncConnection,
) -> None:
    await one_task(conn)
    runner = await Runner.join(conn)
    (old,) = await runner.claim()
    await runner.finish(old, "given_back")
    (new,) = await runner.claim()
    await runner.finish(new)
    assert await runner.finish(new) == []
    assert await runner.finish(old) == [(key_of(old), old.epoch)]


@pytest.mark.requirement("F5")
async def test_finish_refuses_another_session_also_when_the_attempt_has_ended(conn: AsyncConnection) -> None:
    await one_task(conn)
    runner, other = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim)
    assert await other.finish(claim) == [(key_of(claim), claim.epoch)]


async def test_finish_refuses_only_what_is_stale_of_the_reports_that_come_together(conn: AsyncConnection) -> None:
    await put(conn, make_dag("three", THREE))
    await start(conn, "three")
    runner = await Runner.join(conn)
    one, two, three = await runner.claim()
    stale = three._replace(epoch=9)
    _, refused = await runner.step([(one, "given_back", {}), (two, "success", {}), (stale, "success", {})])
    assert refused == [(key_of(stale), 9)]


async def test_finish_keeps_only_superseded_attempts_as_history(conn: AsyncConnection) -> None:
    await one_task(conn, task_retry=RETRIED)
    runner = await Runner.join(conn)
    (first,) = await runner.claim()
    await runner.finish(first, "failed")
    (second,) = await runner.claim()
    await runner.finish(second)
    assert await value(conn, "select array_agg(epoch) from attempt") == [first.epoch]


async def test_finish_keeps_a_result_only_of_a_success(conn: AsyncConnection) -> None:
    await one_task(conn)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", no_retry=True, result=1)
    assert await value(conn, "select count(*) from result") == 0


async def test_finish_takes_a_log_that_was_shipped_already_once(conn: AsyncConnection) -> None:
    await one_task(conn)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    chunk = NewChunk(key=key_of(claim), epoch=claim.epoch, seq=0, until=5, content="first")
    await logs.append(conn, session=runner.session, chunks=[chunk])
    await runner.finish(claim, log="again", seq=0, until=5)
    assert await value(conn, "select array_agg(content) from log_chunk") == ["first"]


async def test_finish_waits_longer_with_every_loss(conn: AsyncConnection) -> None:
    run = await one_task(conn)
    leader = await lead(conn)
    await set_clock(conn, later(0))
    waits = []
    for _ in range(3):
        runner = await Runner.join(conn)
        await runner.claim()
        await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=5)
        waits.append(await value(conn, "select extract(epoch from not_before - clock())::int from task"))
        await set_clock(conn, later(1000 * len(waits)))
        await promote_due_tasks(conn, shard=0, epoch=leader, limit=10)
    assert waits == [None, 5, 10]
    assert await states(conn, run) == {"a": "available"}


@pytest.mark.parametrize("marked", ["success", "failed", "skipped"])
@pytest.mark.parametrize("reported", ["success", "failed", "killed"])
async def test_finish_ends_a_marked_task_as_it_was_marked(conn: AsyncConnection, marked: str, reported: str) -> None:
    run = await one_task(conn, task_retry=RETRIED)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await mark(conn, key_of(claim), state=marked, actor=Actor("me"))
    await runner.finish(claim, reported)
    assert await states(conn, run) == {"a": marked}


async def test_finish_cancels_what_was_asked_to_stop_instead_of_retrying_it(conn: AsyncConnection) -> None:
    run = await one_task(conn, task_retry=RETRIED)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await cancel(conn, run_id=run, actor=Actor("me"))
    await runner.finish(claim, "killed")
    assert (await states(conn, run), await run_state(conn, run)) == ({"a": "canceled"}, "canceled")


async def test_finish_of_a_retry_that_was_timed_for_the_same_instant_before_finds_its_timer(
    conn: AsyncConnection,
) -> None:
    run = await one_task(conn, task_retry=RETRIED)
    runner = await Runner.join(conn)
    await set_clock(conn, later(0))
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=5)
    await cancel(conn, run_id=run, actor=Actor("me"))
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    (again,) = await runner.claim()
    await runner.finish(again, "failed", retry_in=5)
    assert await states(conn, run) == {"a": "pending"}


async def test_giving_back_to_a_paused_dag_leaves_the_task_pending(conn: AsyncConnection) -> None:
    run = await one_task(conn)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await pause(conn, dag="one", actor=Actor("me"))
    await runner.finish(claim, "given_back")
    assert await states(conn, run) == {"a": "pending"}


# what there is not ------------------------------------------------------------------------------------------------


async def test_triggering_a_dag_that_has_no_version_makes_nothing(conn: AsyncConnection) -> None:
    dag_id = await value(conn, "insert into dag (name, file) values ('empty', 'f.py') returning dag_id")
    assert await trigger_run(conn, dag_id=int(str(dag_id)), params={}, key=None, actor=Actor("me")) is None


async def test_a_task_key_of_another_map_index_is_another_task(conn: AsyncConnection) -> None:
    run = await one_task(conn)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    stranger = claim._replace(map_index=3)
    assert await runner.finish(stranger) == [(TaskKey(run, 0, 3), claim.epoch)]
    assert await states(conn, run) == {"a": "running"}
