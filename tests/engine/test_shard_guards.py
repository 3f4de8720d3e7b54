"""What holds the number of shards together: who changes it comes one after the other, and nobody is taken for somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from psycopg import AsyncConnection, conninfo

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.engine.maintenance import reconcile_runs
from evertick.engine.shards import (
    acquire_shard,
    rebalance_shard,
    set_shard_count,
    set_shards,
    survey_shards,
    try_acquire_shard,
)
from tests.engine.test_shards import MINUTE, ONE, fewer, lead_all
from tests.engine.world import OWN_LOCKS, T0, later, make_dag, put, set_clock, value
from tests.waiting import eventually


@pytest.fixture
async def db(conn: AsyncConnection) -> AsyncConnection:
    await set_clock(conn, T0)
    return conn


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as opened:
        yield opened


# how many ------------------------------------------------------------------------------------------------------------------


async def test_of_two_that_choose_at_the_same_time_one_has_chosen(db: AsyncConnection, other: AsyncConnection) -> None:
    async with other.transaction():
        assert await set_shard_count(other, shards=3, actor=Actor("first start"), if_never_chosen=True)
        second = asyncio.ensure_future(set_shard_count(db, shards=5, actor=Actor("second start"), if_never_chosen=True))
        await eventually(
            lambda: value(other, f"select exists (select from {OWN_LOCKS} where classid = 4714 and not granted)")
        )
    assert not await second
    assert await value(db, "select open_shard_count()") == 3


async def close_two(db: AsyncConnection) -> dict[int, int]:
    """Of four shards the last two are closed; returns the epochs under which they were led."""
    epochs = await fewer(db)
    for shard in (2, 3):
        assert (await rebalance_shard(db, shard=shard, epoch=epochs[shard], limit=10)).is_closed
    return epochs


async def test_who_changes_how_many_there_are_waits_for_who_does_so(
    db: AsyncConnection, other: AsyncConnection
) -> None:
    """Each counts the shards after its change: two at once would both be right, and the sum wrong."""
    epochs = await fewer(db)
    await rebalance_shard(db, shard=3, epoch=epochs[3], limit=10)
    await db.execute("update dag set shard = 3 where name = 'd1'")
    deeds: list[Callable[[], Awaitable[object]]] = [
        lambda: set_shards(db, shards=3, actor=Actor("me")),
        lambda: rebalance_shard(db, shard=2, epoch=epochs[2], limit=10),
        lambda: db.execute("select reopen_shards()"),
    ]
    await db.execute("set lock_timeout = '30ms'")
    for deed in deeds:
        async with other.transaction():
            await other.execute("select pg_advisory_xact_lock(4714, 0)")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await deed()
        await deed()
    assert await value(db, "select shard_count from shard where shard = 0") == 4


async def test_a_closed_shard_stays_closed_when_the_number_is_set_again(db: AsyncConnection) -> None:
    await close_two(db)
    await set_shards(db, shards=1, actor=Actor("me"))
    rows = await db.execute("select state, rebalancing_since is not null from shard order by shard")
    assert await rows.fetchall() == [("open", True), ("draining", True), ("closed", False), ("closed", False)]
    assert await value(db, "select array_agg(distinct shard_count) from shard") == [2]


async def test_only_the_leader_of_that_epoch_ends_the_moves(db: AsyncConnection) -> None:
    epochs = await fewer(db)
    for epoch, is_over in ((epochs[3] - 1, False), (epochs[3], True)):
        assert await value(db, "select is_over from finish_rebalancing(3::smallint, %s, clock())", epoch) is is_over
    assert await value(db, "select state from shard where shard = 3") == "closed"


@pytest.mark.requirement("V3")
async def test_a_shard_closes_after_the_transactions_that_passed_its_fence(
    db: AsyncConnection, other: AsyncConnection
) -> None:
    """Otherwise one of them would commit under an epoch that is over. Shards that stay open need not wait."""
    epochs = await fewer(db)
    await db.execute("set lock_timeout = '30ms'")
    async with other.transaction():
        for shard in (0, 3):
            await other.execute("select fence(%s::smallint, %s)", [shard, epochs[shard]])
        ended = [await rebalance_shard(db, shard=shard, epoch=epochs[shard], limit=10) for shard in (0, 3)]
        assert [(each.is_over, each.is_closed) for each in ended] == [(True, False), (False, False)]
    assert (await rebalance_shard(db, shard=3, epoch=epochs[3], limit=10)).is_closed


async def test_what_is_where_it_belongs_brings_no_shard_back(db: AsyncConnection) -> None:
    epochs = await close_two(db)
    await reconcile_runs(db, shard=0, epoch=epochs[0], limit=100)
    assert await value(db, "select array_agg(state order by shard) from shard") == ["open", "open", "closed", "closed"]


async def test_the_minute_begins_again_with_every_change(db: AsyncConnection) -> None:
    await put(db, make_dag("d", ONE))
    await set_shards(db, shards=2, actor=Actor("me"))
    epochs = await lead_all(db, 2)
    await set_clock(db, later(MINUTE - 1))
    await set_shards(db, shards=2, actor=Actor("me"))
    await rebalance_shard(db, shard=0, epoch=epochs[0], limit=10)
    await set_clock(db, later(MINUTE + 1))
    assert not (await rebalance_shard(db, shard=0, epoch=epochs[0], limit=10)).is_over
    await set_clock(db, later(2 * MINUTE))
    assert (await rebalance_shard(db, shard=0, epoch=epochs[0], limit=10)).is_over


async def test_who_stands_by_does_not_wait_for_a_leader_that_lives(db: AsyncConnection, other: AsyncConnection) -> None:
    """Nor does it make the leader wait: it asks for the fence only where there is something to take."""
    await set_shards(db, shards=2, actor=Actor("me"))
    epochs = await lead_all(db, 2)
    await other.execute("set lock_timeout = '30ms'")
    async with db.transaction():
        await db.execute("select fence(1::smallint, %s)", [epochs[1]])
        assert (await try_acquire_shard(other, shard=1, owner="x", seconds=5, watches=True)).epoch is None


@pytest.mark.requirement("A4", "A10")
async def test_of_two_that_wait_for_the_fence_one_takes_the_shard(
    database: str, db: AsyncConnection, other: AsyncConnection
) -> None:
    epochs = await lead_all(db, 1)
    await db.execute("update shard set lease_until = null")
    async with await connect(database, purpose=Purpose.SCHEDULER) as third:
        async with db.transaction():
            await db.execute("select fence(0::smallint, %s)", [epochs[0]])
            asked = [
                asyncio.ensure_future(acquire_shard(conn, shard=0, owner="x", seconds=1000)) for conn in (other, third)
            ]
            await eventually(
                lambda: value(db, f"select count(*) = 2 from {OWN_LOCKS} where classid = 4711 and not granted")
            )
        assert sorted(await asyncio.gather(*asked), key=str) == [epochs[0] + 1, None]


# who is there ----------------------------------------------------------------------------------------------------------------


async def survey(conn: AsyncConnection) -> dict[int, bool]:
    """Which shards are led or should be, and whether each is free."""
    found = await survey_shards(conn, owner="me", seconds=1000, watches=True)
    return {each.shard: each.is_free for each in found}


async def test_a_survey_tells_of_no_closed_shard(db: AsyncConnection) -> None:
    await close_two(db)
    assert list(await survey(db)) == [0, 1]


async def test_a_survey_waits_for_nobody_who_forgets_the_same(db: AsyncConnection, other: AsyncConnection) -> None:
    await set_shards(db, shards=2, actor=Actor("me"))
    await survey_shards(db, owner="old", seconds=1, watches=False)
    await set_clock(db, later(100))
    await db.execute("set lock_timeout = '30ms'")
    async with other.transaction():
        await other.execute("select from scheduler for update")
        assert len(await survey(db)) == 2
    await survey(db)
    assert await value(db, "select array_agg(owner) from scheduler") == ["me"]


OTHER_LOCKS = {
    "of another kind": "select pg_advisory_lock(4799, 1)",
    "by one number": "select pg_advisory_lock((4712::bigint << 32) | 1)",
    "of another shard": "select pg_advisory_lock(4712, 2)",
}


@pytest.mark.requirement("A10", "N01")
@pytest.mark.parametrize("lock", OTHER_LOCKS)
async def test_a_lock_of_something_else_does_not_make_a_dead_leader_look_alive(
    db: AsyncConnection, other: AsyncConnection, lock: str
) -> None:
    await set_shards(db, shards=3, actor=Actor("me"))
    await other.execute(OTHER_LOCKS[lock])
    await lead_and_die(db)
    assert (await survey(db))[1]


@pytest.mark.requirement("A10", "N01")
async def test_a_lock_in_another_database_does_not_make_a_dead_leader_look_alive(
    database: str, db: AsyncConnection
) -> None:
    await set_shards(db, shards=3, actor=Actor("me"))
    elsewhere = conninfo.make_conninfo(database, dbname="postgres")
    async with await AsyncConnection.connect(elsewhere, autocommit=True) as stranger:
        # Shared: other tests on this server may do the same.
        await stranger.execute("select pg_advisory_lock_shared(4712, 1)")
        await lead_and_die(db)
        assert (await survey(db))[1]


async def lead_and_die(conn: AsyncConnection) -> None:
    """A leader of shard 1 that was watched, and whose session is over."""
    led = await try_acquire_shard(conn, shard=1, owner="dead", seconds=1000, watches=True)
    assert led.has_session_lock
    await conn.execute("select pg_advisory_unlock(4712, 1)")
