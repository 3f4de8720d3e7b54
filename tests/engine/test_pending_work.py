"""What the leader's look says about backfills, waits and gates: only what there is something to do about."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.engine.shards import PendingWork, poll_work
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start, value

BACKFILL = """insert into backfill (shard, dag_id, spec, params, first_at, last_at, reprocess, newest_first, parallel, request,
    state, total, created_by, created_at, finished_at, open_runs)
select 0, (select dag_id from dag), '{{}}', '{{}}', clock(), clock(), 'none', false, 1, x.state || x.n, x.state, 1, 'me', clock(),
    case when x.state in ('done', 'canceled') then clock() end, x.n
from unnest(array['running', 'paused', 'done', 'canceled'], array[{open_runs}]) as x(state, n)"""


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def look(conn: AsyncConnection) -> PendingWork:
    return await poll_work(conn, shard=0, epoch=await lead(conn), lost_after=90)


async def test_backfills_that_go_on_or_have_runs_to_count(db: AsyncConnection) -> None:
    await put(db, make_dag("d", {"a": []}))
    await db.execute(BACKFILL.format(open_runs="0, 0, 0, 0"))  # type: ignore[arg-type]
    await db.execute(BACKFILL.format(open_runs="2, 2, 2, 2"))  # type: ignore[arg-type]
    wanted = "select array_agg(backfill_id order by backfill_id) from backfill where request = any(%s)"
    expected = await value(db, wanted, ["running0", "running2", "paused2", "done2", "canceled2"])
    assert (await look(db)).backfills == expected


async def test_when_the_next_wait_is_due(db: AsyncConnection) -> None:
    assert (await look(db)).next_wake is None
    await db.execute("insert into deferral values (1, 0, -1, 1, 0, 'time', null, %s)", [later(10)])
    assert (await look(db)).next_wake == later(10)


async def test_gates_that_were_left_to_the_leader_and_rates_that_open(db: AsyncConnection) -> None:
    await db.execute("insert into gate (kind, name, capacity) values ('pool', 'a', 1), ('rate', 'b', 1)")
    seen = await look(db)
    assert (seen.has_gates, seen.next_opening) == (False, None)
    await db.execute("update gate set needs_admission = true, next_opening = %s where name = 'b'", [later(60)])
    seen = await look(db)
    assert (seen.has_gates, seen.next_opening) == (True, later(60))


async def test_who_is_silent_is_not_excused_by_what_another_one_claims(db: AsyncConnection) -> None:
    """A claim counts as a heartbeat, of who made it."""
    await put(db, make_dag("d", {"a": []}))
    silent, busy = await Runner.join(db), await Runner.join(db)
    await start(db, "d")
    assert len(await silent.claim()) == 1
    epoch = await lead(db)
    for second in range(2, 94, 2):
        await set_clock(db, later(second))
        await db.execute("update runner set heartbeat_seq = heartbeat_seq + 1 where session = %s", [busy.session])
        await start(db, "d")
        assert len(await busy.claim()) == 1
        seen = await poll_work(db, shard=0, epoch=epoch, lost_after=90, seconds=5, elapsed=2)
        assert seen.silent_sessions == ([silent.session] if second > 90 else []), second


async def test_overdue_runs_unless_stopping_or_quarantined(db: AsyncConnection) -> None:
    await put(db, make_dag("d", {"a": []}, run_timeout_seconds=9))
    runs = [await start(db, "d") for _ in range(3)]
    runner = await Runner.join(db)
    assert len(await runner.claim()) == 3
    assert (await look(db)).overdue == []
    await set_clock(db, later(10))
    assert (await look(db)).overdue == runs
    await db.execute("update task set request = 'cancel' where run_id = %s", [runs[0]])
    await db.execute("select quarantine_row('run', %s, 'time_out', 'it breaks', true)", [runs[1]])
    assert (await look(db)).overdue == [runs[2]]
    await set_clock(db, later(60))
    assert (await look(db)).overdue == runs[1:], "it is tried again later"


async def test_dags_with_free_slots_unless_they_are_quarantined(db: AsyncConnection) -> None:
    for name in ("one", "two"):
        await put(db, make_dag(name, {"a": []}))
        run = await start(db, name)
        await db.execute("update run_status set state = 'queued', started_at = null where run_id = %s", [run])
    rows = await db.execute("select dag_id from dag order by dag_id")
    one, two = [row[0] for row in await rows.fetchall()]
    assert (await look(db)).dags_with_free_slots == [one, two]
    await db.execute("select quarantine_row('dag', %s, 'admit', 'it breaks', true)", [one])
    assert (await look(db)).dags_with_free_slots == [two]
