"""Which server this is, the marks on its log, and who is told when one is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from psycopg import AsyncConnection, conninfo
from psycopg.sql import SQL, Identifier

from evertick.db import failover
from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection
from evertick.domain.failover import Server
from tests.databases import Cluster
from tests.engine.world import value
from tests.waiting import eventually

STALE = "update server_timeline set marked_at = marked_at - interval '1 minute'"
JOURNAL = "select count(*) from audit_log where action = %s"


@pytest.fixture(autouse=True)
def long_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is made anew when this time is over: on a busy machine a second may pass between two statements."""
    monkeypatch.setattr(failover, "MARK_SECONDS", 30.0)


@pytest.fixture
async def server(conn: AsyncConnection) -> Server:
    found = (await failover.read_server_status(conn)).server
    assert found is not None
    return found


async def test_a_server_that_does_not_tell_is_used_without_its_name(empty_database: str, cluster: Cluster) -> None:
    """Rights on functions are of one database, so this one alone is silent."""
    database = conninfo.conninfo_to_dict(empty_database)["dbname"]
    with cluster.admin() as admin:
        admin.execute("create role mute login")
        try:
            async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
                await conn.execute("revoke execute on function pg_control_system() from public")
            async with await connect(conninfo.make_conninfo(empty_database, user="mute"), purpose=Purpose.READ) as conn:
                assert isinstance(conn, TimedConnection)
                assert conn.server is None
                assert conn.untold == "permission denied for function pg_control_system"
        finally:
            admin.execute(SQL("drop database {} with (force)").format(Identifier(str(database))))
            admin.execute("drop role mute")


async def test_marks_move_with_the_log_and_at_most_once_a_second(conn: AsyncConnection, server: Server) -> None:
    first = await failover.mark(conn, server, actor="test")
    again = await failover.mark(conn, server, actor="test")
    assert first is not None and first == again
    assert await failover.marked(conn, server) == first.lsn
    await conn.execute(STALE)
    later = await failover.mark(conn, server, actor="test")
    assert later is not None and later.lsn > first.lsn
    assert await failover.marked(conn, server) == later.lsn
    assert not later.is_synchronous


@pytest.mark.requirement("N21")
async def test_a_clock_that_was_put_back_stops_no_marks(conn: AsyncConnection, server: Server) -> None:
    first = await failover.mark(conn, server, actor="test")
    await conn.execute("update server_timeline set marked_at = marked_at + interval '1 hour'")
    later = await failover.mark(conn, server, actor="test")
    assert first is not None and later is not None and later.lsn > first.lsn


async def test_nobody_waits_for_somebody_else_who_marks(database: str, conn: AsyncConnection, server: Server) -> None:
    first = await failover.mark(conn, server, actor="test")
    await conn.execute(STALE)
    async with await connect(database, purpose=Purpose.MONITOR) as other, other.transaction():
        moved = await failover.mark(other, server, actor="test")
        async with asyncio.timeout(30):
            assert await failover.mark(conn, server, actor="test") == first, "what is not committed is no mark"
    assert await failover.mark(conn, server, actor="test") == moved


async def test_who_comes_second_to_a_new_timeline_finds_no_mark_until_it_is_committed(
    database: str, conn: AsyncConnection, server: Server
) -> None:
    async with await connect(database, purpose=Purpose.MONITOR) as other:
        async with other.transaction():
            placed = await failover.mark(other, server, actor="test")
            second = asyncio.create_task(failover.mark(conn, server, actor="test"))
            waiting = (
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            )
            await eventually(lambda: value(other, waiting))
        assert await second is None
    assert await failover.mark(conn, server, actor="test") == placed


async def test_the_first_timeline_is_no_news_and_each_later_one_is_told_once(
    conn: AsyncConnection, server: Server
) -> None:
    await failover.mark(conn, server, actor="test")
    assert await value(conn, JOURNAL, "failover") == 0
    promoted = replace(server, timeline=server.timeline + 1)
    for _ in range(2):
        await failover.mark(conn, promoted, actor="test")
    assert await value(conn, JOURNAL, "failover") == 1
    assert await value(conn, "select detail->>'timeline' from audit_log") == str(promoted.timeline)
    assert [each.timeline for each in await failover.history(conn)] == [promoted.timeline, server.timeline]


async def test_a_mark_is_of_its_own_system_and_timeline(conn: AsyncConnection, server: Server) -> None:
    others = [replace(server, timeline=server.timeline + 1), replace(server, system_id=server.system_id + 1)]
    marks = [await failover.mark(conn, each, actor="test") for each in (server, *others)]
    assert len({mark.lsn for mark in marks if mark}) == 3
    assert [await failover.mark(conn, each, actor="test") for each in (server, *others)] == marks
    await conn.execute(STALE)
    moved = await failover.mark(conn, server, actor="test")
    assert moved is not None and marks[0] is not None and moved.lsn > marks[0].lsn
    assert [await failover.marked(conn, each) for each in others] == [mark.lsn for mark in marks[1:] if mark]
    assert await value(conn, "select count(*) from server_timeline") == 3


async def test_a_loss_is_told_once_and_again_only_if_it_is_larger(conn: AsyncConnection, server: Server) -> None:
    mark = await failover.mark(conn, server, actor="test")
    assert mark is not None
    for lost_until in (mark.lsn + 10, mark.lsn + 10, mark.lsn + 5):
        await failover.report_loss(conn, server, lost_until=lost_until, actor="one")
    assert await value(conn, JOURNAL, "writes_lost") == 1
    await failover.report_loss(conn, server, lost_until=mark.lsn + 20, actor="two")
    assert await value(conn, JOURNAL, "writes_lost") == 2
    (known,) = await failover.history(conn)
    assert known.lost_until is not None
    assert await failover.marked(conn, server) == mark.lsn, "what the database holds stays as it is"


async def test_a_loss_on_an_unknown_timeline_is_reported(conn: AsyncConnection, server: Server) -> None:
    unknown = replace(server, timeline=server.timeline + 5)
    await failover.report_loss(conn, unknown, lost_until=1000, actor="test")
    assert await value(conn, "select detail->>'until' from audit_log where action = 'writes_lost'") == "0/3E8"
    assert await failover.marked(conn, unknown) == 0
