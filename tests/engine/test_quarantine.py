"""What cannot be handled is set aside with its reason, is tried again later, and never keeps another waiting (V11)."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runs, schedules
from evertick.domain.errors import NotLeader
from evertick.engine import fire_schedules as firing
from evertick.engine.fire_schedules import CpuLimitExceeded, cpu_limit, fire_schedules
from evertick.engine.maintenance import Reconciled, admit_queued_runs, reconcile_runs, skip_run_once
from evertick.engine.shards import poll_work
from tests.engine import invariants
from tests.engine.poison import cure, refuse
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

ONE: dict[str, list[str]] = {"a": []}
MINUTE = timedelta(seconds=60)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


@pytest.fixture
async def real(database: str) -> AsyncIterator[AsyncConnection]:
    """Where a statement that fails must not end the transaction of all the others."""
    async with await connect(database, purpose=Purpose.SCHEDULER) as connection:
        yield connection


async def set_aside(conn: AsyncConnection, kind: str, subject_id: int, *, again: bool = True) -> None:
    await conn.execute("select quarantine_row(%s, %s, 'test', 'a reason', %s)", [kind, subject_id, again])


async def is_set_aside(conn: AsyncConnection, kind: str, subject_id: int) -> object:
    return await value(conn, "select is_quarantined(%s, %s)", kind, subject_id)


async def round_of(conn: AsyncConnection, epoch: int) -> Reconciled:
    return await reconcile_runs(conn, shard=0, epoch=epoch, limit=1000)


# being set aside -----------------------------------------------------------------------------------------------------


async def test_it_is_tried_again_later_and_later_with_every_failure(conn: AsyncConnection) -> None:
    waits = []
    for _ in range(12):
        await set_aside(conn, "run", 7)
        waits.append(await value(conn, "select extract(epoch from retry_at - clock())::int from quarantine"))
    assert waits == [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600, 3600]
    assert await value(conn, "select failures from quarantine") == 12


async def test_only_quarantined_rows_are_skipped_and_only_until_their_next_try(conn: AsyncConnection) -> None:
    await set_aside(conn, "run", 7)
    await set_aside(conn, "schedule", 8, again=False)
    assert [await is_set_aside(conn, kind, 7) for kind in ("run", "dag", "schedule")] == [True, False, False]
    assert await is_set_aside(conn, "run", 8) is False
    await set_clock(conn, later(10))
    assert await is_set_aside(conn, "run", 7) is False
    await set_clock(conn, later(1e6))
    assert await is_set_aside(conn, "schedule", 8) is True, "nothing but publishing it anew can help"


async def test_what_has_not_failed_again_is_forgotten(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    for _ in range(4):
        await set_aside(conn, "run", 7)
    await set_clock(conn, later(80 + 79))
    await round_of(conn, epoch)
    assert await value(conn, "select failures from quarantine") == 4
    await set_clock(conn, later(80 + 81))
    await round_of(conn, epoch)
    assert await value(conn, "select count(*) from quarantine") == 0


# schedules -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V11", "N22")
async def test_a_schedule_whose_run_was_refused_fires_again_when_its_time_has_come(real: AsyncConnection) -> None:
    conn = real
    await invariants.install(conn)
    await set_clock(conn, later(0))
    epoch = await lead(conn)
    for name in ("good", "bad"):
        await put(conn, make_dag(name, ONE, every=MINUTE))
    dag_id = await value(conn, "select dag_id from dag where name = 'bad'")
    await refuse(conn, "run", f"new.dag_id = {dag_id}", on="insert")
    await set_clock(conn, later(60))
    done = await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert (done.settled, done.runs, len(done.quarantined)) == (1, 1, 1)
    (shown,) = await schedules.list_all(conn, dag="bad")
    assert "poison" in str(shown.error) and "retried later" in str(shown.error)
    await cure(conn, "run")
    await set_clock(conn, later(69))
    await round_of(conn, epoch)
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).was_due == 0, "not yet"
    await set_clock(conn, later(70))
    await round_of(conn, epoch)
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 1
    assert await value(conn, "select count(*) from run") == 2
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("V11", "N22")
@pytest.mark.parametrize("raw", ["[" * 3000 + "]" * 3000, '{"kind": "interval"}', '"text"', "7"])
async def test_a_schedule_that_cannot_be_decoded_waits_for_a_new_version(conn: AsyncConnection, raw: str) -> None:
    epoch = await lead(conn)
    for name in ("good", "bad"):
        await put(conn, make_dag(name, ONE, every=MINUTE))
    await conn.execute(
        "update schedule set spec = %s::jsonb where dag_id = (select dag_id from dag where name = 'bad')", [raw]
    )
    await set_clock(conn, later(60))
    done = await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert (done.settled, len(done.quarantined)) == (1, 1)
    await set_clock(conn, later(1e6))
    await round_of(conn, epoch)
    assert await value(conn, "select count(*) from schedule_state where error is not null") == 1
    await put(conn, make_dag("bad", ONE, every=timedelta(seconds=61)))
    await round_of(conn, epoch)
    assert await value(conn, "select count(*) from quarantine") == 0
    await set_clock(conn, later(1e6 + 100))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 2


@pytest.mark.requirement("A1", "V11")
async def test_a_schedule_whose_planning_never_ends_is_broken_off(
    conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await lead(conn)
    for name in ("good", "endless", "fine"):
        await put(conn, make_dag(name, ONE, every=MINUTE))
    endless = await value(conn, "select schedule_id from schedule join dag using (dag_id) where dag.name = 'endless'")
    plan_row = firing.plan_row

    def plan(due, now, **options):  # type: ignore[no-untyped-def]
        while due.schedule_id == endless:
            pass
        return plan_row(due, now, **options)

    monkeypatch.setattr(firing, "plan_row", plan)
    monkeypatch.setattr(firing, "PLAN_SECONDS", 0.05)
    await set_clock(conn, later(60))
    done = await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    assert (done.settled, done.quarantined) == (2, [endless])
    (shown,) = await schedules.list_all(conn, dag="endless")
    assert "took longer than 0.05 s" in str(shown.error)


def test_what_is_over_in_time_is_left_alone() -> None:
    with cpu_limit(5.0):
        pass
    with pytest.raises(CpuLimitExceeded), cpu_limit(0.01):
        while True:
            time.monotonic()
    # A process that is frozen, or waits for its turn, computes nothing meanwhile.
    with cpu_limit(0.1):
        threading.Event().wait(0.3)
    with cpu_limit(5.0):
        pass


async def test_a_former_leader_quarantines_no_schedule(conn: AsyncConnection) -> None:
    old = await lead(conn)
    await put(conn, make_dag("bad", ONE, every=MINUTE))
    await conn.execute("update schedule set spec = '7'")
    await set_clock(conn, later(60))
    await lead(conn)
    async with conn.transaction():
        with pytest.raises(NotLeader):
            async with conn.transaction():
                await fire_schedules(conn, shard=0, epoch=old, batch=10)
    assert await value(conn, "select error from schedule_state") is None


# runs ----------------------------------------------------------------------------------------------------------------


async def damaged(conn: AsyncConnection, count: int) -> list[int]:
    """Runs whose counters have drifted."""
    await put(conn, make_dag("one", ONE))
    made = [await start(conn, "one") for _ in range(count)]
    await conn.execute("update run_status set open_tasks = 5")
    return made


@pytest.mark.requirement("V11", "A13", "N23")
async def test_a_run_that_cannot_be_repaired_keeps_no_other(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    made = await damaged(conn, 100)
    await refuse(conn, "run_status", f"new.run_id = {made[41]}")
    done = await round_of(conn, epoch)
    assert (len(done.repaired), done.refused) == (99, 1)
    again = await round_of(conn, epoch)
    assert (again.repaired, again.refused) == ([], 0), "it is left alone for a while"
    assert [entry.verb for entry in await runs.journal(conn, run_id=made[41])] == ["quarantine"]
    await cure(conn, "run_status")
    await set_clock(conn, later(11))
    assert (await round_of(conn, epoch)).repaired == ["run_counter_drift"]


@pytest.mark.requirement("V11")
async def test_a_run_that_cannot_even_be_looked_at_keeps_no_other(conn: AsyncConnection) -> None:
    """Its numbers overflow."""
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("join", {"a": [], "b": [], "c": ["a", "b"]}))
    made = [await start(conn, "join") for _ in range(3)]
    for claim in await runner.claim():
        if claim.idx == 0:
            await runner.finish(claim)
    await conn.execute("update task_spec set setup_total = 1, trigger_rule = 'all_done_setup_success' where idx = 2")
    await conn.execute("update run_status set open_tasks = 7 where run_id <> %s", [made[1]])
    await refuse(conn, "audit_log", f"new.run_id = {made[1]} and new.action = 'reconcile'", on="insert")
    await conn.execute("update task set n_success = 2147483647 where idx = 2 and run_id = %s", [made[1]])
    done = await round_of(conn, epoch)
    assert (done.repaired, done.refused) == (["run_counter_drift"] * 2, 1)


@pytest.mark.requirement("V11", "A1")
async def test_a_run_that_takes_too_long_to_look_at_is_passed_by(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("one", ONE))
    first, second = await start(conn, "one"), await start(conn, "one")
    dag_id, run_id = (await skip_run_once(conn, shard=0, epoch=epoch, after_dag=0, after_run=0)).last
    assert run_id == first
    assert (await skip_run_once(conn, shard=0, epoch=epoch, after_dag=dag_id, after_run=run_id)).last[1] == second
    assert (await skip_run_once(conn, shard=0, epoch=epoch, after_dag=dag_id, after_run=second)).last == (0, 0)
    assert await value(conn, "select array_agg(subject_id order by subject_id) from quarantine") == [first, second]


async def test_a_run_that_has_not_started_is_not_passed_by_in_the_place_of_one_that_has(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("one_at_a_time", ONE, max_active_runs=1))
    running, queued = await start(conn, "one_at_a_time"), await start(conn, "one_at_a_time")
    dag_id, run_id = (await skip_run_once(conn, shard=0, epoch=epoch, after_dag=0, after_run=0)).last
    assert run_id == running
    skipped = await skip_run_once(conn, shard=0, epoch=epoch, after_dag=dag_id, after_run=run_id)
    assert skipped.last == (0, 0), f"{queued} is left alone"


async def test_a_large_run_comes_alone(conn: AsyncConnection) -> None:
    """A slice is bounded by tasks, too, and what it leaves comes next."""
    epoch = await lead(conn)
    await put(conn, make_dag("large", {f"t{number}": [] for number in range(30)}))
    made = [await start(conn, "large") for _ in range(4)]
    await conn.execute("delete from ready_task")
    seen, after = [], (0, 0)
    while True:
        cursor = await conn.execute(
            "select last_dag_id, last_run_id, repaired from reconcile_runs(0::smallint, %s, %s, %s, 100, p_tasks => 50)",
            [epoch, *after],
        )
        dag_id, run_id, repaired = await cursor.fetchone() or (None, None, [])
        seen.append(len(repaired))
        if run_id is None:
            break
        after = (dag_id, run_id)
    assert seen == [2, 2]
    assert len(await (await Runner.join(conn)).claim(200)) == 30 * len(made)


async def test_a_sound_run_is_never_locked(database: str) -> None:
    """Only one that shows damage is: a round does not get in the way of the work."""
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leader,
        await connect(database, purpose=Purpose.SCHEDULER) as other,
    ):
        epoch = await lead(leader)
        await put(leader, make_dag("one", ONE))
        sound, damaged_run = await start(leader, "one"), await start(leader, "one")
        await leader.execute("update run_status set open_tasks = 5 where run_id = %s", [damaged_run])
        async with leader.transaction():
            await round_of(leader, epoch)
            cursor = await other.execute("select run_id from run_status for update skip locked")
            assert [row[0] for row in await cursor.fetchall()] == [sound]


# DAGs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V11", "A13")
async def test_a_dag_whose_runs_cannot_start_keeps_no_other(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    passed_over = {}
    for name in ("bad", "good"):
        await put(conn, make_dag(name, ONE))
        passed_over[name] = await start(conn, name)
    await conn.execute("delete from ready_task")
    await conn.execute("delete from task")
    await conn.execute("update run_status set state = 'queued', started_at = null")
    await refuse(conn, "task", f"new.run_id = {passed_over['bad']}", on="insert")
    done = await admit_queued_runs(conn, shard=0, epoch=epoch)
    assert (done.admitted, done.refused) == (1, 1)
    assert [await run_state(conn, run) for run in passed_over.values()] == ["queued", "running"]
    assert (await poll_work(conn, shard=0, epoch=epoch, lost_after=9)).dags_with_free_slots == []
    await cure(conn, "task")
    await set_clock(conn, later(11))
    assert (await admit_queued_runs(conn, shard=0, epoch=epoch)).admitted == 1
    assert await states(conn, passed_over["bad"]) == {"a": "available"}
