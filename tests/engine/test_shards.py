"""More than one shard: which one a DAG belongs to, how it gets to another, and that each leader writes in its own alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules, shards
from evertick.domain.access import Actor
from evertick.domain.errors import NotLeader, UserError
from evertick.domain.retry import RetryPolicy
from evertick.engine import shards as engine_shards
from evertick.engine.fire_schedules import _fire_schedules, fire_schedules, quarantine_schedule
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.shards import (
    Moved,
    acquire_shard,
    poll_work,
    rebalance_shard,
    release_shard,
    set_shard_count,
    set_shards,
    survey_shards,
    try_acquire_shard,
)
from tests.engine.plans import plan, scheduled
from tests.engine.test_gates import pool
from tests.engine.world import OWN_LOCKS, T0, Runner, later, lead, make_dag, put, set_clock, start, value
from tests.waiting import eventually

ONE: dict[str, list[str]] = {"a": []}
MINUTE = 60.0


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, T0)
    return conn


async def lead_shard(conn: AsyncConnection, shard: int) -> int:
    await conn.execute("update shard set lease_until = null where shard = %s", [shard])
    epoch = await acquire_shard(conn, shard=shard, owner="test", seconds=1e6)
    assert epoch is not None
    return epoch


async def lead_all(conn: AsyncConnection, count: int) -> dict[int, int]:
    return {shard: await lead_shard(conn, shard) for shard in range(count)}


async def move_all(conn: AsyncConnection, epochs: dict[int, int]) -> int:
    """Every leader until none finds anything to move."""
    moved = 0
    while done := sum([(await rebalance_shard(conn, shard=s, epoch=e, limit=7)).moved for s, e in epochs.items()]):
        moved += done
    return moved


async def places(conn: AsyncConnection) -> dict[str, int]:
    cursor = await conn.execute("select name, shard from dag order by name")
    return {str(row[0]): int(row[1]) for row in await cursor.fetchall()}


async def astray(conn: AsyncConnection) -> object:
    return await value(conn, "select sum(misplaced_count(shard, 1000)) from shard")


# how many, and which ------------------------------------------------------------------------------------------------------


async def test_with_one_shard_every_dag_is_in_the_first(db: AsyncConnection) -> None:
    for number in range(5):
        await put(db, make_dag(f"d{number}", ONE))
    assert set((await places(db)).values()) == {0}


async def test_dags_are_spread_over_the_shards_when_they_are_published(db: AsyncConnection) -> None:
    await set_shards(db, shards=4, actor=Actor("me"))
    for number in range(40):
        await put(db, make_dag(f"d{number}", ONE, every="@every 60s"))
    placed = await places(db)
    assert set(placed.values()) == {0, 1, 2, 3}
    assert await astray(db) == 0
    assert await value(db, "select detail from audit_log where action = 'set_shards'") == {"shards": 4, "before": 1}


@pytest.mark.parametrize("count", [0, -1, 65])
async def test_a_number_of_shards_that_makes_no_sense_is_refused(db: AsyncConnection, count: int) -> None:
    with pytest.raises(UserError, match="from 1 to 64"):
        await set_shards(db, shards=count, actor=Actor("me"))


async def test_the_setting_counts_only_where_nobody_has_chosen(db: AsyncConnection) -> None:
    assert await set_shard_count(db, shards=3, actor=Actor("first start"), if_never_chosen=True)
    await set_shards(db, shards=2, actor=Actor("me"))
    assert not await set_shard_count(db, shards=3, actor=Actor("second start"), if_never_chosen=True)
    assert await value(db, "select open_shard_count()") == 2


async def test_every_leader_learns_of_the_number_by_renewing(db: AsyncConnection) -> None:
    epoch = await lead(db)
    before = await engine_shards.poll_work(db, shard=0, epoch=epoch, lost_after=90, seconds=5)
    assert (before.shard_count, before.has_moves) == (1, False)
    await set_shards(db, shards=4, actor=Actor("me"))
    after = await engine_shards.poll_work(db, shard=0, epoch=epoch, lost_after=90, seconds=5)
    assert (after.shard_count, after.has_moves) == (4, True)


# moving -------------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V1")
async def test_what_belongs_to_another_shard_is_moved_with_all_that_hangs_on_it(db: AsyncConnection) -> None:
    runner = await Runner.join(db)
    for number in range(20):
        await put(
            db, make_dag(f"d{number}", ONE, every="@every 60s", task_retry=RetryPolicy(retries=1, delay_seconds=9))
        )
        await start(db, f"d{number}")
    for claim in await runner.claim(20):
        await runner.finish(claim, "failed", retry_in=9)
    assert await value(db, "select count(*) from task_timer") == 20
    await set_shards(db, shards=4, actor=Actor("me"))
    epochs = await lead_all(db, 4)
    assert await move_all(db, epochs) > 0
    assert await astray(db) == 0
    assert set((await places(db)).values()) == {0, 1, 2, 3}
    assert await value(db, "select count(*) from task_timer t where t.shard <> shard_of_run(t.run_id)") == 0
    # Nothing was taken for lost meanwhile, and each leader promotes and fires its own.
    for shard, epoch in epochs.items():
        assert (await reconcile_runs(db, shard=shard, epoch=epoch, limit=100)).repaired == []
    await set_clock(db, later(61))
    promoted = [
        (await promote_due_tasks(db, shard=shard, epoch=epoch, limit=100)).promoted for shard, epoch in epochs.items()
    ]
    fired = [(await fire_schedules(db, shard=shard, epoch=epoch, batch=100)).settled for shard, epoch in epochs.items()]
    assert sum(fired) == 20
    assert all(count < 20 for count in fired)
    assert sum(promoted) > 0
    runs = await value(
        db, "select array_agg(n) from (select count(*) as n from run where fire_at is not null group by schedule_id) x"
    )
    assert runs == [1] * 20


async def test_a_timer_that_has_not_moved_yet_is_neither_missed_nor_doubled(db: AsyncConnection) -> None:
    """Between the move of a DAG and that of its timers, the round of repairs of the new shard comes by."""
    runner = await Runner.join(db)
    await put(db, make_dag("d", ONE, task_retry=RetryPolicy(retries=1, delay_seconds=9)))
    await start(db, "d")
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=9)
    await set_shards(db, shards=2, actor=Actor("me"))
    epochs = await lead_all(db, 2)
    await db.execute("update dag set shard = 1")
    assert (await reconcile_runs(db, shard=1, epoch=epochs[1], limit=100)).repaired == []
    await set_clock(db, later(10))
    assert (await promote_due_tasks(db, shard=0, epoch=epochs[0], limit=10)).promoted == 1, (
        "its old shard's leader sees to it"
    )
    assert (await promote_due_tasks(db, shard=1, epoch=epochs[1], limit=10)).promoted == 0


@pytest.mark.requirement("V1", "V3")
async def test_a_schedule_that_has_moved_is_fired_by_its_new_leader_alone(db: AsyncConnection) -> None:
    """The old leader had read it and planned its fire before it moved."""
    _, schedule = await scheduled(db)
    await set_shards(db, shards=2, actor=Actor("me"))
    epochs = await lead_all(db, 2)
    await set_clock(db, later(60))
    (due,) = await schedules.due(db, shard=0, batch=10, passed_over=[])
    await db.execute("update dag set shard = 1")
    await db.execute("update schedule_state set shard = 1")
    planned = [plan(schedule)]
    assert (await _fire_schedules(db, shard=0, epoch=epochs[0], plans=planned)).won == []
    aside = await quarantine_schedule(
        db,
        shard=0,
        epoch=epochs[0],
        schedule_id=due.schedule_id,
        version=due.version,
        reason="no",
        is_tried_again=False,
    )
    assert not aside
    assert (await _fire_schedules(db, shard=1, epoch=epochs[1], plans=planned)).won == [due.schedule_id]


@pytest.mark.requirement("V3")
async def test_only_the_leader_of_a_shard_moves_out_of_it(db: AsyncConnection) -> None:
    for number in range(10):
        await put(db, make_dag(f"d{number}", ONE))
    await set_shards(db, shards=2, actor=Actor("me"))
    old = await lead_shard(db, 0)
    await lead_shard(db, 0)
    with pytest.raises(NotLeader):
        await rebalance_shard(db, shard=0, epoch=old, limit=100)
    assert set((await places(db)).values()) == {0}


async def test_what_somebody_holds_is_moved_the_next_time(database: str, conn: AsyncConnection) -> None:
    for number in range(10):
        await put(conn, make_dag(f"d{number}", ONE, every="@every 60s"))
    await set_shards(conn, shards=2, actor=Actor("me"))
    epoch = await lead_shard(conn, 0)
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        async with other.transaction():
            await other.execute("select from dag for update")
            await other.execute("select from schedule_state for update")
            done = await rebalance_shard(conn, shard=0, epoch=epoch, limit=100)
            assert done == Moved(moved=0, is_over=False, is_closed=False)
        async with other.transaction():
            await other.execute("select from schedule_state for update")
            assert (await rebalance_shard(conn, shard=0, epoch=epoch, limit=100)).moved > 0
            assert await astray(conn) != 0
    assert (await rebalance_shard(conn, shard=0, epoch=epoch, limit=100)).moved > 0
    assert await astray(conn) == 0


async def test_the_look_for_what_must_move_ends_a_minute_after_the_change(db: AsyncConnection) -> None:
    await put(db, make_dag("d", ONE))
    await set_shards(db, shards=2, actor=Actor("me"))
    epochs = await lead_all(db, 2)
    await move_all(db, epochs)
    assert not (await rebalance_shard(db, shard=0, epoch=epochs[0], limit=10)).is_over, (
        "somebody may just be writing for it"
    )
    await set_clock(db, later(MINUTE + 1))
    assert await rebalance_shard(db, shard=0, epoch=epochs[0], limit=10) == Moved(
        moved=0, is_over=True, is_closed=False
    )
    assert await value(db, "select rebalancing_since is null from shard where shard = 0")
    assert await value(db, "select rebalancing_since is not null from shard where shard = 1"), "each leader for its own"


# fewer --------------------------------------------------------------------------------------------------------------------


async def fewer(db: AsyncConnection) -> dict[int, int]:
    """Four shards become two; everything has moved, and the minute is over. Returns the epochs."""
    await set_shards(db, shards=4, actor=Actor("me"))
    for number in range(20):
        await put(db, make_dag(f"d{number}", ONE, every="@every 60s"))
    epochs = await lead_all(db, 4)
    await set_shards(db, shards=2, actor=Actor("me"))
    await move_all(db, epochs)
    await set_clock(db, later(MINUTE + 1))
    return epochs


async def test_a_shard_that_is_not_wanted_any_more_empties_and_closes(db: AsyncConnection) -> None:
    epochs = await fewer(db)
    assert set((await places(db)).values()) == {0, 1}
    assert await value(db, "select shard_count from shard where shard = 0") == 4, "until it is closed it is led"
    for shard in (2, 3):
        assert await rebalance_shard(db, shard=shard, epoch=epochs[shard], limit=10) == Moved(
            moved=0, is_over=True, is_closed=True
        )
        with pytest.raises(NotLeader):
            await fire_schedules(db, shard=shard, epoch=epochs[shard], batch=1)
            await rebalance_shard(db, shard=shard, epoch=epochs[shard], limit=10)
        assert await acquire_shard(db, shard=shard, owner="x", seconds=5) is None, "nobody leads it"
    assert await value(db, "select shard_count from shard where shard = 0") == 2


async def test_a_shard_that_comes_back_goes_on_with_its_epochs(db: AsyncConnection) -> None:
    """A leader of long ago must never meet its own epoch again."""
    epochs = await fewer(db)
    await rebalance_shard(db, shard=3, epoch=epochs[3], limit=10)
    await set_shards(db, shards=4, actor=Actor("me"))
    assert await lead_shard(db, 3) > epochs[3]


async def test_what_turns_up_in_a_closed_shard_is_found(db: AsyncConnection) -> None:
    """A transaction that took longer than a minute had read where its DAG was."""
    epochs = await fewer(db)
    for shard in (2, 3):
        await rebalance_shard(db, shard=shard, epoch=epochs[shard], limit=10)
    await db.execute(
        "update schedule_state set shard = 3 where schedule_id = (select min(schedule_id) from schedule_state)"
    )
    await db.execute("update dag set shard = 1 - shard where name in ('d0', 'd1', 'd2', 'd3')")
    await reconcile_runs(db, shard=1, epoch=epochs[1], limit=100)
    assert await value(db, "select state from shard where shard = 3") == "closed", "that is not its business"
    await reconcile_runs(db, shard=0, epoch=epochs[0], limit=100)
    states = await value(db, "select array_agg(state order by shard) from shard")
    assert states == ["open", "open", "closed", "draining"], "the others are as they were"
    await move_all(db, {0: epochs[0], 1: epochs[1], 3: await lead_shard(db, 3)})
    assert await astray(db) == 0


async def test_moves_are_not_over_for_a_change_that_came_meanwhile(db: AsyncConnection) -> None:
    epochs = await fewer(db)
    await set_shards(db, shards=2, actor=Actor("me"))
    assert not (await rebalance_shard(db, shard=3, epoch=epochs[3], limit=10)).is_over


# handing over -------------------------------------------------------------------------------------------------------------


async def test_a_transferred_shard_is_reserved_for_its_successor_until_a_timeout(db: AsyncConnection) -> None:
    epoch = await lead(db)
    assert not await release_shard(db, shard=0, epoch=epoch - 1, successor="b", successor_seconds=1)
    assert await release_shard(db, shard=0, epoch=epoch, successor="b", successor_seconds=1)
    assert await acquire_shard(db, shard=0, owner="c", seconds=5) is None
    assert await acquire_shard(db, shard=0, owner="b", seconds=5) == epoch + 1
    assert await value(db, "select successor from shard") is None
    assert await release_shard(db, shard=0, epoch=epoch + 1, successor="b", successor_seconds=1)
    await set_clock(db, later(1.5))
    assert await acquire_shard(db, shard=0, owner="c", seconds=5) == epoch + 2


@pytest.fixture
async def pair(database: str) -> AsyncIterator[tuple[AsyncConnection, AsyncConnection]]:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as one,
        await connect(database, purpose=Purpose.SCHEDULER) as two,
    ):
        yield one, two


@pytest.mark.requirement("A10", "N01")
@pytest.mark.parametrize("heir", ["b", None])
async def test_who_is_handed_a_shard_is_watched_from_its_first_moment_on(
    pair: tuple[AsyncConnection, AsyncConnection], heir: str | None
) -> None:
    """The session of who led before may last a while. If the new one were not watched and died at once, everybody would wait
    for the end of its lease."""
    one, two = pair
    led = await try_acquire_shard(one, shard=0, owner="a", seconds=1000, watches=True)
    assert led.epoch is not None and led.has_session_lock

    async def give(epoch: int) -> bool:
        if heir is None:
            return await release_shard(one, shard=0, epoch=epoch)
        return await release_shard(one, shard=0, epoch=epoch, successor=heir, successor_seconds=1000)

    assert not await give(led.epoch - 1)
    assert (await try_acquire_shard(two, shard=0, owner="b", seconds=1000, watches=True)).epoch is None, (
        "it leads and is alive"
    )
    assert await give(led.epoch)
    if heir is not None:
        assert (await try_acquire_shard(two, shard=0, owner="c", seconds=1000, watches=True)).epoch is None
    taken = await try_acquire_shard(two, shard=0, owner="b", seconds=1000, watches=True)
    assert (taken.epoch, taken.has_session_lock) == (led.epoch + 1, True)
    await two.close()
    await eventually(lambda: _takes(one, "a"))


async def _takes(conn: AsyncConnection, owner: str) -> bool:
    return (await try_acquire_shard(conn, shard=0, owner=owner, seconds=1000, watches=True)).epoch is not None


async def test_a_leader_without_a_watch_releases_leadership_as_well(
    pair: tuple[AsyncConnection, AsyncConnection],
) -> None:
    """Another session has the lock, for instance of one that is frozen: it stays where it is."""
    one, two = pair
    await two.execute("select pg_advisory_lock(4712, 0)")
    led = await try_acquire_shard(one, shard=0, owner="a", seconds=1000, watches=True)
    assert led.epoch is not None and not led.has_session_lock
    heard: list[str] = []
    one.add_notice_handler(lambda notice: heard.append(str(notice.message_primary)))
    assert await release_shard(one, shard=0, epoch=led.epoch)
    assert heard == []
    assert await value(one, f"select count(*) from {OWN_LOCKS} where classid = 4712 and objid = 0") == 1


async def test_a_survey_says_who_is_there_and_what_is_free(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    one, two = pair
    await set_shards(one, shards=3, actor=Actor("me"))
    await engine_shards.try_acquire_shard(two, shard=1, owner="b", seconds=1000, watches=True)
    await engine_shards.acquire_shard(one, shard=2, owner="c", seconds=1000)
    await engine_shards.survey_shards(one, owner="b", seconds=1000, watches=False)
    await engine_shards.survey_shards(two, owner="d", seconds=1000, watches=True)
    seen = await engine_shards.survey_shards(one, owner="a", seconds=1000, watches=True)
    assert [(each.shard, each.leader, each.is_free) for each in seen] == [
        (0, None, True),
        (1, "b", False),
        (2, "c", False),
    ]
    assert seen[0].live == ["a", "b", "d"]
    await two.close()
    seen = await survey_shards(one, owner="a", seconds=1000, watches=True)
    # A session's locks go one after the other.
    while not seen[1].is_free or "d" in seen[0].live:
        seen = await survey_shards(one, owner="a", seconds=1000, watches=True)
    assert [each.is_free for each in seen] == [True, True, False], (
        "a session that is over is seen; one that nobody watched is not"
    )
    assert not (await survey_shards(one, owner="a", seconds=1000, watches=False))[1].is_free
    assert seen[0].live == ["a", "b"], "one that leads nothing is missed as well"
    await shards.announce_leave(one, owner="b")
    assert (await survey_shards(one, owner="a", seconds=1000, watches=True))[0].live == ["a"]


async def test_a_scheduler_silent_for_a_lease_is_not_counted(db: AsyncConnection) -> None:
    await set_shards(db, shards=2, actor=Actor("me"))
    await engine_shards.survey_shards(db, owner="a", seconds=5, watches=False)
    await set_clock(db, later(6))
    assert (await survey_shards(db, owner="b", seconds=5, watches=False))[0].live == ["b"]
    assert [each.owner for each in await shards.schedulers(db)] == ["b"]
    await set_clock(db, later(100))
    await survey_shards(db, owner="b", seconds=5, watches=False)
    assert await value(db, "select count(*) from scheduler") == 1


# the fence, and what spans shards -------------------------------------------------------------------------------------------


@pytest.mark.requirement("A10", "V3")
async def test_each_shard_has_a_fence_of_its_own(pair: tuple[AsyncConnection, AsyncConnection]) -> None:
    """A takeover of one waits for its leader's transaction, and for no other's."""
    one, two = pair
    await set_shards(one, shards=2, actor=Actor("me"))
    epochs = await lead_all(one, 2)
    await two.execute("set lock_timeout = '50ms'")
    async with one.transaction():
        await one.execute("select fence(0::smallint, %s)", [epochs[0]])
        await two.execute("update shard set lease_until = null")
        assert await acquire_shard(two, shard=1, owner="x", seconds=5) == epochs[1] + 1
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await acquire_shard(two, shard=0, owner="x", seconds=5)
    with pytest.raises(psycopg.Error, match="not the leader of shard 1"):
        await one.execute("select fence(1::smallint, %s)", [epochs[1]])
    await one.execute("select fence(0::smallint, %s)", [epochs[0]])


async def test_what_there_is_one_of_is_told_to_the_leader_of_the_first_shard_alone(db: AsyncConnection) -> None:
    runner = await Runner.join(db)
    await set_shards(db, shards=2, actor=Actor("me"))
    epochs = await lead_all(db, 2)
    for second in range(1, 60):
        await set_clock(db, later(2 * second))
        seen = await poll_work(db, shard=1, epoch=epochs[1], lost_after=90, seconds=5, elapsed=2)
        assert (seen.silent_sessions, seen.dead_sessions, seen.has_gates, seen.has_arrivals) == (None, [], False, False)
    assert await value(db, "select silent_seconds from runner where session = %s", runner.session) == 0


@pytest.mark.requirement("H5")
async def test_the_bound_on_retries_is_one_for_all_shards(db: AsyncConnection) -> None:
    runner = await Runner.join(db)
    for name in ("left", "right"):
        await put(db, make_dag(name, ONE, task_retry=RetryPolicy(retries=1, delay_seconds=9)))
        for _ in range(3):
            await start(db, name)
    await set_shards(db, shards=2, actor=Actor("me"))
    await db.execute("update dag set shard = 1 where name = 'right'")
    epochs = await lead_all(db, 2)
    for claim in await runner.claim(6):
        await runner.finish(claim, "failed", retry_in=9)
    await set_clock(db, later(10))
    first = await promote_due_tasks(db, shard=0, epoch=epochs[0], limit=10, bound=2)
    second = await promote_due_tasks(db, shard=1, epoch=epochs[1], limit=10, bound=2)
    assert (first.promoted, second.promoted, second.has_waiting_retries) == (2, 0, True)
    for claim in await runner.claim(2):
        await runner.finish(claim)
    second = await promote_due_tasks(db, shard=1, epoch=epochs[1], limit=10, bound=2)
    assert second.promoted == 2, "what the others let in and is over does not count"


@pytest.mark.requirement("V6")
async def test_a_pool_holds_across_shards(db: AsyncConnection) -> None:
    await set_pool(db, name="db", slots=3, actor=Actor("me"))
    await set_shards(db, shards=2, actor=Actor("me"))
    for number in range(6):
        await put(db, make_dag(f"d{number}", ONE, task_gates=(pool("db"),), every="@every 60s"))
        await db.execute("update dag set shard = %s where name = %s", [number % 2, f"d{number}"])
    await db.execute(
        "update schedule_state s set shard = d.shard from schedule c join dag d using (dag_id) where c.schedule_id = s.schedule_id"
    )
    epochs = await lead_all(db, 2)
    await set_clock(db, later(60))
    for shard, epoch in epochs.items():
        assert (await fire_schedules(db, shard=shard, epoch=epoch, batch=100)).settled == 3
    runner = await Runner.join(db)
    done = 0
    while claims := await runner.claim(10):
        assert len(claims) <= 3
        for claim in claims:
            await runner.finish(claim)
        done += len(claims)
    assert done == 6


# every kind of row that has a shard -----------------------------------------------------------------------------------------

KINDS = ("dag", "schedule_state", "backfill", "deferral", "task_timer", "retry_queue", "retry_slot", "deadline")
FILL = """
insert into task_timer (shard, due_at, run_id, idx, map_index) values (0, clock(), %(run)s, 0, -1);
insert into retry_queue (shard, queue, due_at, run_id, idx, map_index) values (0, 'q', clock(), %(run)s, 0, -1);
insert into retry_slot (shard, queue, run_id, idx, map_index, epoch) values (0, 'q', %(run)s, 0, -1, 1);
insert into deadline (shard, due_at, run_id, kind) values (0, clock(), %(run)s, 'start');
insert into deferral (run_id, idx, map_index, epoch, shard, kind, wake_at) values (%(run)s, 0, -1, 1, 0, 'time', clock());
insert into backfill (shard, dag_id, spec, params, first_at, last_at, reprocess, newest_first, parallel, state, total, request,
                      created_by, created_at)
select 0, dag_id, '{}', '{}', clock(), clock(), 'none', false, 1, 'running', 1, dag_id::text, 'me', clock() from run
 where run_id = %(run)s;
"""


async def two_dags(db: AsyncConnection) -> dict[str, int]:
    """One that stays in shard 0 and one that belongs to shard 1, each with a row of every kind in shard 0; their runs."""
    found: dict[str, int] = {}
    for wanted, name in ((0, "stays"), (1, "goes")):
        number = await value(
            db, "select min(n) from generate_series(1, 100) n where shard_of(%s || n, 2) = %s", name, wanted
        )
        await put(db, make_dag(f"{name}{number}", ONE, every="@every 60s"))
        found[name] = await start(db, f"{name}{number}")
        for statement in FILL.strip().split(";\n"):
            await db.execute(statement.rstrip(";"), {"run": found[name]})
    return found


async def counts(db: AsyncConnection) -> dict[str, str]:
    """How many rows of each kind are in shard 0, and how many in shard 1."""
    counted = "select count(*) filter (where shard = 0) || ' ' || count(*) filter (where shard = 1) from "
    return {kind: str(await value(db, counted + kind)) for kind in KINDS}


async def test_every_kind_of_row_moves_and_what_belongs_here_stays(db: AsyncConnection) -> None:
    runs = await two_dags(db)
    await set_shards(db, shards=2, actor=Actor("me"))
    epoch = await lead(db)
    assert await counts(db) == dict.fromkeys(KINDS, "2 0")
    assert await value(db, "select misplaced_count(0::smallint, 1000)") == 1, (
        "what hangs on a DAG belongs to where the DAG is"
    )
    assert (await rebalance_shard(db, shard=0, epoch=epoch, limit=100)).moved == len(KINDS)
    assert await counts(db) == dict.fromkeys(KINDS, "1 1")
    for kind in KINDS[3:]:
        assert await value(db, f"select run_id from {kind} where shard = 1") == runs["goes"]
    assert await value(db, "select misplaced_count(0::smallint, 1000)") == 0
    for kind in KINDS:
        await db.execute(f"update {kind} set shard = 0")
        await db.execute("update dag set shard = 1 where name like 'goes%'")
        assert await value(db, "select misplaced_count(0::smallint, 1000)") == (0 if kind == "dag" else 1), kind
        await rebalance_shard(db, shard=0, epoch=epoch, limit=100)
    await db.execute("delete from run_status where run_id = %s", [runs["stays"]])
    assert await value(db, "select shard_of_run(%s)", runs["stays"]) == 0, (
        "what is left of a run that is gone is not lost"
    )


async def test_a_row_that_is_there_already_is_no_obstacle(db: AsyncConnection) -> None:
    await two_dags(db)
    await set_shards(db, shards=2, actor=Actor("me"))
    epoch = await lead(db)
    for kind in ("task_timer", "retry_queue", "retry_slot", "deadline"):
        columns = {"task_timer": "", "retry_queue": "queue, ", "retry_slot": "queue, epoch, ", "deadline": "kind, "}[
            kind
        ]
        key = "run_id" if kind == "deadline" else "run_id, idx, map_index"
        due = "" if kind == "retry_slot" else "due_at, "
        await db.execute(f"insert into {kind} (shard, {due}{columns}{key}) select 1, {due}{columns}{key} from {kind}")
    await rebalance_shard(db, shard=0, epoch=epoch, limit=100)
    assert await value(db, "select misplaced_count(0::smallint, 1000)") == 0


async def test_moving_waits_for_nobody(database: str, conn: AsyncConnection) -> None:
    await two_dags(conn)
    await set_shards(conn, shards=2, actor=Actor("me"))
    epoch = await lead(conn)
    await conn.execute("set lock_timeout = '200ms'")
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        for held in KINDS:
            async with other.transaction():
                await other.execute(f"select from {held} for update")
                await rebalance_shard(conn, shard=0, epoch=epoch, limit=100)
                if held == "dag":
                    assert await counts(conn) == dict.fromkeys(KINDS, "2 0")
                else:
                    assert (await counts(conn))[held] == "2 0", held
            await conn.execute("update dag set shard = 1 where name like 'goes%'")
            for kind in KINDS[1:]:
                await conn.execute(f"update {kind} set shard = 0")
    assert (await rebalance_shard(conn, shard=0, epoch=epoch, limit=100)).moved == len(KINDS) - 1
