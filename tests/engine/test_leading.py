"""Who leads: the lease decides, the session lock only tells of a crash (docs/decisions/0010-who-leads.md). And one look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db import failover
from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners, schedules, shards
from evertick.domain.access import Actor
from evertick.domain.errors import NotLeader
from evertick.domain.failover import WalMark
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause
from evertick.engine.fire_schedules import _fire_schedules
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.shards import AcquireResult, PendingWork, poll_work, release_shard, try_acquire_shard
from evertick.engine.verbs import is_poison
from tests.engine.plans import plan
from tests.engine.world import OWN_LOCKS, Runner, later, lead, make_dag, put, set_clock, start, value
from tests.waiting import eventually

ONE: dict[str, list[str]] = {"a": []}
LEASE = 1000.0


async def stand_by(conn: AsyncConnection, owner: str, *, watches: bool = True) -> AcquireResult:
    return await try_acquire_shard(conn, shard=0, owner=owner, seconds=LEASE, watches=watches)


async def renew(conn: AsyncConnection, epoch: int, *, watch: tuple[bool, bool] = (True, False)) -> PendingWork:
    return await poll_work(
        conn, shard=0, epoch=epoch, lost_after=90, seconds=LEASE, watches=watch[0], is_watched=watch[1]
    )


def advancing(mark: WalMark) -> dict[str, Any]:
    return {"system_id": mark.server.system_id, "timeline": mark.server.timeline, "lsn": mark.lsn}


@pytest.fixture
async def conns(database: str) -> AsyncIterator[list[AsyncConnection]]:
    """Three sessions, with nobody leading."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await connect(database, purpose=Purpose.SCHEDULER)) for _ in range(3)]


# taking over ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A10", "N01")
async def test_when_the_session_of_a_watched_leader_ends_another_leads_at_once(conns: list[AsyncConnection]) -> None:
    """Although its lease would last for long."""
    first, second, _ = conns
    led = await stand_by(first, "first")
    assert led.has_session_lock
    waits = await stand_by(second, "second")
    assert (waits.epoch, waits.has_session_lock) == (None, False)
    assert waits.free_in is not None and 0.9 * LEASE < waits.free_in <= LEASE
    await first.close()
    taken = await eventually(lambda: _taken(second, "second"))
    assert (taken.epoch, taken.has_session_lock) == (2, True)
    assert led.epoch == 1


async def _taken(conn: AsyncConnection, owner: str) -> AcquireResult | None:
    done = await stand_by(conn, owner)
    return done if done.epoch is not None else None


@pytest.mark.requirement("A10")
async def test_a_leader_that_nobody_could_watch_is_waited_for(conns: list[AsyncConnection]) -> None:
    """Behind a pooler, or while a frozen one still holds the lock: a free lock proves nothing then."""
    first, second, _ = conns
    assert (await stand_by(first, "first", watches=False)).has_session_lock is False
    await first.close()
    for _ in range(3):
        assert (await stand_by(second, "second")).epoch is None


@pytest.mark.requirement("A10")
async def test_a_standby_that_may_not_use_the_lock_goes_by_the_lease(conns: list[AsyncConnection]) -> None:
    first, second, third = conns
    await stand_by(first, "first")
    await first.close()
    await eventually(lambda: value(third, f"select count(*) = 0 from {OWN_LOCKS} where locktype = 'advisory'"))
    assert (await stand_by(second, "second", watches=False)).epoch is None
    await third.execute("update shard set lease_until = clock() - interval '1 s'")
    assert (await stand_by(second, "second", watches=False)).epoch == 2


@pytest.mark.requirement("A10", "N02")
async def test_who_takes_over_from_a_frozen_leader_is_watched_as_soon_as_that_is_gone(
    conns: list[AsyncConnection],
) -> None:
    frozen, second, third = conns
    await stand_by(frozen, "frozen")
    await third.execute("update shard set lease_until = clock() - interval '1 s'")
    led = await stand_by(second, "second")
    assert (led.epoch, led.has_session_lock) == (2, False)
    assert not (await renew(second, 2)).has_session_lock
    assert (await stand_by(third, "third")).epoch is None, "its session could not be watched"
    await frozen.close()

    async def is_watched() -> bool:
        return (await renew(second, 2)).has_session_lock

    await eventually(is_watched)
    await second.close()
    assert (await eventually(lambda: _taken(third, "third"))).epoch == 3


@pytest.mark.requirement("A10", "N04")
async def test_a_leader_that_renews_on_a_new_session_is_not_taken_for_dead(conns: list[AsyncConnection]) -> None:
    """Its session was terminated. Whoever is first goes on: here the leader itself."""
    first, again, other = conns
    await stand_by(first, "first")
    await first.close()

    async def is_watched() -> bool:
        return (await renew(again, 1)).has_session_lock

    await eventually(is_watched)
    assert (await stand_by(other, "other")).epoch is None
    assert await value(other, "select epoch from shard") == 1


@pytest.mark.requirement("A10")
async def test_a_renewal_while_a_standby_decides_keeps_leadership(conns: list[AsyncConnection]) -> None:
    """The standby waits for the fence. Meanwhile the leader renews on another session, which cannot have the lock."""
    first, standby, again = conns
    await stand_by(first, "first")
    async with again.transaction():
        await _fire_schedules(again, shard=0, epoch=1, plans=[])
        await first.close()
        await eventually(lambda: value(again, f"select not exists (select from {OWN_LOCKS} where classid = 4712)"))
        deciding = asyncio.ensure_future(stand_by(standby, "standby"))
        await eventually(lambda: value(again, f"select count(*) = 1 from {OWN_LOCKS} where not granted"))
        seen = await renew(again, 1)
        assert not seen.has_session_lock
    assert (await deciding).epoch is None
    assert await value(again, "select epoch from shard") == 1


@pytest.mark.requirement("A10", "A4")
async def test_of_many_that_see_the_crash_one_takes_over(database: str, conns: list[AsyncConnection]) -> None:
    first, second, third = conns
    await stand_by(first, "first")
    await first.close()
    await eventually(lambda: value(third, f"select not exists (select from {OWN_LOCKS} where classid = 4712)"))
    taken = await asyncio.gather(*(stand_by(conn, "x") for conn in (second, third)))
    assert sorted([done.epoch for done in taken], key=str) == [2, None]


async def test_the_timeouts_of_a_leaders_session_fit_its_lease(conns: list[AsyncConnection]) -> None:
    conn = conns[0]
    await shards.bound_session(conn, statement_seconds=2.5, lock_seconds=0.25, transaction_seconds=5, idle_seconds=5)
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")
    shown = [await value(conn, "select current_setting(%s)", name) for name in names]
    assert shown == ["2500ms", "250ms", "5s", "5s"]


@pytest.mark.requirement("N02", "N03")
async def test_the_server_ends_a_leaders_session_that_falls_silent(conns: list[AsyncConnection]) -> None:
    """Frozen or cut off: the lock is free once the lease is over, and no transaction stays open."""
    silent, frozen, other = conns
    await silent.execute("select pg_advisory_lock(4712, 0)")
    await frozen.execute("begin")
    await frozen.execute("select pg_advisory_xact_lock_shared(4711, 0)")
    # At last: on a busy machine they could be ended for their silence before they have what they hold.
    for conn in (silent, frozen):
        await shards.bound_session(
            conn, statement_seconds=1, lock_seconds=1, transaction_seconds=0.05, idle_seconds=0.05
        )
    await eventually(lambda: value(other, f"select not exists (select from {OWN_LOCKS} where locktype = 'advisory')"))
    for conn in (silent, frozen):
        await conn.close()


# one look ------------------------------------------------------------------------------------------------------------


async def look(conn: AsyncConnection, epoch: int) -> PendingWork:
    return await poll_work(conn, shard=0, epoch=epoch, lost_after=90, seconds=5, elapsed=1.0)


@pytest.mark.requirement("H6")
async def test_a_look_says_what_is_due_and_when(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    await set_clock(conn, later(0))
    epoch = await lead(conn)
    nothing = await look(conn, epoch)
    assert (nothing.read_at, nothing.next_fire, nothing.next_timer, nothing.next_expiry) == (later(0), None, None, None)
    assert (nothing.has_waiting_retries, nothing.overdue, nothing.dags_with_free_slots, nothing.errors) == (
        False,
        [],
        [],
        [],
    )
    await put(conn, make_dag("tick", ONE, every="@every 60s"))
    await put(conn, make_dag("flaky", ONE, task_retry=RetryPolicy(retries=3)))
    await start(conn, "flaky")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=30)
    seen = await look(conn, epoch)
    assert (seen.next_fire, seen.next_timer, seen.has_waiting_retries) == (later(60), later(30), False)
    await set_clock(conn, later(31))
    await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10, bound=0)
    assert (await look(conn, epoch)).has_waiting_retries
    await conn.execute("update schedule_state set error = 'cannot be read'")
    assert (await look(conn, epoch)).next_fire is None
    await conn.execute("update schedule_state set error = null")
    assert (await look(conn, epoch)).next_fire is not None
    await pause(conn, dag="tick", actor=Actor("me"))
    assert (await look(conn, epoch)).next_fire is None


async def test_a_look_renews_only_when_it_is_asked_to(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    await set_clock(conn, later(0))
    epoch = await lead(conn)
    until = await value(conn, "select lease_until from shard")
    await poll_work(conn, shard=0, epoch=epoch, lost_after=90)
    assert await value(conn, "select lease_until from shard") == until
    await look(conn, epoch)
    assert await value(conn, "select lease_until from shard") == later(5)


async def test_a_look_says_whether_notifications_wait(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch = await lead(conn)
    assert (await look(conn, epoch)).has_deliveries is False
    for state, shard, waits in (("sent", 0, False), ("waiting", 1, False), ("waiting", 0, True)):
        await conn.execute(
            "insert into outbox (shard, sink, event, payload, state, created_at, waiting_since, due_at, ended_at) values"
            " (%s, 'log:', 'failure', '{}', %s, clock(), clock(), clock(), case when %s = 'sent' then clock() end)",
            [shard, state, state],
        )
        assert (await look(conn, epoch)).has_deliveries is waits


async def test_a_look_moves_the_mark_of_the_server_that_it_is_given(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch, server = await lead(conn), (await failover.read_server_status(conn)).server
    assert server is not None
    first = await failover.mark(conn, server, actor="me")
    assert first is not None and (await look(conn, epoch)).marked_lsn is None
    seen = await poll_work(conn, shard=0, epoch=epoch, lost_after=90, **advancing(first))
    assert seen.marked_lsn is not None and seen.marked_lsn > first.lsn and seen.is_synchronous is False
    assert await failover.marked(conn, server) == seen.marked_lsn
    elsewhere = [replace(server, timeline=server.timeline + 1), replace(server, system_id=server.system_id + 1)]
    others = [*(replace(first, server=other) for other in elsewhere), replace(first, lsn=seen.marked_lsn + 1)]
    for other in others:
        assert (await poll_work(conn, shard=0, epoch=epoch, lost_after=90, **advancing(other))).marked_lsn is None
    assert await failover.marked(conn, server) == seen.marked_lsn, "neither a first mark nor one after a loss"
    assert await value(conn, "select count(*) from server_timeline") == 1


async def test_a_look_does_not_wait_for_somebody_else_who_marks(conns: list[AsyncConnection]) -> None:
    conn, other, _ = conns
    epoch, server = await lead(conn), (await failover.read_server_status(conn)).server
    assert server is not None
    mark = await failover.mark(conn, server, actor="me")
    async with other.transaction():
        await other.execute("select from server_timeline for update")
        seen = await poll_work(conn, shard=0, epoch=epoch, lost_after=90, **advancing(mark))
        assert (seen.marked_lsn, seen.errors) == (None, [])


@pytest.mark.requirement("A4", "A10")
@pytest.mark.parametrize("is_resigned", [False, True])
async def test_an_old_leader_sees_and_renews_nothing(rollback_conn: AsyncConnection, is_resigned: bool) -> None:
    conn = rollback_conn
    epoch = await lead(conn)
    await Runner.join(conn)
    if is_resigned:
        await release_shard(conn, shard=0, epoch=epoch)
    else:
        await lead(conn)
    async with conn.transaction():
        with pytest.raises(NotLeader):
            async with conn.transaction():
                await look(conn, epoch)
    assert await value(conn, "select max(silent_seconds) from runner") == 0


BROKEN_PARTS = {
    "fire": "alter table schedule_state rename to away",
    "promote": "alter table task_timer rename to away",
    "reap": "alter table runner rename column observed_seq to away",
    "time_out": "drop function overdue_runs",
    "admit": "drop function dags_with_free_slots",
}


@pytest.mark.requirement("A12", "A1", "V11")
@pytest.mark.parametrize("part", BROKEN_PARTS)
async def test_a_part_of_a_look_that_breaks_leaves_the_others_and_the_lease_alone(
    rollback_conn: AsyncConnection, part: str
) -> None:
    conn = rollback_conn
    await set_clock(conn, later(0))
    epoch = await lead(conn)
    await put(conn, make_dag("tick", ONE, every="@every 60s"))
    await Runner.join(conn)
    await conn.execute(BROKEN_PARTS[part])  # type: ignore[arg-type]
    seen = await look(conn, epoch)
    # Whether a schedule takes events is a fact of its state as well.
    also = ["inbox"] if part == "fire" else []
    assert [trouble.split(":")[0] for trouble in seen.errors] == [part, *also]
    assert await value(conn, "select lease_until from shard") == later(5)
    assert (seen.next_fire == later(60)) is (part != "fire")
    assert (seen.silent_sessions is None) is (part == "reap")
    assert (seen.overdue is None) is (part == "time_out")
    assert (seen.dags_with_free_slots is None) is (part == "admit")


@pytest.mark.requirement("A1", "N16")
@pytest.mark.parametrize(
    "table", ["schedule_state", "task_timer", "retry_queue", "runner", "lease", "run_status", "ready_task"]
)
async def test_a_look_does_not_wait_for_a_table_that_somebody_holds(conns: list[AsyncConnection], table: str) -> None:
    leader, holder, _ = conns
    epoch = await lead(leader)
    await Runner.join(leader)
    async with holder.transaction():
        await holder.execute(f"lock table {table} in access exclusive mode")  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            seen = await look(leader, epoch)
    assert seen.errors
    counted = await value(leader, "select max(silent_seconds) from runner")
    assert (counted == 0) is (table in ("runner", "lease")), "what the leader cannot write itself is nobody's silence"


async def test_a_queued_run_that_was_passed_over_is_seen_when_there_is_room(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch = await lead(conn)
    await put(conn, make_dag("limited", ONE, max_active_runs=1))
    await put(conn, make_dag("free", ONE))
    running, queued = await start(conn, "limited"), await start(conn, "limited")
    await start(conn, "free")
    assert (await look(conn, epoch)).dags_with_free_slots == []
    await conn.execute("update task set state = 'success', finished_at = clock() where run_id = %s", [running])
    await conn.execute(
        "update run_status set state = 'success', open_tasks = 0, finished_at = clock() where run_id = %s", [running]
    )
    dag_id = await value(conn, "select dag_id from run where run_id = %s", queued)
    assert (await look(conn, epoch)).dags_with_free_slots == [dag_id]
    await pause(conn, dag="limited", actor=Actor("me"))
    assert (await look(conn, epoch)).dags_with_free_slots == []


async def test_what_one_row_can_be_guilty_of_is_the_same_in_sql(rollback_conn: AsyncConnection) -> None:
    codes = ["22003", "23505", "23514", "54000", "XX000", "XX001", "P0001", "P0002", "40P01", "40001", "55P03", "57014"]
    codes += ["53100", "42P01", "42883", "EV001", "25P03", "08006", "58030"]
    cursor = await rollback_conn.execute("select c, is_poison(c) from unnest(%s::text[]) c", [codes])
    found = dict(await cursor.fetchall())
    assert found == {code: is_poison(code) for code in codes}
    assert [code for code in codes if found[code]] == codes[:7]
    assert not is_poison(None)


async def test_a_plan_that_is_passed_by_is_not_asked_for_again(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    await set_clock(conn, later(0))
    epoch = await lead(conn)
    for name in ("one", "two"):
        await put(conn, make_dag(name, ONE, every=timedelta(seconds=60)))
    (one,), (two,) = [await schedules.of_dag(conn, dag=name) for name in ("one", "two")]
    await set_clock(conn, later(60))
    assert len(await schedules.due(conn, shard=0, batch=10, passed_over=[])) == 2
    due = await schedules.due(conn, shard=0, batch=10, passed_over=[one.schedule_id])
    assert [each.schedule_id for each in due] == [two.schedule_id]
    assert (await _fire_schedules(conn, shard=0, epoch=epoch, plans=[plan(one), plan(two)])).won != []
    assert await runners.live(conn) == []


@pytest.mark.requirement("H6")
async def test_a_look_reads_little_however_much_is_open_and_whenever_it_was_planned(
    rollback_conn: AsyncConnection,
) -> None:
    """Planned while everything was empty, as the first look of a new installation is."""
    conn = rollback_conn
    epoch = await lead(conn)
    await look(conn, epoch)
    await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)
    runner = await Runner.join(conn)
    await put(conn, make_dag("timed", ONE, run_timeout_seconds=1e6, task_retry=RetryPolicy(retries=1)))
    await put(conn, make_dag("limited", ONE, max_active_runs=1))
    for _ in range(300):
        await start(conn, "timed")
        await start(conn, "limited")
    claims = await runner.claim(200)
    await runner.step([(claim, "failed", {"retry_in": 1000}) for claim in claims[:100]])
    for what in (look(conn, epoch), promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)):
        before = await rows_read(conn)
        await what
        read = {table: count - before[table] for table, count in (await rows_read(conn)).items()}
        # Each run of a DAG with a time limit is looked at; of everything else a handful.
        assert read.pop("run_status") <= 320
        assert {table: count for table, count in read.items() if count > 20} == {}


async def rows_read(conn: AsyncConnection) -> dict[str, int]:
    cursor = await conn.execute(
        "select relname, seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables"
        " where relname in ('task', 'ready_task', 'lease', 'task_timer', 'run_status', 'run', 'runner', 'schedule_state')"
    )
    return dict(await cursor.fetchall())
