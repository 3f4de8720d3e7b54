"""A connection that never waits for ever, whatever the server's own timeouts do."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from evertick.db import failpoints
from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection, disable_timeout, has_own_session, in_transactions
from evertick.db.function_sets import own_set
from evertick.db.notify import Channel, listen
from evertick.db.queries.server import vacuum
from evertick.domain.access import Actor
from evertick.engine.shards import set_shard_count
from evertick.runtime.connections import ReconnectingConnection
from tests.waiting import eventually


async def line_to(url: str, purpose: Purpose = Purpose.SCHEDULER) -> TimedConnection:
    conn = await connect(url, purpose=purpose)
    assert isinstance(conn, TimedConnection)
    return conn


@pytest.mark.requirement("A1", "N16")
async def test_an_answer_that_does_not_come_is_given_up_and_the_outcome_called_unknown(shared_database: str) -> None:
    line = await line_to(shared_database)
    await line.execute("set statement_timeout = 0")
    line.answer_timeout = 0.2
    began = time.monotonic()
    with pytest.raises(
        psycopg.OperationalError, match=r"did not answer within 0\.2 s; whether the statement was executed is unknown"
    ):
        await line.execute("select pg_sleep(60)")
    assert time.monotonic() - began < 20
    assert line.closed or line.broken


def cancel_after_answer(line: TimedConnection, asked: asyncio.Task[object], steps: int) -> asyncio.Future[bool]:
    """Cancel so many steps of the event loop after the answer has arrived. The result: whether it was still running."""
    loop, socket = asyncio.get_running_loop(), os.dup(line.fileno())
    was_running = loop.create_future()

    def cancel(left: int) -> None:
        if loop.remove_reader(socket):
            os.close(socket)
        if left:
            loop.call_soon(cancel, left - 1)
        else:
            was_running.set_result(asked.cancel())

    loop.add_reader(socket, cancel, steps)
    return was_running


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("column", ["1", "1 / g"], ids=["answer", "error"])
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(shared_database: str, column: str) -> None:
    """A loop that loses it never ends, nor does its service."""
    for steps in range(8):
        async with await line_to(shared_database) as line:
            query = f"select pg_sleep(0.01), {column} from generate_series(0, 0) g"
            asked: asyncio.Task[object] = asyncio.create_task(line.execute(query))
            was_running = cancel_after_answer(line, asked, steps)
            await asyncio.wait([asked])
            assert asked.cancelled() is await was_running, f"{steps} steps after the answer"
            assert asked.cancelled() or (asked.exception() is None) is (column == "1")


async def test_an_answer_in_time_leaves_no_timer_behind(shared_database: str) -> None:
    line = await line_to(shared_database)
    line.answer_timeout = 1.0
    for _ in range(3):
        await line.execute("select 1")
    line.answer_timeout = None
    await line.execute("select pg_sleep(1.2)")
    await line.close()


async def test_an_error_of_the_server_stays_what_it_is(shared_database: str) -> None:
    async with await line_to(shared_database) as line:
        with pytest.raises(psycopg.errors.QueryCanceled):
            # In one transaction, whose end takes the limit back: what comes next may take its time.
            await line.execute("set statement_timeout = '20ms'; select pg_sleep(60)")
        assert (await (await line.execute("select 1")).fetchone()) == (1,)


@pytest.mark.requirement("N33")
@pytest.mark.parametrize("is_in_transaction", [False, True])
async def test_what_was_prepared_before_a_migration_changed_its_type_costs_one_connection(
    empty_database: str, is_in_transaction: bool
) -> None:
    link = ReconnectingConnection(empty_database, Purpose.RUNNER)
    async with await line_to(empty_database) as owner:
        await owner.execute("create schema evertick; create table thing (id int); insert into thing values (7)")
        conn = await link.get()
        assert await (await conn.execute("select id from thing")).fetchone() == (7,)
        await owner.execute("alter table thing alter column id type bigint")
        with pytest.raises(psycopg.OperationalError, match=r"must not change result type.*out of date"):
            async with conn.transaction() if is_in_transaction else nullcontext():
                await conn.execute("select id from thing")
        assert conn.closed
        again = await (await link.get()).execute("select id from thing")
        assert await again.fetchone() == (7,)
    await link.close()


async def test_what_the_server_cannot_do_at_all_costs_no_connection(shared_database: str) -> None:
    async with await line_to(shared_database) as line:
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            await line.execute("create table x (y int references pg_catalog.pg_class (nothing) match partial)")
        assert not line.closed


async def test_who_waits_to_be_called_and_who_migrates_may_take_their_time(shared_database: str) -> None:
    async with await line_to(shared_database, Purpose.LISTEN) as listener:
        assert listener.answer_timeout is None
    async with await line_to(shared_database) as line:
        assert line.answer_timeout is not None
        disable_timeout(line)
        assert line.answer_timeout is None


async def test_whoever_waits_on_a_line_that_is_cut_stops_waiting(shared_database: str) -> None:
    line = await line_to(shared_database)
    waiting = asyncio.create_task(line.execute("select pg_sleep(10)"))
    await eventually(lambda: line.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE)
    line.abort()
    with pytest.raises(psycopg.OperationalError):
        await waiting
    line.abort()


async def test_a_listener_looks_up_now_and_then_and_ends_when_it_is_no_longer_wanted(
    shared_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.db.notify.LOOK_UP_SECONDS", 0.02)
    looks = iter([True, True, False])
    async with await line_to(shared_database, Purpose.LISTEN) as line:
        heard: list[Channel] = []
        await listen(line, [Channel.SCHEDULE], heard.append, is_wanted=lambda: next(looks))
    assert heard == [Channel.SCHEDULE]


async def test_a_direct_connection_keeps_its_session(shared_database: str) -> None:
    async with await line_to(shared_database) as line:
        assert has_own_session(line)


@pytest.fixture
async def pooled(database: str) -> AsyncIterator[TimedConnection]:
    """A connection as behind a pooler: the session has the path that an operator gave the role, and it may be anybody's."""
    async with await line_to(database) as line:
        await line.execute("set search_path = evertick")
        line.is_pooled = True
        in_transactions(line, own_set().search_path)
        yield line


async def test_behind_a_pooler_each_statement_finds_the_functions_of_this_release(pooled: TimedConnection) -> None:
    show = "select current_setting('search_path')"
    found = await pooled.execute("select open_shard_count(), current_setting('search_path')")
    assert await found.fetchone() == (1, own_set().search_path)
    assert pooled.pgconn.transaction_status == TransactionStatus.IDLE
    async with pooled.cursor() as cursor:
        await cursor.execute("select count(*) from all_tasks where run_id = %(run)s", {"run": 1})
        assert await cursor.fetchone() == (0,)
    async with pooled.transaction():
        assert await (await pooled.execute("select open_shard_count()")).fetchone() == (1,)
        async with pooled.transaction():
            assert await (await pooled.execute("select open_shard_count()")).fetchone() == (1,)
    assert await (await pooled.execute(show, prepare=False)).fetchone() == ("evertick",), "nothing stays in the session"


async def test_behind_a_pooler_a_statement_that_fails_leaves_no_transaction_open(pooled: TimedConnection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await pooled.execute("select 1 / 0")
    assert pooled.pgconn.transaction_status == TransactionStatus.IDLE
    assert await (await pooled.execute("select open_shard_count()")).fetchone() == (1,)


async def test_behind_a_pooler_tables_are_vacuumed_outside_of_a_transaction(pooled: TimedConnection) -> None:
    await vacuum(pooled, ["ready_task", "lease"])
    assert pooled.pgconn.transaction_status == TransactionStatus.IDLE


async def test_behind_a_pooler_a_fault_after_a_statement_comes_after_its_commit(
    database: str, conn: psycopg.AsyncConnection
) -> None:
    failpoints.arm("set_shard_count:drop_reply")
    try:
        line = await line_to(database)
    finally:
        failpoints.disarm()
    line.is_pooled = True
    in_transactions(line, own_set().search_path)
    with pytest.raises(psycopg.OperationalError, match="the connection is lost"):
        await set_shard_count(line, shards=3, actor=Actor("test"), if_never_chosen=False)
    assert await (await conn.execute("select count(*) from shard where state = 'open'")).fetchone() == (3,)
