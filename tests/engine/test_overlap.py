"""What a schedule does while a run of it is open, decided against the runs themselves."""

from __future__ import annotations

import asyncio
from typing import LiteralString

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules, tasks
from evertick.domain.access import Actor
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.engine.fire_schedules import Fired, fire_schedules
from evertick.engine.maintenance import admit_queued_runs
from evertick.engine.tasks import clear
from tests.engine import invariants
from tests.engine.plans import fire_plan, plan
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, value

ONE: dict[str, list[str]] = {"a": []}
_RUNNING = "select array_agg(extract(epoch from r.fire_at - %s)::int order by r.run_id) from run r join run_status s using (run_id)"


async def world(conn: AsyncConnection, overlap: str, **options: object) -> int:
    await invariants.install(conn)
    await set_clock(conn, T0)
    await put(conn, make_dag("one", ONE, every="@every 10s", overlap=OverlapPolicy(overlap), **options))
    return await lead(conn)


async def fire_at(conn: AsyncConnection, epoch: int, seconds: float) -> Fired:
    await set_clock(conn, later(seconds))
    return await fire_schedules(conn, shard=0, epoch=epoch, batch=10)


async def in_state(conn: AsyncConnection, state: str) -> list[int]:
    found = await value(conn, _RUNNING + " where s.state = %s::run_state", T0, state)
    return found or []  # type: ignore[return-value]


async def skips(conn: AsyncConnection) -> list[tuple[int, int, str]]:
    cursor = await conn.execute(
        "select extract(epoch from first_at - %s)::int, count::int, reason from skip_record order by first_at", [T0]
    )
    return list(await cursor.fetchall())


async def test_skip_leaves_out_a_fire_while_a_run_is_open(conn: AsyncConnection) -> None:
    epoch = await world(conn, "skip")
    await fire_at(conn, epoch, 10)
    done = await fire_at(conn, epoch, 20)
    assert (done.runs, done.skips["overlap"]) == (0, 1)
    assert await skips(conn) == [(20, 1, "overlap_skip")]
    await (await Runner.join(conn)).drain()
    await fire_at(conn, epoch, 30)
    assert await in_state(conn, "running") == [30]
    assert await value(conn, "select last_fired from schedule_state") == later(30)
    assert await invariants.violations(conn) == []


async def test_queue_one_lets_one_wait_and_skips_the_next(conn: AsyncConnection) -> None:
    epoch = await world(conn, "queue_one")
    for seconds in (10, 20, 30):
        await fire_at(conn, epoch, seconds)
    assert (await in_state(conn, "running"), await in_state(conn, "queued")) == ([10], [20])
    assert await skips(conn) == [(30, 1, "overlap_queue_one")]
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim)
    assert (await in_state(conn, "success"), await in_state(conn, "running")) == ([10], [20])
    assert await invariants.violations(conn) == []


async def test_queue_all_runs_one_after_the_other(conn: AsyncConnection) -> None:
    epoch = await world(conn, "queue_all")
    for seconds in (10, 20, 30):
        await fire_at(conn, epoch, seconds)
    runner = await Runner.join(conn)
    for number in (1, 2, 3):
        assert (await in_state(conn, "running"), len(await in_state(conn, "queued"))) == ([10 * number], 3 - number)
        (claim,) = await runner.claim()
        await runner.finish(claim)
    assert await in_state(conn, "success") == [10, 20, 30]
    assert await skips(conn) == []


async def test_cancel_ends_the_open_run_and_starts_when_it_has_ended(conn: AsyncConnection) -> None:
    epoch = await world(conn, "cancel")
    await fire_at(conn, epoch, 10)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    done = await fire_at(conn, epoch, 20)
    assert (done.runs, done.canceled) == (1, 1)
    assert (await in_state(conn, "running"), await in_state(conn, "queued")) == ([10], [20])
    assert await value(conn, "select request from task where run_id = 1") == "cancel"
    await runner.finish(claim, "killed")
    assert (await in_state(conn, "canceled"), await in_state(conn, "running")) == ([10], [20])
    await fire_at(conn, epoch, 30)
    assert (await in_state(conn, "canceled"), await in_state(conn, "running")) == ([10, 20], [30])
    assert await invariants.violations(conn) == []


@pytest.mark.parametrize(
    "change",
    [
        "version = version + 1",
        "next_due = next_due - interval '1 second'",
        "is_paused = true",
        "error = 'cannot be planned'",
        None,
    ],
)
async def test_a_plan_that_is_stale_or_fires_nothing_cancels_nothing(
    rollback_conn: AsyncConnection, change: LiteralString | None
) -> None:
    conn = rollback_conn
    epoch = await world(conn, "cancel")
    await fire_at(conn, epoch, 10)
    (schedule,) = await schedules.of_dag(conn, dag="one")
    if change:
        await conn.execute(f"update schedule_state set {change}")
    skipped = {"first_at": later(20), "last_at": later(20), "count": 1, "reason": "test"}
    fields = {"next_due": later(30), "overlap": "cancel"}
    if change:
        fields |= {"fires": [later(20)], "last_fire": later(20), "skipped": None}
    else:
        fields |= {"fires": [], "last_fire": None, "skipped": skipped}
    assert await fire_plan(conn, epoch, plan(schedule, **fields)) == (0 if change else 1)
    assert await in_state(conn, "running") == [10]


@pytest.mark.parametrize(
    ("overlap", "made", "skipped"),
    [
        ("skip", [10], [(20, 3, "overlap_skip")]),
        ("queue_one", [10, 20], [(30, 2, "overlap_queue_one")]),
        ("queue_all", [10, 20, 30, 40], []),
        ("cancel", [40], [(10, 3, "overlap_cancel")]),
        ("allow", [10, 20, 30, 40], []),
    ],
)
async def test_several_fires_that_are_due_at_once_overlap_each_other(
    conn: AsyncConnection, overlap: str, made: list[int], skipped: list[object]
) -> None:
    epoch = await world(conn, overlap, misfire=MisfirePolicy.ALL)
    done = await fire_at(conn, epoch, 45)
    assert done.runs == len(made)
    assert await value(conn, _RUNNING, T0) == made
    assert await skips(conn) == skipped
    assert len(await in_state(conn, "running")) == (4 if overlap == "allow" else 1)
    assert await invariants.violations(conn) == []


async def test_runs_by_hand_and_of_other_schedules_are_no_overlap(conn: AsyncConnection) -> None:
    epoch = await world(conn, "skip")
    await start(conn, "one")
    await fire_at(conn, epoch, 10)
    assert await value(conn, "select count(*) from run_status where state = 'running'") == 2


async def test_a_run_that_is_cleared_waits_for_the_one_that_runs(conn: AsyncConnection) -> None:
    epoch = await world(conn, "skip")
    await fire_at(conn, epoch, 10)
    runner = await Runner.join(conn)
    await runner.drain()
    await fire_at(conn, epoch, 20)
    await clear(conn, run_id=1, chosen=await tasks.list_of_run(conn, run_id=1), actor=Actor("ann"))
    assert (await in_state(conn, "running"), await in_state(conn, "queued")) == ([20], [10])
    assert await value(conn, "select array_agg(x) from dags_with_free_slots(0::smallint) x") is None
    assert (await admit_queued_runs(conn, shard=0, epoch=epoch)).admitted == 0
    await runner.drain()
    assert await in_state(conn, "success") == [10, 20]


async def test_a_run_that_nobody_let_in_is_admitted_by_the_round(conn: AsyncConnection) -> None:
    epoch = await world(conn, "queue_all")
    await fire_at(conn, epoch, 10)
    await fire_at(conn, epoch, 20)
    # As if the end of the first had passed the second over, because somebody worked on it.
    await conn.execute("update task set state = 'success', finished_at = clock() where run_id = 1")
    await conn.execute("delete from ready_task")
    await conn.execute(
        "update run_status set state = 'success', open_tasks = 0, finished_at = clock() where run_id = 1"
    )
    assert await value(conn, "select array_agg(x) from dags_with_free_slots(0::smallint) x") == [1]
    assert (await admit_queued_runs(conn, shard=0, epoch=epoch)).admitted == 1
    assert await value(conn, "select array_agg(x) from dags_with_free_slots(0::smallint) x") is None


@pytest.mark.parametrize("overlap", ["skip", "queue_one", "queue_all", "cancel"])
async def test_a_run_that_finishes_at_that_very_moment_leaves_nothing_behind(database: str, overlap: str) -> None:
    """The fire and the end of the run before race. Whoever is first: never two at once, and never one that waits for nobody."""
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leader,
        await connect(database, purpose=Purpose.RUNNER) as hot,
    ):
        epoch = await world(leader, overlap)
        await set_clock(hot, T0)
        runner = await Runner.join(hot)
        await fire_at(leader, epoch, seconds := 10)
        for turn in range(24):
            (claim,) = await runner.claim()
            await set_clock(hot, later(seconds := seconds + 10))
            kind = "success" if turn % 2 else "failed"
            await asyncio.gather(fire_at(leader, epoch, seconds), runner.finish(claim, kind, no_retry=True))
            if not await in_state(leader, "running"):
                # It was skipped, because the other had not ended yet: the next one runs.
                assert overlap == "skip" and await in_state(leader, "queued") == []
                await fire_at(leader, epoch, seconds := seconds + 10)
            assert len(await in_state(leader, "running")) == 1
            assert await invariants.violations(leader) == []
        counted = "select (select count(*) from run) + (select coalesce(sum(count), 0) from skip_record)"
        assert await value(leader, counted) == seconds // 10


@pytest.mark.requirement("I7")
@pytest.mark.parametrize(
    ("overlap", "runs", "expected"),
    [("skip", 1, [(20, 340, "overlap_skip")]), ("queue_one", 2, [(30, 340, "overlap_queue_one")])],
)
async def test_what_a_long_backlog_skips_is_one_record(
    conn: AsyncConnection, overlap: str, runs: int, expected: list[tuple[int, int, str]]
) -> None:
    """It is settled ten fires at a time."""
    epoch = await world(conn, overlap, misfire=MisfirePolicy.ALL)
    await fire_at(conn, epoch, 345)
    for _ in range(5):
        await fire_at(conn, epoch, 345)
    assert await value(conn, "select count(*) from run") == runs
    cursor = await conn.execute("select first_at, last_at, count, reason from skip_record")
    assert await cursor.fetchall() == [
        (later(first), later(last), (last - first) // 10 + 1, why) for first, last, why in expected
    ]
    # What becomes due later is another range, also where nothing ran between.
    await fire_at(conn, epoch, 350)
    await fire_at(conn, epoch, 360)
    assert await value(conn, "select array_agg(count order by first_at) from skip_record") == [
        (340 - expected[0][0]) // 10 + 1,
        1,
        1,
    ]


_RUN_AT = (
    "insert into run (dag_id, version_id, kind, schedule_id, params, triggered_by, created_at, fire_at)"
    " select 1, 1, 'scheduled', {one}, '{{}}', 'schedule', clock(), "
)
_RECORD = "insert into skip_record values (%s, %s, %s, %s, %s, %s)"


@pytest.mark.parametrize(
    ("change", "is_joined"),
    [
        ("select 1", True),
        ("update skip_record set reason = 'overlap_queue_one' where count = 4", False),
        ("update schedule set changed_at = timestamptz '{recorded}'", False),
        ("update schedule set delay_seconds = 60", True),
        ("update schedule set delay_seconds = 60.5", False),
        ("update skip_record set last_at = timestamptz '{recorded}' + interval '1 s' where count = 4", False),
        (_RUN_AT + "timestamptz '{between}'", False),
        (_RUN_AT + "timestamptz '{between}' - interval '20 s'", True),
        (_RUN_AT + "timestamptz '{between}' + interval '20 s'", True),
    ],
)
async def test_which_records_are_one_range(conn: AsyncConnection, change: str, is_joined: bool) -> None:
    """Parts of one backlog, that is: everything of the second was due when the first was written."""
    await set_clock(conn, T0)
    await put(conn, make_dag("one", ONE, every="@every 10s"))
    await put(conn, make_dag("other", ONE, every="@every 10s"))
    one, other = [
        await value(conn, "select schedule_id from schedule join dag using (dag_id) where dag.name = %s", name)
        for name in ("one", "other")
    ]
    for schedule in (one, other):
        for first, last, count, recorded in ((1, 2, 1, 3), (10, 20, 3, 100), (30, 40, 4, 101)):
            await conn.execute(_RECORD, [schedule, later(first), later(last), count, "overlap_skip", later(recorded)])
    await conn.execute(change.format(recorded=later(100), between=later(25), one=one))  # type: ignore[arg-type]
    await conn.execute("select merge_overlap_skips(array[%s::int])", [one])
    counts = "select array_agg(count order by first_at) from skip_record where schedule_id = %s"
    assert await value(conn, counts, one) == ([1, 7] if is_joined else [1, 3, 4])
    assert await value(conn, counts, other) == [1, 3, 4]
    if is_joined:
        ends = "select array[first_at, last_at] from skip_record where schedule_id = %s and count = 7"
        assert await value(conn, ends, one) == [later(10), later(40)]
