"""Guards of schedules: firing, editing, publishing. One test per guard; see test_guards.py."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags, schedules
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.dags import delete
from evertick.engine.fire_schedules import fire_schedules, quarantine_schedule
from evertick.engine.schedules import put_schedule
from tests.engine.plans import ONE, fire_plan, plan, scheduled
from tests.engine.world import later, make_dag, put, set_clock, value

RETRIED = RetryPolicy(retries=3, delay_seconds=0)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    """One connection is enough here, so nothing is committed."""
    return rollback_conn


# fire ----------------------------------------------------------------------------------------------------------------


async def nothing_fired(conn: AsyncConnection) -> bool:
    counts = "select (select count(*) from run) + (select count(*) from skip_record)"
    return await value(conn, counts) == 0


@pytest.mark.requirement("M2")
async def test_a_plan_is_carried_out_once(conn: AsyncConnection) -> None:
    epoch, schedule = await scheduled(conn)
    assert await fire_plan(conn, epoch, plan(schedule)) == 1
    assert await fire_plan(conn, epoch, plan(schedule, fires=[later(90)])) == 0
    assert await value(conn, "select array_agg(fire_at) from run") == [later(60)]


@pytest.mark.requirement("I1")
async def test_a_plan_for_another_version_changes_nothing(conn: AsyncConnection) -> None:
    epoch, schedule = await scheduled(conn)
    assert await fire_plan(conn, epoch, plan(schedule, version=schedule.version + 1)) == 0
    assert await nothing_fired(conn)


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("change", ["is_paused = true", "error = 'broken'"])
async def test_a_plan_for_a_schedule_that_is_held_meanwhile_changes_nothing(conn: AsyncConnection, change: str) -> None:
    epoch, schedule = await scheduled(conn)
    await conn.execute(f"update schedule_state set {change}")
    assert await fire_plan(conn, epoch, plan(schedule)) == 0
    assert await nothing_fired(conn)


@pytest.mark.requirement("I3", "F3")
async def test_an_instant_that_has_its_run_gets_no_second_one(conn: AsyncConnection) -> None:
    epoch, schedule = await scheduled(conn)
    await fire_plan(conn, epoch, plan(schedule))
    again = plan(schedule, expected=later(120), fires=[later(60), later(120)], next_due=later(180))
    assert await fire_plan(conn, epoch, again) == 1
    assert await value(conn, "select array_agg(fire_at order by fire_at) from run") == [later(60), later(120)]
    assert await value(conn, "select count(*) from skip_record") == 1


@pytest.mark.requirement("I2")
async def test_a_plan_that_lost_among_plans_that_won_records_no_skip(conn: AsyncConnection) -> None:
    epoch, won = await scheduled(conn)
    await put(conn, make_dag("other", ONE, every="@every 60s"))
    (lost,) = await schedules.of_dag(conn, dag="other")
    assert await fire_plan(conn, epoch, plan(won), plan(lost, expected=later(1))) == 1
    assert await value(conn, "select array_agg(schedule_id) from skip_record") == [won.schedule_id]
    assert await value(conn, "select array_agg(schedule_id) from run") == [won.schedule_id]


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("change", ["is_paused = true", "error = 'broken'", "next_due = null"])
async def test_what_is_held_is_neither_due_nor_next(conn: AsyncConnection, change: str) -> None:
    await scheduled(conn)
    await set_clock(conn, later(100))
    assert len(await schedules.due(conn, shard=0, batch=10, passed_over=[])) == 1
    await conn.execute(f"update schedule_state set {change}")
    assert await schedules.due(conn, shard=0, batch=10, passed_over=[]) == []
    assert await schedules.next_due(conn, shard=0) == (None, later(100))


async def test_what_is_not_due_yet_does_not_fire(conn: AsyncConnection) -> None:
    epoch, _ = await scheduled(conn)
    await set_clock(conn, later(59.9))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 0
    assert await nothing_fired(conn)


async def test_a_quarantine_is_of_the_version_that_could_not_be_planned_and_keeps_its_first_reason(
    conn: AsyncConnection,
) -> None:
    epoch, _ = await scheduled(conn)
    await set_clock(conn, later(60))
    (due,) = await schedules.due(conn, shard=0, batch=10, passed_over=[])
    told = []
    for version, reason in [(due.version + 1, "other"), (due.version, "first"), (due.version, "second")]:
        told.append(
            await quarantine_schedule(
                conn,
                shard=0,
                epoch=epoch,
                schedule_id=due.schedule_id,
                version=version,
                reason=reason,
                is_tried_again=True,
            )
        )
    assert told == [False, True, False]
    assert await value(conn, "select error from schedule_state") == "first"


# publish -------------------------------------------------------------------------------------------------------------


async def test_publishing_without_a_schedule_twice_removes_it_once(conn: AsyncConnection) -> None:
    await scheduled(conn)
    for _ in range(2):
        await put(conn, make_dag("one", ONE))
    assert await value(conn, "select version from schedule") == 2
    assert await schedules.of_dag(conn, dag="one") == []


async def user_schedule(conn: AsyncConnection, **options: object) -> None:
    """A DAG with a schedule that somebody put by hand."""
    await put(conn, make_dag("one", ONE, **options))
    await put_schedule(
        conn, dag="one", schedule=NamedSchedule(name="mine", spec=parse_schedule("@every 9s")), actor=Actor("me")
    )


@pytest.mark.parametrize("every", [None, "@every 5s"])
async def test_a_schedule_that_somebody_put_outlives_publishing_with_or_without_others(
    conn: AsyncConnection, every: str | None
) -> None:
    await user_schedule(conn, every=every)
    await put(conn, make_dag("one", {"a": [], "b": ["a"]}, every=every))
    assert "mine" in {schedule.name for schedule in await schedules.of_dag(conn, dag="one")}


async def test_a_schedule_that_somebody_put_ends_with_its_dag(conn: AsyncConnection) -> None:
    await user_schedule(conn)
    await delete(conn, dag="one", actor=Actor("me"))
    assert await schedules.of_dag(conn, dag="one") == []


async def test_a_request_counts_once_for_a_schedule_that_is_there(conn: AsyncConnection) -> None:
    """After a removal the same request makes it anew, and another request never counts as the same."""
    mine = NamedSchedule(name="mine", spec=parse_schedule("@every 9s"))

    async def ask(request: str) -> int:
        return await put_schedule(conn, dag="one", schedule=mine, actor=Actor("me"), request=request)

    await put(conn, make_dag("one", ONE))
    assert [await ask(request) for request in ("r1", "r1", "r2")] == [1, 1, 2]
    await delete(conn, dag="one", actor=Actor("me"))
    await put(conn, make_dag("one", ONE))
    assert await ask("r2") == 4
    assert [schedule.name for schedule in await schedules.of_dag(conn, dag="one")] == ["mine"]


async def test_a_one_time_schedule_that_was_over_twice_is_one_skip(conn: AsyncConnection) -> None:
    await set_clock(conn, later(1000))
    once = f"@once {later(0).isoformat()}"
    for every in (once, None, once):
        await put(conn, make_dag("one", ONE, every=every))
    assert await value(conn, "select array_agg(first_at) from skip_record") == [later(0)]


async def test_an_import_error_that_stays_the_same_keeps_its_time(conn: AsyncConnection) -> None:
    for seconds in (0, 10):
        await set_clock(conn, later(seconds))
        await dags.put_import_error(conn, file="f.py", line=1, message="bad", detail="")
    assert await value(conn, "select occurred_at from import_error") == later(0)
    await dags.put_import_error(conn, file="f.py", line=2, message="bad", detail="")
    assert await value(conn, "select occurred_at from import_error") == later(10)
