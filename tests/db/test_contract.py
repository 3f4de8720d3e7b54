"""What Evertick relies on, on each PostgreSQL that it may be given: the embedded one, and an older one over TCP."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrate, status
from tests.databases import Cluster


async def test_it_connects_for_every_purpose(any_postgres: str) -> None:
    for purpose in Purpose:
        async with await connect(any_postgres, purpose=purpose) as conn:
            assert await (await conn.execute("select current_setting('application_name')")).fetchone() == (
                f"evertick-{purpose}",
            )


async def test_the_server_watches_for_a_client_whose_host_is_gone(postgres_url_external: str) -> None:
    async with await connect(postgres_url_external, purpose=Purpose.RUNNER) as conn:
        names = ["tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout"]
        rows = await conn.execute("select name, setting::int from pg_settings where name = any(%s)", [names])
        assert dict(await rows.fetchall()) == dict(zip(names, [5, 2, 3, 10000], strict=True))


async def test_it_takes_every_migration(any_cluster: Cluster) -> None:
    name = any_cluster.create()
    async with await connect(any_cluster.database_url(name), purpose=Purpose.SCHEDULER) as conn:
        assert await migrate(conn)
        assert (await status(conn)).is_current
    any_cluster.drop(name)


async def test_a_rolled_back_transaction_leaves_nothing_and_a_committed_one_everything(any_postgres: str) -> None:
    async with await connect(any_postgres, purpose=Purpose.SCHEDULER) as conn:
        await conn.execute("create table public.kept (id int)")
        with pytest.raises(ZeroDivisionError):
            async with conn.transaction():
                await conn.execute("insert into public.kept values (1)")
                raise ZeroDivisionError
        async with conn.transaction():
            await conn.execute("insert into public.kept values (2)")
        assert await (await conn.execute("select array_agg(id) from public.kept")).fetchone() == ([2],)


async def test_a_whole_transaction_goes_as_one_pipeline(any_postgres: str) -> None:
    async with await connect(any_postgres, purpose=Purpose.RUNNER) as conn:
        async with conn.pipeline(), conn.transaction():
            await conn.execute("create table public.piped (id int)")
            await conn.execute("insert into public.piped values (%s)", [1])
        assert await (await conn.execute("select count(*) from public.piped")).fetchone() == (1,)


async def test_a_notification_reaches_a_listener(any_postgres: str) -> None:
    async with (
        await connect(any_postgres, purpose=Purpose.LISTEN) as listener,
        await connect(any_postgres, purpose=Purpose.SCHEDULER) as sender,
    ):
        await listener.execute("listen wake")
        await sender.execute("select pg_notify('wake', 'now')")
        received = [notice async for notice in listener.notifies(timeout=60, stop_after=1)]
        assert [(notice.channel, notice.payload) for notice in received] == [("wake", "now")]


async def test_an_advisory_lock_is_exclusive_and_ends_with_its_transaction(any_postgres: str) -> None:
    async with (
        await connect(any_postgres, purpose=Purpose.SCHEDULER) as first,
        await connect(any_postgres, purpose=Purpose.SCHEDULER) as second,
    ):
        async with first.transaction():
            await first.execute("select pg_advisory_xact_lock(7)")
            assert await try_lock(second) is False
        assert await try_lock(second) is True


async def try_lock(conn: AsyncConnection) -> bool:
    row = await (await conn.execute("select pg_try_advisory_xact_lock(7)")).fetchone()
    assert row is not None
    return bool(row[0])


async def test_a_locked_row_is_skipped_by_whoever_does_not_wait(any_postgres: str) -> None:
    async with (
        await connect(any_postgres, purpose=Purpose.RUNNER) as first,
        await connect(any_postgres, purpose=Purpose.RUNNER) as second,
    ):
        await first.execute("create table public.queue as select generate_series(1, 3) as id")
        claim = "select id from public.queue order by id limit 2 for update skip locked"
        async with first.transaction(), second.transaction():
            assert await (await first.execute(claim)).fetchall() == [(1,), (2,)]
            assert await (await second.execute(claim)).fetchall() == [(3,)]


async def test_a_statement_that_runs_too_long_is_ended(any_postgres: str) -> None:
    async with await connect(any_postgres, purpose=Purpose.RUNNER) as conn:
        await conn.execute("set statement_timeout = '20ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            await conn.execute("select pg_sleep(30)")


async def test_a_wait_for_a_lock_is_ended(any_postgres: str) -> None:
    async with (
        await connect(any_postgres, purpose=Purpose.RUNNER) as holder,
        await connect(any_postgres, purpose=Purpose.RUNNER) as waiter,
    ):
        await holder.execute("create table public.held (id int)")
        await waiter.execute("set lock_timeout = '20ms'")
        async with holder.transaction():
            await holder.execute("lock table public.held")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await waiter.execute("select * from public.held")


async def test_a_transaction_whose_client_fell_silent_is_ended_and_its_locks_with_it(any_postgres: str) -> None:
    async with (
        await connect(any_postgres, purpose=Purpose.RUNNER) as silent,
        await connect(any_postgres, purpose=Purpose.RUNNER) as other,
    ):
        await silent.execute("create table public.held (id int)")
        await silent.execute("begin")
        await silent.execute("lock table public.held")
        # At last: on a busy machine it could be ended for its silence before it has the lock.
        await silent.execute("set idle_in_transaction_session_timeout = '20ms'")
        async with asyncio.timeout(60):
            await other.execute("insert into public.held values (1)")
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            await silent.execute("select 1")
