"""What a process remembers of its server, and which connections it refuses or gives up because of that."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psycopg
import pytest

from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection
from evertick.db.failover import ServerGuard, guard_of
from evertick.domain.errors import PostgresUnavailable, StaleServer
from evertick.domain.failover import Server, WalMark
from tests.waiting import eventually

FIRST, SECOND = Server(system_id=7, timeline=1), Server(system_id=7, timeline=2)
STRANGER = Server(system_id=8, timeline=2)


def mark(server: Server, lsn: int) -> WalMark:
    return WalMark(server=server, lsn=lsn, is_synchronous=False)


@pytest.mark.requirement("N14")
def test_a_server_that_was_replaced_is_refused_and_changes_nothing() -> None:
    guard = ServerGuard()
    guard.accept(FIRST, "a")
    guard.accept(SECOND, "b")
    for server in (FIRST, STRANGER):
        with pytest.raises(StaleServer, match="The PostgreSQL at a is refused: it "):
            guard.accept(server, "a")
        assert guard.seen == SECOND
    guard.accept(SECOND, "b")


def test_a_refusal_is_something_that_passes_and_is_tried_again() -> None:
    assert issubclass(StaleServer, PostgresUnavailable)


@pytest.mark.requirement("N14")
def test_open_connections_to_the_old_server_are_given_up_once_the_new_one_was_seen() -> None:
    guard = ServerGuard()
    guard.accept(FIRST, "a")
    assert guard.trusts(FIRST)
    guard.accept(SECOND, "b")
    assert not guard.trusts(FIRST)
    assert guard.trusts(Server(system_id=7, timeline=2)), "by what it is, not by which object"


def test_a_server_without_an_identity_is_neither_rejected_nor_stored() -> None:
    guard = ServerGuard()
    guard.accept(None, "a")
    assert guard.seen is None and guard.trusts(None)
    guard.accept(SECOND, "b")
    guard.accept(None, "a")
    assert guard.seen == SECOND and guard.trusts(None)


def test_the_newest_mark_is_remembered_and_that_of_a_new_server_in_any_case() -> None:
    guard = ServerGuard()
    for each in (mark(FIRST, 10), mark(FIRST, 30), mark(FIRST, 20)):
        guard.remember(each)
    assert guard.mark == mark(FIRST, 30)
    guard.remember(mark(SECOND, 5))
    assert guard.mark == mark(SECOND, 5)


def test_a_later_mark_follows_only_one_of_the_same_server() -> None:
    guard = ServerGuard()
    assert not guard.follow_up(mark(FIRST, 10)) and guard.mark is None
    guard.remember(mark(FIRST, 10))
    assert guard.follow_up(mark(FIRST, 20)) and guard.mark == mark(FIRST, 20)
    assert not guard.follow_up(mark(FIRST, 15))
    assert not guard.follow_up(mark(SECOND, 90)), "the old mark is still to be compared"
    assert guard.mark == mark(FIRST, 20)


def test_all_connections_of_a_process_to_one_url_share_one_guard() -> None:
    assert guard_of("postgresql://one") is guard_of("postgresql://one")
    assert guard_of("postgresql://one") is not guard_of("postgresql://two")


@pytest.mark.requirement("N14")
async def test_whoever_waits_for_an_answer_of_the_old_server_stops_waiting(empty_database: str) -> None:
    conn = await connect(empty_database, purpose=Purpose.SCHEDULER)
    guard = guard_of(empty_database)
    assert isinstance(conn, TimedConnection) and conn.server is not None
    waiting = asyncio.create_task(conn.execute("select pg_sleep(10)"))
    await eventually(lambda: conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE)
    guard.accept(conn.server, "here")
    assert not waiting.done()
    guard.accept(replace(conn.server, timeline=conn.server.timeline + 1), "elsewhere")
    with pytest.raises(psycopg.OperationalError):
        await waiting
