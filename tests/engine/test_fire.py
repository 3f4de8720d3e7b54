"""fire: each due instant gives one run or one skip record, whoever fires and however often."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules
from evertick.domain.access import Actor
from evertick.domain.errors import NotLeader
from evertick.engine.dags import delete, pause, unpause
from evertick.engine.fire_schedules import ScheduleHalf, fire_planned, fire_schedules, plan_next_fires
from evertick.engine.shards import acquire_shard, renew_shard
from tests.engine import invariants
from tests.engine.plans import plant
from tests.engine.world import OWN_LOCKS, T0, Runner, later, lead, make_dag, put, set_clock, start, value
from tests.waiting import eventually

EVERY = "@every 10s"


async def fire_times(conn: AsyncConnection) -> list[float]:
    cursor = await conn.execute("select fire_at from run where fire_at is not null order by fire_at")
    return [(row[0] - T0).total_seconds() for row in await cursor.fetchall()]


@pytest.mark.requirement("R2", "R3", "M2", "F2")
async def test_a_due_schedule_becomes_a_run_and_its_cursor_moves_with_it(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 0
    await set_clock(conn, later(10))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 1
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 0
    assert await fire_times(conn) == [10]
    assert await value(conn, "select next_due from schedule_state") == later(20)
    assert len(await (await Runner.join(conn)).claim()) == 1


@pytest.mark.requirement("I7")
async def test_after_downtime_the_latest_fires_and_the_rest_is_one_skip_record(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    await set_clock(conn, later(3605))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fire_times(conn) == [3600]
    cursor = await conn.execute("select first_at, last_at, count, reason from skip_record")
    assert await cursor.fetchall() == [(later(10), later(3590), 359, "misfire_latest")]


@pytest.mark.requirement("I3", "E1")
async def test_many_leaders_that_fire_at_once_make_one_run_per_instant(database: str) -> None:
    """The election switched off: several connections all act with the valid epoch, and the schema alone must hold."""
    async with await connect(database, purpose=Purpose.SCHEDULER) as conn:
        await set_clock(conn, T0)
        epoch = await lead(conn)
        for number in range(40):
            await put(conn, make_dag(f"tick{number}", {"a": []}, every=EVERY))
    rivals = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(6)]
    try:
        for second in (10, 20, 30):
            for rival in rivals:
                await set_clock(rival, later(second))
            await asyncio.gather(
                *(fire_schedules(rival, shard=0, epoch=epoch, batch=7 + n) for n, rival in enumerate(rivals))
            )
            for _ in range(10):
                await fire_schedules(rivals[0], shard=0, epoch=epoch, batch=100)
        assert await value(rivals[0], "select count(*) from run") == 120
        assert await value(rivals[0], "select count(distinct (schedule_id, fire_at)) from run") == 120
        assert await value(rivals[0], "select count(*) from ready_task") == 120
    finally:
        for rival in rivals:
            await rival.close()


@pytest.mark.requirement("I2")
async def test_a_paused_schedule_never_fires_and_goes_on_after_now(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    await pause(conn, dag="tick", actor=Actor("ann"))
    await set_clock(conn, later(35))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    await unpause(conn, dag="tick", actor=Actor("ann"))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    cursor = await conn.execute("select first_at, last_at, count, reason from skip_record")
    assert await cursor.fetchall() == [(later(10), later(30), 3, "paused")]
    await set_clock(conn, later(40))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fire_times(conn) == [40]


async def test_pausing_first_settles_what_was_due(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    await set_clock(conn, later(12))
    await pause(conn, dag="tick", actor=Actor("ann"))
    assert await fire_times(conn) == [10]


@pytest.mark.requirement("I1", "I2", "S1", "S2")
async def test_an_edit_settles_the_old_schedule_and_starts_the_new_one_from_now(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    facts = "select coalesce(string_agg(r::text, ',' order by run_id), '') from run r where run_id = 1"
    await set_clock(conn, later(12))
    await put(conn, make_dag("tick", {"a": []}, every="@every 7s"))
    assert await fire_times(conn) == [10]
    fact = await value(conn, facts)
    assert await value(conn, "select version from schedule") == 2
    await set_clock(conn, later(30))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    elapsed = timedelta(seconds=7)
    expected = ((later(30) - later(0).replace(year=1970)) // elapsed) * elapsed + later(0).replace(year=1970) - T0
    assert await fire_times(conn) == [10, expected.total_seconds()]
    assert await value(conn, facts) == fact
    assert await invariants.violations(conn) == []


async def test_publishing_the_same_dag_again_keeps_version_and_cursor(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    dag = make_dag("tick", {"a": [], "b": ["a"]}, every=EVERY)
    first = await put(conn, dag)
    before = await value(conn, "select md5(string_agg(s::text, '')) from schedule_state s")
    await set_clock(conn, later(4))
    for _ in range(20):
        assert await put(conn, dag) == first
    assert await value(conn, "select count(*) from dag_version") == 1
    assert await value(conn, "select md5(string_agg(s::text, '')) from schedule_state s") == before


async def test_a_removed_schedule_stops_and_comes_back_under_the_same_id(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    await put(conn, make_dag("tick", {"a": []}))
    await set_clock(conn, later(100))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    assert await value(conn, "select count(*) from schedule") == 1
    assert await value(conn, "select next_due from schedule_state") == later(110)
    await delete(conn, dag="tick", actor=Actor("ann"))
    await set_clock(conn, later(200))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0


async def test_a_run_keeps_the_version_it_started_with(conn: AsyncConnection) -> None:
    old = await put(conn, make_dag("tick", {"a": [], "b": ["a"]}))
    run = await start(conn, "tick")
    new = await put(conn, make_dag("tick", {"a": [], "c": ["a"]}))
    assert new != old
    runner = await Runner.join(conn)
    assert await runner.drain() == ["a", "b"]
    assert await value(conn, "select version_id from run where run_id = %s", run) == old


async def test_an_old_leader_can_change_nothing(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    old = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    await set_clock(conn, later(10))
    await conn.execute("update shard set lease_until = clock() - interval '1 s'")
    new = await acquire_shard(conn, shard=0, owner="rival", seconds=5)
    assert new == old + 1
    with pytest.raises(NotLeader):
        await fire_schedules(conn, shard=0, epoch=old, batch=10)
    assert await fire_times(conn) == []
    assert not await renew_shard(conn, shard=0, epoch=old, seconds=5)
    assert await acquire_shard(conn, shard=0, owner="third", seconds=5) is None


async def test_a_takeover_waits_for_the_old_leaders_open_transaction(database: str) -> None:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as old,
        await connect(database, purpose=Purpose.SCHEDULER) as new,
    ):
        epoch = await lead(old)
        await old.execute("update shard set lease_until = clock() - interval '1 s'")
        async with old.transaction():
            await old.execute("select fence(0::smallint, %s)", [epoch])
            taking = asyncio.create_task(acquire_shard(new, shard=0, owner="new", seconds=5))
            probe = f"select count(*) from {OWN_LOCKS} where locktype = 'advisory' and not granted"
            await eventually(lambda: value(old, probe))
            assert not taking.done()
        assert await taking == epoch + 1


async def test_a_schedule_that_cannot_be_read_is_quarantined_and_the_others_fire(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    for name in ("good", "bad", "fine"):
        await put(conn, make_dag(name, {"a": []}, every=EVERY))
    await conn.execute(
        'update schedule c set spec = \'{"kind": "cron", "expression": "99 * * * *"}\' from dag d'
        " where d.dag_id = c.dag_id and d.name = 'bad'"
    )
    await set_clock(conn, later(10))
    done = await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert (done.settled, len(done.quarantined)) == (2, 1)
    shown = await schedules.list_all(conn, dag="bad")
    assert shown[0].error is not None and "99" in shown[0].error


async def test_a_row_that_the_database_refuses_is_found_by_halving(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    for number in range(9):
        await put(conn, make_dag(f"d{number}", {"a": []}, every=EVERY))
    await conn.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin if new.dag_id = 5 then"
        " raise exception 'poison' using errcode = '23514'; end if; return new; end $$"
    )
    await conn.execute("create trigger poison before insert on run for each row execute function refuse()")
    await set_clock(conn, later(10))
    done = await fire_schedules(conn, shard=0, epoch=epoch, batch=100)
    assert (done.settled, len(done.quarantined)) == (8, 1)
    assert await value(conn, "select count(*) from run") == 8


@pytest.mark.requirement("H1", "I3")
async def test_a_spike_is_drained_batch_by_batch_and_nothing_fires_twice(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}))
    await plant(conn, "spike", 500, due=10)
    await set_clock(conn, later(11))
    done = [await fire_schedules(conn, shard=0, epoch=epoch, batch=100) for _ in range(6)]
    assert [each.settled for each in done] == [100] * 5 + [0]
    assert [each.has_more for each in done] == [True] * 5 + [False]
    assert await value(conn, "select count(distinct schedule_id) from run where fire_at = %s", later(10)) == 500
    assert await value(conn, "select count(*) from run") == await value(conn, "select count(*) from ready_task") == 500


@pytest.mark.requirement("H1")
async def test_what_becomes_due_during_a_spike_does_not_wait_for_its_end(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}))
    await plant(conn, "spike", 200, due=10)
    await plant(conn, "other", 12, due=11)
    await plant(conn, "newest", 5, due=12)
    await plant(conn, "future", 5, due=14)
    await set_clock(conn, later(13))

    async def fired_at(second: float) -> object:
        return await value(conn, "select count(*) from run where fire_at = %s", later(second))

    await fire_schedules(conn, shard=0, epoch=epoch, batch=80)
    assert [await fired_at(second) for second in (10, 11, 12)] == [70, 5, 5], "an eighth for those that came last"
    await fire_schedules(conn, shard=0, epoch=epoch, batch=80)
    assert [await fired_at(second) for second in (10, 11, 12)] == [143, 12, 5]
    await fire_schedules(conn, shard=0, epoch=epoch, batch=80)
    assert [await fired_at(second) for second in (10, 11, 12, 14)] == [200, 12, 5, 0]


@pytest.mark.requirement("H1", "I2")
async def test_those_that_came_last_are_chosen_like_the_others(conn: AsyncConnection) -> None:
    """Paused, set aside, passed over, of another shard, not due: none of them takes a place of a spike."""
    await set_clock(conn, T0)
    await put(conn, make_dag("tick", {"a": []}))
    await plant(conn, "spike", 20, due=10)
    for name in ("paused", "aside", "elsewhere", "passed", "later", "live"):
        await plant(conn, name, 1, due=99 if name == "later" else 12)
    state = "update schedule_state s set {} from schedule c where c.schedule_id = s.schedule_id and c.name = '{}1'"
    for name, change in (("paused", "is_paused = true"), ("aside", "error = 'odd'"), ("elsewhere", "shard = 1")):
        await conn.execute(state.format(change, name))  # type: ignore[arg-type]
    passed = await value(conn, "select schedule_id from schedule where name = 'passed1'")
    assert isinstance(passed, int)
    await set_clock(conn, later(13))
    due = await schedules.due(conn, shard=0, batch=16, passed_over=[passed])
    assert len(due) == 16 and [each.next_due for each in due] == [later(10)] * 15 + [later(12)]
    assert due[-1].schedule_id == await value(conn, "select schedule_id from schedule where name = 'live1'")
    few = await schedules.due(conn, shard=0, batch=7, passed_over=[])
    assert [each.next_due for each in few] == [later(10)] * 7, "an eighth of so few is none"
    everything = await schedules.due(conn, shard=0, batch=100, passed_over=[])
    assert len(everything) == len({each.schedule_id for each in everything}) == 22


@pytest.mark.requirement("H1")
async def test_two_that_share_the_work_take_different_schedules(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await put(conn, make_dag("tick", {"a": []}))
    await plant(conn, "spike", 40, due=10)
    await plant(conn, "newest", 10, due=12)
    await set_clock(conn, later(13))
    for half in ScheduleHalf:
        due = await schedules.due(conn, shard=0, batch=16, passed_over=[], half=half)
        assert {each.schedule_id % 2 for each in due} == {half}
        assert [each.next_due for each in due] == [later(10)] * 14 + [later(12)] * 2
    both = [
        each.schedule_id
        for half in ScheduleHalf
        for each in await schedules.due(conn, shard=0, batch=100, passed_over=[], half=half)
    ]
    assert len(both) == len(set(both)) == 50


@pytest.mark.requirement("I7")
async def test_a_day_that_never_was_is_on_record_as_skipped(conn: AsyncConnection) -> None:
    """Samoa went from the 29th to the 31st of December 2011."""

    def samoa(text: str) -> datetime:
        return datetime.fromisoformat(text + "Z")

    await set_clock(conn, samoa("2011-12-28T00:00"))
    epoch = await lead(conn)
    daily = {"kind": "cron", "expression": "0 12 * * *", "timezone": "Pacific/Apia"}
    await put(conn, make_dag("noon", {"a": []}, every=daily))
    await put(conn, make_dag("hourly", {"a": []}, every=daily | {"expression": "0 */6 * * *"}))
    for text in ("2011-12-28T22:00", "2011-12-29T22:00", "2011-12-30T22:00", "2011-12-31T22:00"):
        for _ in range(5):
            await set_clock(conn, samoa(text))
            await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    noon = "select array_agg(r.fire_at order by r.fire_at) from run r join dag d on d.dag_id = r.dag_id where d.name = 'noon'"
    fires = await value(conn, noon)
    assert fires == [samoa(f"2011-12-{day}T22:00") for day in (28, 29, 30, 31)], "22:00 in UTC is noon on either side"
    cursor = await conn.execute("select first_at, last_at, count, reason from skip_record where reason = 'never_was'")
    just_before = samoa("2011-12-30T10:00") - timedelta(microseconds=1)
    assert await cursor.fetchall() == [(just_before, just_before, 1, "never_was")], "and elapsed time lost nothing"


@pytest.mark.requirement("I7")
async def test_a_day_that_never_was_is_on_record_also_after_a_pause(conn: AsyncConnection) -> None:
    await set_clock(conn, datetime(2011, 12, 28, tzinfo=UTC))
    epoch = await lead(conn)
    every = {"kind": "cron", "expression": "0 0,12 * * *", "timezone": "Pacific/Apia"}
    await put(conn, make_dag("noon", {"a": []}, every=every))
    await pause(conn, dag="noon", actor=Actor("ann"))
    await set_clock(conn, datetime(2012, 1, 2, tzinfo=UTC))
    await unpause(conn, dag="noon", actor=Actor("ann"))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    cursor = await conn.execute("select count, reason from skip_record order by reason")
    assert await cursor.fetchall() == [(2, "never_was"), (10, "paused")]


@pytest.mark.requirement("I3")
async def test_what_was_planned_ahead_fires_at_its_instant_once_and_not_before(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("tick", {"a": []}, every=EVERY))
    ahead = await plan_next_fires(conn, shard=0, due_at=later(10), batch=10)
    assert ahead is not None and ahead.due_at == later(10)
    await set_clock(conn, later(9.999))
    assert (await fire_planned(conn, ahead, shard=0, epoch=epoch, batch=10)).settled == 0
    assert await value(conn, "select next_due from schedule_state") == later(10)
    await set_clock(conn, later(10))
    done = await fire_planned(conn, ahead, shard=0, epoch=epoch, batch=10)
    assert (done.settled, done.runs, done.lost, done.has_more) == (1, 1, [], False)
    assert (await fire_planned(conn, ahead, shard=0, epoch=epoch, batch=10)).settled == 0
    assert await fire_times(conn) == [10]
    assert await value(conn, "select next_due from schedule_state") == later(20)
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 0


@pytest.mark.requirement("I2", "E1")
async def test_a_plan_made_ahead_is_void_for_what_has_changed_since(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    for name in ("paused", "deleted", "as_it_was"):
        await put(conn, make_dag(name, {"a": []}, every=EVERY))
    ahead = await plan_next_fires(conn, shard=0, due_at=later(10), batch=10)
    assert ahead is not None and len(ahead.plans) == 3
    await pause(conn, dag="paused", actor=Actor("ann"))
    await delete(conn, dag="deleted", actor=Actor("ann"))
    await set_clock(conn, later(10))
    assert (await fire_planned(conn, ahead, shard=0, epoch=epoch, batch=10)).settled == 1
    assert await value(conn, "select d.name from run r join dag d on d.dag_id = r.dag_id") == "as_it_was"
    with pytest.raises(NotLeader):
        await fire_planned(conn, ahead, shard=0, epoch=epoch + 1, batch=10)


async def test_only_what_fits_and_can_be_planned_is_planned_ahead(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await lead(conn)
    assert await plan_next_fires(conn, shard=0, due_at=later(10), batch=10) is None
    for number in range(3):
        await put(conn, make_dag(f"tick{number}", {"a": []}, every=EVERY))
    assert await plan_next_fires(conn, shard=0, due_at=later(10), batch=3) is None
    assert await plan_next_fires(conn, shard=0, due_at=later(10), batch=4) is not None
    await conn.execute("update schedule set spec = '{}' where schedule_id = (select min(schedule_id) from schedule)")
    assert await plan_next_fires(conn, shard=0, due_at=later(10), batch=4) is None
