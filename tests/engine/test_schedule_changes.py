"""One schedule changes without a deploy: what was due is settled, nothing fires as a surprise, and every version is on record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.errors import Conflict, InvalidSchedule, NotFound
from evertick.domain.schedules.computed import Instant, renew_at, renewed, with_instants
from evertick.domain.schedules.misfire import MisfirePolicy, delay_of
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, parse_schedule
from evertick.engine.dags import pause, unpause
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.schedules import (
    CatchUp,
    delete_schedule,
    pause_schedule,
    preview,
    put_schedule,
    reset_schedule,
    unpause_schedule,
)
from tests.engine import invariants
from tests.engine.world import T0, later, lead, make_dag, put, set_clock, value

ONE: dict[str, list[str]] = {"a": []}
ALL = CatchUp(policy=MisfirePolicy.ALL)


def every(text: str, name: str = "main", **rules: object) -> NamedSchedule:
    return NamedSchedule(name=name, spec=parse_schedule(text), **rules)  # type: ignore[arg-type]


async def fires(conn: AsyncConnection) -> list[float]:
    cursor = await conn.execute("select fire_at from run where fire_at is not null order by fire_at")
    return [(row[0] - T0).total_seconds() for row in await cursor.fetchall()]


async def skipped(conn: AsyncConnection) -> list[tuple[float, float, int, str]]:
    cursor = await conn.execute("select first_at, last_at, count, reason from skip_record order by first_at")
    rows = await cursor.fetchall()
    return [((a - T0).total_seconds(), (b - T0).total_seconds(), count, why) for a, b, count, why in rows]


async def world(conn: AsyncConnection, **options: object) -> int:
    await invariants.install(conn)
    await set_clock(conn, T0)
    await put(conn, make_dag("one", ONE, every="@every 10s", **options))
    return await lead(conn)


@pytest.mark.requirement("I2", "S3")
async def test_one_schedule_is_paused_and_goes_on_while_the_others_fire(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await put_schedule(conn, dag="one", schedule=every("@every 20s", "other"), actor=Actor("ann"))
    await set_clock(conn, later(12))
    assert await pause_schedule(conn, dag="one", name="main", actor=Actor("ann"), expected_version=1) == 2
    assert await fires(conn) == [10]
    await set_clock(conn, later(35))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 20]
    assert await unpause_schedule(conn, dag="one", name="main", actor=Actor("ann")) == 3
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 20]
    assert await skipped(conn) == [(20, 30, 2, "paused")]
    await set_clock(conn, later(40))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 20, 40, 40]
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("I7")
async def test_unpausing_what_is_not_paused_changes_nothing(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await set_clock(conn, later(25))
    for _ in range(2):
        assert await unpause_schedule(conn, dag="one", name="main", actor=Actor("ann")) == 1
        assert not await unpause(conn, dag="one", actor=Actor("ann"))
    assert (await fires(conn), await skipped(conn)) == ([], [])
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert (await fires(conn), await skipped(conn)) == ([20], [(10, 10, 1, "misfire_latest")])
    assert [await pause_schedule(conn, dag="one", name="main", actor=Actor("ann")) for _ in range(2)] == [2, 2]


@pytest.mark.requirement("I2")
async def test_the_pause_of_a_schedule_and_of_its_dag_are_two(conn: AsyncConnection) -> None:
    epoch = await world(conn)
    await pause_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await pause(conn, dag="one", actor=Actor("ann"))
    await unpause(conn, dag="one", actor=Actor("ann"))
    await set_clock(conn, later(15))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    await pause(conn, dag="one", actor=Actor("ann"))
    await unpause_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await set_clock(conn, later(25))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    await unpause(conn, dag="one", actor=Actor("ann"))
    assert await skipped(conn) == [(10, 20, 2, "paused")]
    await set_clock(conn, later(30))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [30]
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("I7")
@pytest.mark.parametrize(
    ("catch_up", "expected", "range_"),
    [
        (CatchUp(policy=MisfirePolicy.LATEST), [30], [(10, 20, 2, "misfire_latest")]),
        (ALL, [10, 20, 30], []),
        (CatchUp(policy=MisfirePolicy.ALL, window_seconds=16), [20, 30], [(10, 10, 1, "outside_window")]),
    ],
)
@pytest.mark.parametrize("of_dag", [True, False])
async def test_what_a_pause_kept_back_runs_if_somebody_asks_for_it(
    conn: AsyncConnection, catch_up: CatchUp, expected: list[float], range_: list[object], of_dag: bool
) -> None:
    await world(conn)
    if of_dag:
        await pause(conn, dag="one", actor=Actor("ann"))
    else:
        await pause_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await set_clock(conn, later(35))
    (seen,) = await preview(conn, dag="one", name=None if of_dag else "main", catch_up=catch_up)
    assert [(run - T0).total_seconds() for run in seen.runs] == expected
    if of_dag:
        await unpause(conn, dag="one", actor=Actor("ann"), catch_up=catch_up)
    else:
        await unpause_schedule(conn, dag="one", name="main", actor=Actor("ann"), catch_up=catch_up)
    assert await fires(conn) == expected
    assert await skipped(conn) == range_
    assert await value(conn, "select next_due from schedule_state") == later(40)
    assert await invariants.violations(conn) == []


async def test_a_deleted_schedule_settles_what_was_due_and_publishing_does_not_bring_it_back(
    conn: AsyncConnection,
) -> None:
    epoch = await world(conn)
    await set_clock(conn, later(12))
    assert await delete_schedule(conn, dag="one", name="main", actor=Actor("ann"), expected_version=1) == 2
    assert await fires(conn) == [10]
    await put(conn, make_dag("one", {"a": [], "b": []}, every="@every 10s"))
    await set_clock(conn, later(30))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    with pytest.raises(NotFound, match="has no schedule"):
        await pause_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    assert await reset_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await set_clock(conn, later(40))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 40]
    assert await value(conn, "select count(*) from schedule") == 1
    await put(conn, make_dag("one", ONE, every="@every 60s"))
    assert await value(conn, "select (spec->>'every_seconds')::float from schedule") == 60
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("I2")
async def test_a_paused_schedule_that_is_deleted_or_changed_leaves_what_it_missed_on_record(
    conn: AsyncConnection,
) -> None:
    await world(conn)
    await pause_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await set_clock(conn, later(25))
    await put_schedule(conn, dag="one", schedule=every("@every 7s"), actor=Actor("ann"))
    assert await skipped(conn) == [(10, 20, 2, "paused")]
    assert await value(conn, "select is_paused_directly and is_paused from schedule_state") is True
    await set_clock(conn, later(30))
    await delete_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    assert len(await skipped(conn)) == 2
    assert await fires(conn) == []


@pytest.mark.requirement("I1")
async def test_every_version_is_on_record_with_who_made_it(conn: AsyncConnection) -> None:
    await world(conn)
    await put_schedule(conn, dag="one", schedule=every("@every 20s", misfire=MisfirePolicy.ALL), actor=Actor("bob"))
    await pause_schedule(conn, dag="one", name="main", actor=Actor("cid"))
    with pytest.raises(Conflict, match="is at version 3, not at 2"):
        await unpause_schedule(conn, dag="one", name="main", actor=Actor("dan"), expected_version=2)
    await unpause_schedule(conn, dag="one", name="main", actor=Actor("dan"), expected_version=3)
    await delete_schedule(conn, dag="one", name="main", actor=Actor("eve"))
    found = await schedules.history(conn, dag="one", name="main")
    assert [(each.version, each.change, each.changed_by, each.is_held) for each in found] == [
        (5, "delete", "eve", False),
        (4, "unpause", "dan", False),
        (3, "pause", "cid", True),
        (2, "put", "bob", False),
        (1, "publish", "test", False),
    ]
    assert found[3].settings["misfire"] == "all"


@pytest.mark.requirement("I7")
async def test_a_change_settles_a_long_backlog_whole(conn: AsyncConnection) -> None:
    """More than one call fires at once: none of it may be lost to the new version."""
    await world(conn, misfire=MisfirePolicy.ALL)
    await set_clock(conn, later(3005))
    await put_schedule(conn, dag="one", schedule=every("@every 7s"), actor=Actor("ann"))
    assert await fires(conn) == [10 * n for n in range(1, 301)]
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("I7")
async def test_the_runs_of_a_long_backlog_pass_their_gates(conn: AsyncConnection) -> None:
    """Also those of the parts that are decided before the change itself."""
    key = GateSpec(kind=GateKind.MUTEX, name="k", weight=1)
    await world(conn, misfire=MisfirePolicy.ALL, task_gates=(key,))
    await set_clock(conn, later(3005))
    await put_schedule(conn, dag="one", schedule=every("@every 7s"), actor=Actor("ann"))
    assert await value(conn, "select count(*) from ready_task") == 300
    assert await invariants.violations(conn) == []


async def test_more_missed_fires_than_the_limit_are_skipped_oldest_first(conn: AsyncConnection) -> None:
    epoch = await world(conn, misfire=MisfirePolicy.ALL, catchup_limit=3)
    await set_clock(conn, later(105))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [80, 90, 100]
    assert await skipped(conn) == [(10, 70, 7, "over_limit")]


async def test_a_list_of_instants_fires_each_and_tells_those_that_are_over(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    times = [later(seconds) for seconds in (-50, -20, 10, 30)]
    schedule = NamedSchedule(name="listed", spec=parse_schedule(times), misfire=MisfirePolicy.ALL)
    await put(conn, replace(make_dag("one", ONE), schedules=(schedule,)))
    assert await skipped(conn) == [(-50, -20, 2, "past_when_published")]
    for seconds in (10, 40):
        await set_clock(conn, later(seconds))
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 30]
    assert await value(conn, "select next_due from schedule_state") is None


@pytest.mark.requirement("I7")
async def test_with_jitter_a_fire_is_later_and_known_by_its_nominal_instant(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    spec = parse_schedule("@every 60s", jitter_seconds=600)
    delay = delay_of(spec, dag="one", name="main")
    assert timedelta(seconds=60) < delay < timedelta(seconds=600)
    await put(conn, replace(make_dag("one", ONE), schedules=(NamedSchedule(name="main", spec=spec),)))
    due = await value(conn, "select next_due from schedule_state")
    assert due == later(60) + delay
    await set_clock(conn, later(60) + delay - timedelta(milliseconds=1))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    await set_clock(conn, later(60) + delay)
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [60]
    assert await value(conn, "select next_due from schedule_state") == later(120) + delay


@pytest.mark.requirement("I7")
async def test_a_change_of_the_jitter_alone_neither_loses_nor_repeats_a_fire(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("one", ONE))
    now: datetime = later(0)
    for step, jitter in enumerate((600, 0, 300, 0, 600, 10)):
        spec = parse_schedule("@every 60s", jitter_seconds=jitter)
        wanted = NamedSchedule(name="main", spec=spec, misfire=MisfirePolicy.ALL)
        await put_schedule(conn, dag="one", schedule=wanted, actor=Actor("ann"))
        for _ in range(40):
            now += timedelta(seconds=15 + step)
            await set_clock(conn, now)
            await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    found = await fires(conn)
    assert found == [60.0 * n for n in range(1, len(found) + 1)]
    assert await skipped(conn) == []


@pytest.mark.requirement("I1", "I7")
async def test_changes_race_a_firing_leader_and_lose_no_fire(database: str) -> None:
    """The leader fires and three people edit, pause and unpause at once, all with one clock that goes on."""
    people = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(4)]
    leader, *others = people
    try:
        for conn in people:
            await set_clock(conn, T0)
        await invariants.install(leader)
        epoch = await lead(leader)
        await put(leader, make_dag("one", ONE, every="@every 10s", misfire=MisfirePolicy.ALL))
        for step in range(1, 30):
            for conn in people:
                await set_clock(conn, later(step * 4))
            ann, bob, cid = others
            await asyncio.gather(
                fire_schedules(leader, shard=0, epoch=epoch, batch=10),
                put_schedule(ann, dag="one", schedule=every(f"@every {5 + step % 3}s"), actor=Actor("ann")),
                pause_schedule(bob, dag="one", name="main", actor=Actor("bob")),
                unpause_schedule(cid, dag="one", name="main", actor=Actor("cid"), catch_up=ALL),
            )
            await unpause_schedule(cid, dag="one", name="main", actor=Actor("cid"), catch_up=ALL)
            assert await invariants.violations(leader) == []
        assert await value(leader, "select count(*) > 10 from run") is True
        assert await value(leader, "select count(*) = max(version) from schedule_version") is True
    finally:
        for conn in people:
            await conn.close()


@pytest.mark.requirement("I2", "V1")
async def test_a_schedule_with_catchup_begins_in_the_past_once(conn: AsyncConnection) -> None:
    """The first publication leaves its cursor at `start_at`, in its own transaction: a crash loses no run, and repeating it adds
    none. A pause from the start, another expression and `max_active_runs` hold back runs and lose none."""
    await invariants.install(conn)
    await set_clock(conn, T0)

    def of(when: str, **options: object) -> DagSpec:
        spec = parse_schedule(when, start_at=later(-60), anchor_at=T0, catchup=True)
        made = make_dag("one", ONE, max_active_runs=2, **options)
        return replace(made, schedules=(NamedSchedule(name="default", spec=spec),))

    await put(conn, of("@every 10s", starts_paused=True))
    epoch = await lead(conn)
    await set_clock(conn, later(5))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0
    await put(conn, of("@every 20s", starts_paused=True))
    (seen,) = await preview(conn, dag="one", catch_up=CatchUp())
    assert [(run - T0).total_seconds() for run in seen.runs] == [-60, -40, -20, 0]
    await unpause(conn, dag="one", actor=Actor("ann"))
    assert await fires(conn) == [-60, -40, -20, 0]
    for _ in range(2):
        await put(conn, of("@every 20s", starts_paused=True))
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert (await fires(conn), await skipped(conn)) == ([-60, -40, -20, 0], [])
    assert await value(conn, "select count(*) from run_status where state = 'running'") == 2
    await set_clock(conn, later(45))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [-60, -40, -20, 0, 20, 40]
    await pause(conn, dag="one", actor=Actor("ann"))
    await set_clock(conn, later(65))
    await unpause(conn, dag="one", actor=Actor("ann"), catch_up=CatchUp(policy=MisfirePolicy.SKIP))
    assert (await fires(conn))[-1] == 40 and await skipped(conn) == [(60, 60, 1, "paused")]
    assert await invariants.violations(conn) == []
    with pytest.raises(InvalidSchedule, match="write start_at"):
        parse_schedule("@every 10s", catchup=True)


@pytest.mark.requirement("I2")
async def test_instants_that_code_computes_are_stored_ahead_and_renewed(conn: AsyncConnection) -> None:
    """Another load appends instants and changes none; other code replaces what is to come. A schedule that ran out continues
    with what it missed. None of it is a new version of the DAG."""
    await invariants.install(conn)
    await set_clock(conn, T0)

    def of(code: str, *seconds: float) -> DagSpec:
        empty = parse_schedule({"kind": "computed", "timetable": f"a.b#{code}"})
        spec = with_instants(empty, [Instant(at=later(each), start=T0, end=later(each)) for each in seconds])
        return replace(
            make_dag("one", ONE), schedules=(NamedSchedule(name="main", spec=spec, misfire=MisfirePolicy.ALL),)
        )

    assert of("1", 10).schedules[0].spec.intervals == ((T0, later(10)),)
    plain = with_instants(of("1").schedules[0].spec, [Instant(at=T0, start=T0, end=T0)])
    assert plain.intervals is None and renewed(plain, of("1", 10).schedules[0].spec).intervals == (
        (T0, T0),
        (T0, later(10)),
    )

    async def stored() -> list[float]:
        (row,) = await schedules.of_dag(conn, dag="one")
        return [(at - T0).total_seconds() for at in ScheduleSpec.from_json(row.spec).instants]

    version = await put(conn, of("1", 10, 20, 30))
    epoch = await lead(conn)
    await set_clock(conn, later(15))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await put(conn, of("1", 11, 21, 31, 41)) == version
    assert await stored() == [10, 20, 30, 31, 41]
    await set_clock(conn, later(25))
    await put(conn, of("1", 50))
    assert await value(conn, "select next_due from schedule_state") == later(20), "it is due, and must not be lost"
    await set_clock(conn, later(60))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await value(conn, "select next_due from schedule_state") is None
    assert await put(conn, of("1")) == version, "its code computes nothing more"
    await set_clock(conn, later(75))
    await put(conn, of("1", 65, 70, 80, 90))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 20, 30, 31, 41, 50, 65, 70]
    assert await value(conn, "select next_due from schedule_state") == later(80)
    assert await put(conn, of("2", 72, 77, 100)) != version
    assert await stored() == [72, 77, 100]
    await set_clock(conn, later(200))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert await fires(conn) == [10, 20, 30, 31, 41, 50, 65, 70, 77, 100]
    assert await value(conn, "select array_agg(change order by version) from schedule_version") == [
        "publish",
        "publish",
    ]
    # What a user has put there, or deleted, stays so.
    await put_schedule(conn, dag="one", schedule=every("@every 1h"), actor=Actor("ann"))
    await put(conn, of("2", 300, 400))
    (row,) = await schedules.of_dag(conn, dag="one")
    assert ScheduleSpec.from_json(row.spec).kind is ScheduleKind.INTERVAL
    await reset_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await put(conn, of("2", 300, 400))
    assert await stored() == [300, 400]
    await delete_schedule(conn, dag="one", name="main", actor=Actor("ann"))
    await put(conn, of("2", 300, 400, 500))
    assert await value(conn, "select next_due from schedule_state") is None
    assert renew_at(of("1", 10, 20, 100_000).schedules[0].spec, T0) == later(60)
    assert await invariants.violations(conn) == []
