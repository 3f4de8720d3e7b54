"""What happens is written into the outbox in its own transaction, once per episode, and is sent by one leader at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import notifications
from evertick.db.queries.notifications import ClaimedDelivery
from evertick.domain.access import Actor
from evertick.domain.errors import Conflict, NotFound, NotLeader
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.domain.retention import Pace
from evertick.domain.retry import RetryPolicy
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import raise_alerts
from evertick.engine.notifications import (
    OutboxSettings,
    Room,
    claim_deliveries,
    maintain_outbox,
    retry_failed,
    retry_one,
)
from evertick.engine.retention import Kind, PruneGrant, prune_kind
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, select_tasks
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, value

HOOK, MAIL = "webhook:https://example.com/hook", "email:ops@example.com"
TRY_AGAIN = RetryPolicy(retries=1, delay_seconds=0)


def told(*events: NotificationEvent, sink: str = HOOK, every_time: bool = False) -> tuple[NotificationRuleSpec, ...]:
    return tuple(NotificationRuleSpec(event=event, sink=sink, every_time=every_time) for event in events)


async def said(conn: AsyncConnection) -> list[tuple[str, object, object, str]]:
    """Event, run, task and sink of everything in the outbox, in its order."""
    rows = await notifications.list_deliveries(conn)
    return [(each.event, each.run_id, each.fact.get("task"), each.sink) for each in reversed(rows)]


async def take(
    conn: AsyncConnection, epoch: int, *passed_over: str, each: int = 10, batch: int = 100
) -> list[ClaimedDelivery]:
    room = Room(passed_over=list(passed_over), each=each, limit=batch, seconds=30)
    return await claim_deliveries(conn, shard=0, epoch=epoch, room=room)


async def put_defaults(
    conn: AsyncConnection, epoch: int, *defaults: tuple[NotificationEvent, str], every_time: bool = False
) -> None:
    rows: list[dict[str, object]] = [
        {"event": event, "sink": sink, "every_time": every_time} for event, sink in defaults
    ]
    wish = OutboxSettings(defaults=rows, give_up_seconds=1e9, limit=10, most=10)
    await maintain_outbox(conn, shard=0, epoch=epoch, wish=wish)


async def give_up(conn: AsyncConnection, epoch: int, *, seconds: float, batch: int = 10) -> tuple[int, int]:
    """How many were given up, and how many still wait."""
    wish = OutboxSettings(defaults=[], give_up_seconds=seconds, limit=batch, most=100)
    done = await maintain_outbox(conn, shard=0, epoch=epoch, wish=wish)
    return done.given_up, done.waiting


async def write(conn: AsyncConnection, count: int, sink: str = HOOK) -> None:
    await conn.execute(
        "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at)"
        " select 0, %s, 'failure', '{}', clock(), clock(), clock() from generate_series(1, %s)",
        [sink, count],
    )


async def test_every_end_of_a_task_is_told_to_who_asked_for_it(conn: AsyncConnection) -> None:
    everything = told(
        NotificationEvent.SUCCESS, NotificationEvent.FAILURE, NotificationEvent.RETRY, NotificationEvent.SKIPPED
    )
    shape: dict[str, list[str]] = {"good": [], "bad": [], "lazy": [], "after": ["bad"], "quiet": []}
    loud = {name: {"notices": everything} for name in ("good", "lazy", "after")}
    await put(conn, make_dag("d", shape, per_task={**loud, "bad": {"notices": everything, "retry": TRY_AGAIN}}))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    await runner.drain({"bad": "failed", "lazy": "skipped", "quiet": "failed"})
    # What never ran because of another's failure is not told: that one was.
    assert sorted(await said(conn)) == sorted(
        [
            ("success", run_id, "good", HOOK),
            ("retry", run_id, "bad", HOOK),
            ("skipped", run_id, "lazy", HOOK),
            ("failure", run_id, "bad", HOOK),
        ]
    )


async def test_a_run_is_told_when_it_is_closed(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": []}, notices=told(NotificationEvent.SUCCESS, NotificationEvent.FAILURE)))
    runner = await Runner.join(conn)
    good = await start(conn, "d")
    await runner.drain()
    bad = await start(conn, "d")
    await runner.drain({"a": "failed"})
    canceled = await start(conn, "d")
    await cancel(conn, run_id=canceled, actor=Actor("ann"), reason="no")
    assert await said(conn) == [("success", good, None, HOOK), ("failure", bad, None, HOOK)]
    fact = (await notifications.list_deliveries(conn))[0].fact
    assert (fact["dag"], fact["state"], fact["run"]) == ("d", "failed", bad)


@pytest.mark.requirement("F7")
async def test_it_is_told_although_the_runner_was_killed(conn: AsyncConnection) -> None:
    await put(
        conn,
        make_dag(
            "d",
            {"a": []},
            task_rerun_on_loss=False,
            task_notices=told(NotificationEvent.FAILURE),
            notices=told(NotificationEvent.FAILURE),
        ),
    )
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    await runner.claim()
    await mark_runner_dead(conn, session=runner.session, reason="agent_lost: it is gone", infra_retries=3)
    assert await said(conn) == [("failure", run_id, "a", HOOK), ("failure", run_id, None, HOOK)]
    assert {each.fact.get("reason") for each in await notifications.list_deliveries(conn)} == {
        "agent_lost: it is gone",
        "a: agent_lost: it is gone",
    }


async def test_the_message_of_a_failed_run_has_the_reasons_of_its_tasks(conn: AsyncConnection) -> None:
    shape: dict[str, list[str]] = {"a": [], "b": [], "c": [], "d": [], "e": ["a"]}
    await put(conn, make_dag("d", shape, notices=told(NotificationEvent.FAILURE), run_timeout_seconds=60))
    await start(conn, "d")
    runner = await Runner.join(conn)
    for claim in await runner.claim():
        await runner.finish(claim, "failed", reason=f"exited with code {claim.idx}")
    (sent,) = await notifications.list_deliveries(conn)
    lines = ["a: exited with code 0", "b: exited with code 1", "c: exited with code 2", "and 1 more failed task"]
    assert sent.fact["reason"] == "\n".join(lines)


async def test_nothing_is_told_where_the_move_was_refused(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": []}, task_notices=told(NotificationEvent.SUCCESS)))
    await start(conn, "d")
    one, two = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await one.claim()
    assert await two.finish(claim) != []
    assert await said(conn) == []
    await one.finish(claim)
    await one.finish(claim)
    assert len(await said(conn)) == 1


async def scheduled(conn: AsyncConnection, **options: object) -> int:
    await set_clock(conn, T0)
    await put(conn, make_dag("d", {"a": []}, every="@every 100s", **options))
    return await lead(conn)


async def play(conn: AsyncConnection, epoch: int, *kinds: str) -> None:
    """One fire after the other, each ending so."""
    runner = await Runner.join(conn)
    runs = int(str(await value(conn, "select count(*) from run")))
    for number, kind in enumerate(kinds, runs + 1):
        await set_clock(conn, later(100 * number))
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
        await runner.drain({"a": kind})


async def test_a_schedule_that_keeps_failing_is_told_once_per_episode(conn: AsyncConnection) -> None:
    loud = told(NotificationEvent.FAILURE, sink=MAIL, every_time=True)
    epoch = await scheduled(
        conn, notices=told(NotificationEvent.FAILURE), task_notices=(*told(NotificationEvent.FAILURE), *loud)
    )
    await play(conn, epoch, "failed", "failed", "success", "failed")
    found = await said(conn)
    assert [run for _, run, task, sink in found if (task, sink) == ("a", HOOK)] == [1, 4]
    assert [run for _, run, task, sink in found if (task, sink) == (None, HOOK)] == [1, 4]
    assert [run for _, run, task, sink in found if sink == MAIL] == [1, 2, 4]
    assert await value(conn, "select failures from failure_streak where task = ''") == 1
    # The same run again is the same episode.
    await clear(conn, run_id=4, chosen=await select_tasks(conn, run_id=4), actor=Actor("ann"))
    await (await Runner.join(conn)).drain({"a": "failed"})
    assert await value(conn, "select failures from failure_streak where task = ''") == 2
    assert len([1 for _, run, task, sink in await said(conn) if (run, task, sink) == (4, None, HOOK)]) == 1


async def test_runs_that_somebody_starts_are_told_each_time(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": []}, notices=told(NotificationEvent.FAILURE)))
    runner = await Runner.join(conn)
    for _ in range(2):
        await start(conn, "d")
        await runner.drain({"a": "failed"})
    assert [run for _, run, _, _ in await said(conn)] == [1, 2]
    assert await value(conn, "select count(*) from failure_streak") == 0


async def test_the_settings_of_the_leader_hold_for_every_dag(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn, start_within_seconds=10)
    both = [(NotificationEvent.FAILURE, HOOK), (NotificationEvent.DEADLINE, MAIL)]
    await put_defaults(conn, epoch, *both)
    await play(conn, epoch, "success", "failed", "failed", "success")
    assert await said(conn) == [("failure", 2, None, HOOK)]
    # The episode of a DAG that asks for nothing itself ends with a success, too.
    assert await value(conn, "select count(*) from failure_streak") == 0
    await set_clock(conn, later(500))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    await set_clock(conn, later(511))
    await raise_alerts(conn, shard=0, epoch=epoch, unfired_seconds=60, limit=10)
    await raise_alerts(conn, shard=0, epoch=epoch, unfired_seconds=60, limit=10)
    assert (await said(conn))[1:] == [("deadline", 5, None, MAIL)]
    await put_defaults(conn, epoch, (NotificationEvent.FAILURE, HOOK), every_time=True)
    assert await value(conn, "select array_agg(event || every_time) from default_notification_rule") == ["failuretrue"]
    with pytest.raises(NotLeader):
        await put_defaults(conn, epoch - 1)


async def test_a_dags_own_deadline_and_the_default_to_one_sink_are_one_message(conn: AsyncConnection) -> None:
    epoch = await scheduled(
        conn, start_within_seconds=10, notices=told(NotificationEvent.DEADLINE, NotificationEvent.FAILURE)
    )
    both = [(NotificationEvent.FAILURE, HOOK), (NotificationEvent.DEADLINE, HOOK)]
    await put_defaults(conn, epoch, *both)
    await set_clock(conn, later(100))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    await set_clock(conn, later(111))
    await raise_alerts(conn, shard=0, epoch=epoch, unfired_seconds=60, limit=10)
    await (await Runner.join(conn)).drain({"a": "failed"})
    assert await said(conn) == [("deadline", 1, None, HOOK), ("failure", 1, None, HOOK)]
    fact = (await notifications.list_deliveries(conn))[1].fact
    assert (fact["alert"], fact["schedule"]) == ("not_started", "main")


async def test_work_that_nobody_asked_about_writes_nothing(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await play(conn, epoch, "failed", "failed")
    assert await said(conn) == []
    assert await value(conn, "select count(*) from failure_streak") == 0


# Sending ----------------------------------------------------------------------------------------------------


async def test_what_is_taken_is_nobody_elses_for_a_while(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await write(conn, 1)
    (first,) = await take(conn, epoch)
    assert await take(conn, epoch) == []
    # Its taker died: the next one gets it under the same id, and the old one has nothing more to say.
    await set_clock(conn, later(31))
    (again,) = await take(conn, await lead(conn))
    assert (again.delivery_id, again.attempts) == (first.delivery_id, 2)
    assert not await notifications.record(conn, first, state="failed", answer="no", rest_seconds=0)
    assert await notifications.record(conn, again, state="sent", answer="HTTP 200", rest_seconds=0)
    assert not await notifications.record(conn, again, state="failed", answer="no", rest_seconds=0)
    (row,) = await notifications.list_deliveries(conn)
    assert (row.state, row.answer, row.ended_at) == ("sent", "HTTP 200", later(31))
    await set_clock(conn, later(100))
    assert await take(conn, await lead(conn)) == []


async def test_only_the_leader_takes_and_gives_up(conn: AsyncConnection) -> None:
    old = await scheduled(conn)
    await write(conn, 1)
    await lead(conn)
    with pytest.raises(NotLeader):
        await take(conn, old)
    with pytest.raises(NotLeader):
        await give_up(conn, old, seconds=0)


async def test_a_sink_with_many_waiting_leaves_room_for_the_others(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await write(conn, 50, "webhook:https://dead.example")
    await write(conn, 2, "webhook:https://a.example")
    await write(conn, 2, "webhook:https://z.example")
    taken = [each.sink[16:] for each in await take(conn, epoch, each=3)]
    assert sorted(taken) == ["a.example"] * 2 + ["dead.example"] * 3 + ["z.example"] * 2
    assert await take(conn, epoch, "webhook:https://dead.example") == []
    assert len(await take(conn, epoch, each=100, batch=5)) == 5


async def test_a_failed_one_waits_for_its_time(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await write(conn, 1)
    (taken,) = await take(conn, epoch)
    assert await notifications.record(conn, taken, state="waiting", answer="HTTP 503", rest_seconds=60)
    await set_clock(conn, later(59))
    assert await take(conn, epoch) == []
    await set_clock(conn, later(60))
    assert len(await take(conn, epoch)) == 1


async def test_what_has_waited_too_long_is_given_up_but_not_while_it_is_sent(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await write(conn, 3)
    (taken,) = await take(conn, epoch, each=1)
    await set_clock(conn, later(10))
    assert await give_up(conn, epoch, seconds=60) == (0, 3)
    assert await give_up(conn, epoch, seconds=5, batch=1) == (1, 2)
    assert await give_up(conn, epoch, seconds=5) == (1, 1)
    assert await notifications.record(conn, taken, state="sent", answer="", rest_seconds=0)
    assert {each.state for each in await notifications.list_deliveries(conn)} == {"sent", "failed"}


async def test_people_try_failed_ones_again_and_only_those(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await write(conn, 2)
    await write(conn, 1, MAIL)
    one, two, three = sorted(await take(conn, epoch), key=lambda each: each.delivery_id)
    await notifications.record(conn, one, state="sent", answer="", rest_seconds=0)
    for each in (two, three):
        await notifications.record(conn, each, state="failed", answer="HTTP 404", rest_seconds=0)
    with pytest.raises(Conflict, match="was already sent"):
        await retry_one(conn, delivery_id=one.delivery_id, actor=Actor("ann"))
    with pytest.raises(NotFound, match="There is no notification 99"):
        await retry_one(conn, delivery_id=99, actor=Actor("ann"))
    await retry_one(conn, delivery_id=two.delivery_id, actor=Actor("ann"))
    with pytest.raises(Conflict, match="is still being tried"):
        await retry_one(conn, delivery_id=two.delivery_id, actor=Actor("ann"))
    assert await retry_failed(conn, sink=HOOK, actor=Actor("ann")) == 0
    assert await retry_failed(conn, sink=None, actor=Actor("ann")) == 1
    again = await take(conn, epoch)
    assert {(each.delivery_id, each.attempts) for each in again} == {(two.delivery_id, 1), (three.delivery_id, 1)}
    assert await value(conn, "select count(*) from audit_log where action = 'retry_notifications'") == 2


async def test_what_is_over_is_pruned_and_what_waits_is_not(conn: AsyncConnection) -> None:
    epoch = await scheduled(conn)
    await write(conn, 2)
    (taken,) = await take(conn, epoch, each=1)
    await notifications.record(conn, taken, state="sent", answer="", rest_seconds=0)
    given = PruneGrant(shard=0, epoch=epoch, before=later(1000), actor=Actor("test"), entry=None)
    assert (
        await prune_kind(conn, replace(given, before=later(-1)), Kind.NOTIFICATIONS, pace=Pace(batch=10))
    ).pruned == 0
    assert (await prune_kind(conn, given, Kind.NOTIFICATIONS, pace=Pace(batch=10))).pruned == 1
    assert [each.state for each in await notifications.list_deliveries(conn)] == ["waiting"]


@pytest.mark.requirement("F7")
async def test_taking_reads_a_handful_of_rows_however_many_wait(conn: AsyncConnection) -> None:
    """50,000 wait for a sink that is passed over; a look costs what it costs with none."""
    epoch = await scheduled(conn)
    await write(conn, 50_000, "webhook:https://dead.example")
    await write(conn, 1)
    await conn.execute("analyze outbox")

    async def read() -> int:
        query = (
            "select pg_stat_force_next_flush(), coalesce(idx_tup_fetch, 0) + seq_tup_read"
            " from pg_stat_user_tables where relname = 'outbox'"
        )
        cursor = await conn.execute(query)  # type: ignore[arg-type]
        row = await cursor.fetchone()
        assert row is not None
        return int(row[1])

    await read()
    before = await read()
    assert len(await take(conn, epoch, "webhook:https://dead.example")) == 1
    await read()
    assert await read() - before < 50


async def test_what_a_runner_gives_back_is_no_retry(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": []}, task_notices=told(NotificationEvent.RETRY)))
    await start(conn, "d")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "given_back")
    assert await said(conn) == []


async def test_the_success_of_one_task_ends_no_other_ones_episode(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await put(
        conn, make_dag("d", {"a": [], "b": []}, every="@every 100s", task_notices=told(NotificationEvent.FAILURE))
    )
    epoch = await lead(conn)
    await play(conn, epoch, "failed", "failed")
    assert [(run, task) for _, run, task, _ in await said(conn)] == [(1, "a")]
    assert await value(conn, "select failures from failure_streak where task = 'a'") == 2


async def test_a_row_in_somebodys_hands_is_passed_over(conn: AsyncConnection, database: str) -> None:
    epoch = await scheduled(conn)
    await write(conn, 3)
    async with await connect(database, purpose=Purpose.SCHEDULER) as other, other.transaction():
        await other.execute("select from outbox where delivery_id = 1 for update")
        taken = await take(conn, epoch, each=2)
        assert sorted(each.delivery_id for each in taken) == [2, 3]
        for each in taken:
            await notifications.record(conn, each, state="waiting", answer="no", rest_seconds=0)
        await set_clock(conn, later(10))
        assert await give_up(conn, epoch, seconds=5) == (2, 1)
        await other.execute("select from outbox where delivery_id = 2 for update")
        assert await retry_failed(conn, sink=None, actor=Actor("ann")) == 1
