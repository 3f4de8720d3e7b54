"""What did not happen in time is an alert, once per episode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import notifications
from evertick.domain.access import Actor
from evertick.domain.errors import NotLeader
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.domain.retention import Pace
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import raise_alerts
from evertick.engine.retention import Kind, PruneGrant, prune_kind
from evertick.engine.runs import cancel, delete_run
from evertick.engine.schedules import pause_schedule
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, value

ONE: dict[str, list[str]] = {"a": []}


async def world(conn: AsyncConnection, **rules: float) -> int:
    await set_clock(conn, T0)
    dag = make_dag("one", ONE, every="@every 100s")
    (schedule,) = dag.schedules
    await put(conn, replace(dag, schedules=(replace(schedule, **rules),)))  # type: ignore[arg-type]
    return await lead(conn)


async def look(
    conn: AsyncConnection, epoch: int, seconds: float, *, fires: bool = False
) -> list[tuple[str, int | None, bool]]:
    await set_clock(conn, later(seconds))
    if fires:
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    found = await raise_alerts(conn, shard=0, epoch=epoch, unfired_seconds=60, limit=100)
    return [(each.kind, each.run_id, each.has_ended) for each in found]


async def test_a_run_that_does_not_start_or_finish_in_time_is_told_once(conn: AsyncConnection) -> None:
    epoch = await world(conn, start_within_seconds=10, finish_within_seconds=30)
    assert await look(conn, epoch, 100, fires=True) == []
    assert await look(conn, epoch, 109) == []
    assert await look(conn, epoch, 111) == [("not_started", 1, False)]
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    assert await look(conn, epoch, 131) == [("not_finished", 1, False)]
    assert await look(conn, epoch, 140) == []
    await runner.finish(claim)
    # The next run misses both again: the same episodes go on.
    assert await look(conn, epoch, 200, fires=True) == []
    assert await look(conn, epoch, 235) == []
    assert {
        (each.kind, each.count, each.run_id)
        for each in await notifications.list_alerts(conn, notifications.AlertFilter())
    } == {("not_started", 2, 1), ("not_finished", 2, 1)}
    await runner.drain()
    # And the one after it is in time.
    await look(conn, epoch, 300, fires=True)
    await runner.drain()
    assert sorted(await look(conn, epoch, 331)) == [("not_finished", 1, True), ("not_started", 1, True)]
    assert await notifications.list_alerts(conn, notifications.AlertFilter()) == []
    assert len(await notifications.list_alerts(conn, notifications.AlertFilter(ended=True))) == 2
    # What is late after that is a new episode.
    await look(conn, epoch, 400, fires=True)
    assert await look(conn, epoch, 411) == [("not_started", 4, False)]


async def test_what_starts_late_but_before_anybody_looks_was_late(conn: AsyncConnection) -> None:
    epoch = await world(conn, start_within_seconds=10)
    await look(conn, epoch, 100, fires=True)
    await set_clock(conn, later(112))
    await (await Runner.join(conn)).drain()
    assert await look(conn, epoch, 115) == [("not_started", 1, False)]


async def test_a_run_in_time_raises_nothing_and_its_deadlines_are_gone(conn: AsyncConnection) -> None:
    epoch = await world(conn, start_within_seconds=10, finish_within_seconds=30)
    await look(conn, epoch, 100, fires=True)
    assert await value(conn, "select count(*) from deadline") == 2
    await (await Runner.join(conn)).drain()
    assert await look(conn, epoch, 150) == []
    assert await value(conn, "select count(*) from deadline") == 0


async def test_a_schedule_without_deadlines_has_none(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await look(conn, epoch, 100, fires=True)
    assert await value(conn, "select count(*) from deadline") == 0


async def test_a_schedule_that_does_not_fire_is_told_until_it_does(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    assert await look(conn, epoch, 159) == []
    assert await look(conn, epoch, 161) == [("not_fired", None, False)]
    assert await look(conn, epoch, 190) == []
    assert [each.count for each in await notifications.list_alerts(conn, notifications.AlertFilter())] == [1]
    assert await look(conn, epoch, 195, fires=True) == [("not_fired", None, True)]


async def test_a_quarantined_schedule_raises_an_alert_until_it_is_paused(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await conn.execute("""update schedule set spec = '{"kind": "cron", "expression": "99 * * * *"}'""")
    assert await look(conn, epoch, 100, fires=True) == []
    assert await look(conn, epoch, 170) == [("not_fired", None, False)]
    await pause_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    assert await look(conn, epoch, 180) == [("not_fired", None, True)]


async def test_only_the_leader_raises(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await lead(conn)
    with pytest.raises(NotLeader):
        await look(conn, epoch, 200)


async def test_alerts_that_are_long_over_are_pruned(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await look(conn, epoch, 170)
    given = PruneGrant(shard=0, epoch=epoch, before=later(1000), actor=Actor("test"), entry=None)
    await set_clock(conn, later(2000))
    assert (await prune_kind(conn, given, Kind.ALERTS, pace=Pace(batch=10))).pruned == 0
    await look(conn, epoch, 900, fires=True)
    assert (await prune_kind(conn, given, Kind.ALERTS, pace=Pace(batch=10))).pruned == 1


# Tasks ---------------------------------------------------------------------------------------------------------------------

HOOK = "webhook:https://example.com/hook"
TOLD = (NotificationRuleSpec(event=NotificationEvent.DEADLINE, sink=HOOK),)
LATE: dict[str, object] = {"finish_within_seconds": 30.0, "notices": TOLD}


async def with_deadlines(conn: AsyncConnection, shape: dict[str, list[str]], *late: str) -> int:
    await set_clock(conn, T0)
    await put(conn, make_dag("one", shape, every="@every 100s", per_task=dict.fromkeys(late, LATE)))
    return await lead(conn)


async def told(conn: AsyncConnection) -> list[tuple[object, object, object]]:
    """Run, task and kind of everything in the outbox, in its order."""
    rows = await notifications.list_deliveries(conn)
    return [(each.run_id, each.fact.get("task"), each.fact["alert"]) for each in reversed(rows)]


async def test_a_task_that_has_not_ended_in_time_is_told_once_per_episode(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": [], "b": ["a"], "c": []}, "b")
    runner = await Runner.join(conn)
    await look(conn, epoch, 100, fires=True)
    assert await look(conn, epoch, 129) == []
    # It waits for another one, and has no row yet.
    assert await look(conn, epoch, 131) == [("not_finished", 1, False)]
    await look(conn, epoch, 200, fires=True)
    assert await look(conn, epoch, 231) == []
    assert [(each.task, each.count) for each in await notifications.list_alerts(conn, notifications.AlertFilter())] == [
        ("b", 2)
    ]
    await runner.drain()
    await look(conn, epoch, 300, fires=True)
    await runner.drain()
    assert await look(conn, epoch, 331) == [("not_finished", 1, True)]
    await look(conn, epoch, 400, fires=True)
    assert await look(conn, epoch, 431) == [("not_finished", 4, False)]
    assert await told(conn) == [(1, "b", "not_finished"), (4, "b", "not_finished")]
    assert await value(conn, "select count(*) from deadline") == 0


async def test_a_task_that_ended_late_before_anybody_looked_was_late(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": [], "b": []}, "a", "b")
    await look(conn, epoch, 100, fires=True)
    runner = await Runner.join(conn)
    (first,) = await runner.claim(1)
    await runner.finish(first)
    await set_clock(conn, later(131))
    await runner.drain()
    assert await look(conn, epoch, 132) == [("not_finished", 1, False)]
    assert [each.task for each in await notifications.list_alerts(conn, notifications.AlertFilter())] == ["b"]


@pytest.mark.parametrize("kind", ["success", "failed", "skipped"])
async def test_however_a_task_ends_it_is_in_time(conn: AsyncConnection, kind: str) -> None:
    epoch = await with_deadlines(conn, {"a": [], "b": ["a"]}, "a", "b")
    await look(conn, epoch, 100, fires=True)
    await (await Runner.join(conn)).drain({"a": kind})
    assert await look(conn, epoch, 131) == []
    assert await told(conn) == []


async def test_a_run_that_belongs_to_no_schedule_counts_from_its_start_and_each_is_told(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": []}, "a")
    await set_clock(conn, later(5))
    runs = [await start(conn, "one"), await start(conn, "one")]
    assert await look(conn, epoch, 34) == []
    assert await look(conn, epoch, 36) == [("not_finished", run_id, False) for run_id in runs]
    assert await look(conn, epoch, 40) == []
    assert await told(conn) == [(run_id, "a", "not_finished") for run_id in runs]
    assert await notifications.list_alerts(conn, notifications.AlertFilter(ended=True)) == [], (
        "no later run could end it"
    )


async def test_a_canceled_or_deleted_run_is_nobodys_concern(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": [], "b": ["a"]}, "b")
    canceled, gone = await start(conn, "one"), await start(conn, "one")
    await cancel(conn, run_id=canceled, actor=Actor("ann"), reason="no")
    await cancel(conn, run_id=gone, actor=Actor("ann"), reason="no")
    await delete_run(conn, run_id=gone, actor=Actor("ann"))
    assert await look(conn, epoch, 50) == []


async def test_a_deadline_that_is_taken_away_ends_its_episode(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": [], "b": []}, "a", "b")
    await look(conn, epoch, 100, fires=True)
    assert len(await look(conn, epoch, 131)) == 2
    await put(conn, make_dag("one", {"a": []}, every="@every 100s", per_task={"a": LATE}))
    assert await look(conn, epoch, 140) == [("not_finished", 1, True)]
    assert [each.task for each in await notifications.list_alerts(conn, notifications.AlertFilter())] == ["a"]


async def test_one_task_in_time_ends_no_episode_of_another_and_its_own_once(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": [], "b": []}, "a", "b")
    runner = await Runner.join(conn)
    await look(conn, epoch, 100, fires=True)
    assert len(await look(conn, epoch, 131)) == 2
    for seconds, changes in ((200, [("not_finished", 1, True)]), (300, [])):
        await look(conn, epoch, seconds, fires=True)
        for claim in await runner.claim(10):
            if claim.idx == 0:
                await runner.finish(claim)
        assert await look(conn, epoch, seconds + 31) == changes
    assert [(each.task, each.count) for each in await notifications.list_alerts(conn, notifications.AlertFilter())] == [
        ("b", 3)
    ]


async def test_a_run_that_ends_in_time_has_not_started_in_time_by_that(conn: AsyncConnection) -> None:
    epoch = await world(conn, start_within_seconds=10, finish_within_seconds=30)
    await look(conn, epoch, 100, fires=True)
    assert await look(conn, epoch, 111) == [("not_started", 1, False)]
    await (await Runner.join(conn)).drain()
    assert await look(conn, epoch, 131) == []


async def test_a_late_task_notifies_only_the_rules_for_late_tasks(conn: AsyncConnection) -> None:
    failure = NotificationRuleSpec(event=NotificationEvent.FAILURE, sink="email:ops@example.com")
    of_runs = NotificationRuleSpec(event=NotificationEvent.DEADLINE, sink="email:boss@example.com")
    task = {"finish_within_seconds": 30.0, "notices": (*TOLD, failure)}
    await set_clock(conn, T0)
    await put(conn, make_dag("one", ONE, every="@every 100s", notices=(of_runs,), per_task={"a": task}))
    epoch = await lead(conn)
    await look(conn, epoch, 100, fires=True)
    assert await look(conn, epoch, 131) == [("not_finished", 1, False)]
    assert [each.sink for each in await notifications.list_deliveries(conn)] == [HOOK]


async def test_a_schedule_that_is_removed_ends_its_episode(conn: AsyncConnection) -> None:
    epoch = await world(conn, start_within_seconds=10)
    await look(conn, epoch, 100, fires=True)
    assert await look(conn, epoch, 111) == [("not_started", 1, False)]
    await put(conn, make_dag("one", ONE))
    assert await look(conn, epoch, 120) == [("not_started", 1, True)]


async def test_deadlines_that_are_set_again_are_the_same(conn: AsyncConnection) -> None:
    epoch = await with_deadlines(conn, {"a": []}, "a")
    await conn.execute("update schedule set finish_within = 60")
    await look(conn, epoch, 100, fires=True)
    for _ in range(2):
        await conn.execute("select set_deadlines(array[1]::bigint[])")
        await conn.execute("select set_task_deadlines(array[1]::bigint[])")
    assert await value(conn, "select array_agg(kind order by kind) from deadline") == ["finish", "task"]


async def test_a_backfill_has_no_deadlines(conn: AsyncConnection) -> None:
    await with_deadlines(conn, {"a": []}, "a")
    await conn.execute(
        "insert into run (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)"
        " select dag_id, version_id, 'backfill', 'k', clock(), '{}', 'backfill 1', clock() from dag"
    )
    await conn.execute("select open_runs(array(select run_id from run), null)")
    assert await value(conn, "select count(*) from deadline") == 0


async def test_the_deadline_of_one_task_is_not_that_of_another_dag(conn: AsyncConnection) -> None:
    """Nor does whoever has none pay for it."""
    epoch = await with_deadlines(conn, {"a": []}, "a")
    await put(conn, make_dag("other", {"a": []}))
    await start(conn, "other")
    assert await value(conn, "select count(*) from deadline") == 0
    assert await look(conn, epoch, 50) == []
