"""The watch over the database: marks are made, a loss is told once, and what a server cannot give is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from psycopg import AsyncConnection, conninfo

from evertick.db import failover
from evertick.db.connect import Purpose
from evertick.db.failover import guard_of
from evertick.db.notify import Channel, notify
from evertick.domain.errors import StaleServer
from evertick.domain.failover import Server, WalMark
from evertick.observability import metrics
from evertick.runtime.connections import Notifier, ReconnectingConnection, listen_forever
from evertick.runtime.server_watch import ServerWatch
from tests.databases import Cluster
from tests.engine.world import value
from tests.system.hosting import Said
from tests.waiting import eventually

JOURNAL = "select count(*) from audit_log where action = %s"


class Watched:
    """A database and somebody who watches over it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.link, self.said, self.guard = ReconnectingConnection(url, Purpose.MONITOR), Said(), guard_of(url)
        self._watch = ServerWatch(url, self.link.get, self.said.log)

    async def look(self) -> None:
        await self._watch.tick()

    async def look_anew(self) -> None:
        """On another connection, as after an outage."""
        await self.link.close()
        await self.look()

    @property
    def server(self) -> Server:
        assert self.link.server is not None
        return self.link.server


@pytest.fixture
async def watched(database: str) -> AsyncIterator[Watched]:
    found = Watched(database)
    yield found
    await found.link.close()


def failovers(writes: str) -> float:
    return float(metrics.FAILOVERS.labels(writes=writes)._value.get())


async def test_where_a_mark_was_made_in_passing_none_is_made_besides(watched: Watched, conn: AsyncConnection) -> None:
    has_marked = True
    watch = ServerWatch(watched.url, watched.link.get, watched.said.log, has_marked=lambda: has_marked)
    await watch.tick()
    assert await value(conn, "select count(*) from server_timeline") == 0
    has_marked = False
    await watch.tick()
    assert await value(conn, "select count(*) from server_timeline") == 1
    assert watched.guard.mark is not None


async def test_each_check_stores_the_committed_position_of_the_log(watched: Watched, conn: AsyncConnection) -> None:
    await watched.look()
    first = watched.guard.mark
    assert first is not None and first.server == watched.server
    await conn.execute("update server_timeline set marked_at = marked_at - interval '1 minute'")
    await watched.look()
    assert watched.guard.mark is not None and watched.guard.mark.lsn > first.lsn
    await watched.look_anew()
    assert watched.said.all == [], "a connection that is opened again is no news"


@pytest.mark.requirement("N14", "V10")
async def test_a_mark_that_was_acknowledged_and_is_gone_is_told_once(watched: Watched, conn: AsyncConnection) -> None:
    await watched.look()
    stored, before = watched.guard.mark, failovers("lost")
    assert stored is not None
    watched.guard.remember(replace(stored, lsn=stored.lsn + 0x1000))
    for _ in range(3):
        await watched.look_anew()
    (told,) = watched.said.events("writes_lost")
    assert told["level"] == "error"
    assert "Acknowledged writes are lost" in told["message"]
    until = await value(conn, "select detail->>'until' from audit_log where action = 'writes_lost'")
    after = await value(conn, "select detail->>'after' from audit_log where action = 'writes_lost'")
    assert (told["after"], told["until"]) == (after, until)
    assert await value(conn, JOURNAL, "writes_lost") == 1
    assert failovers("lost") == before + 1


@pytest.mark.requirement("N14")
@pytest.mark.parametrize(
    ("is_synchronous", "writes", "words"),
    [(True, "safe", "No acknowledged write is lost"), (False, "unproven", "asynchronous.*may be lost")],
)
async def test_after_a_failover_it_says_what_is_known_of_acknowledged_writes(
    watched: Watched, conn: AsyncConnection, is_synchronous: bool, writes: str, words: str
) -> None:
    server = (await failover.read_server_status(conn)).server
    assert server is not None
    old = replace(server, timeline=0)
    kept = await failover.mark(conn, old, actor="test")
    assert kept is not None
    watched.guard.remember(WalMark(server=old, lsn=kept.lsn, is_synchronous=is_synchronous))
    before = failovers(writes)
    for _ in range(2):
        await watched.look_anew()
    (told,) = watched.said.events("failover_detected")
    assert (told["timeline_before"], told["timeline"]) == (0, 1)
    assert words.split(".*")[0] in told["message"] and words.split(".*")[-1] in told["message"]
    assert failovers(writes) == before + 1
    assert await value(conn, JOURNAL, "failover") == 1
    assert await value(conn, JOURNAL, "writes_lost") == 0


async def test_a_server_that_does_not_tell_who_it_is_is_worked_with_and_complained_about_once(
    database: str, cluster: Cluster, conn: AsyncConnection
) -> None:
    with cluster.admin() as admin:
        admin.execute("create role silent login")
    await conn.execute("revoke execute on function pg_control_system() from public")
    watched = Watched(conninfo.make_conninfo(database, user="silent"))
    try:
        for _ in range(2):
            await watched.look_anew()
    finally:
        await watched.link.close()
        with cluster.admin() as admin:
            admin.execute("drop role silent")
    (told,) = watched.said.events("failover_guard_unavailable")
    assert "permission denied for function pg_control_system" in told["message"]
    assert watched.guard.seen is None and watched.guard.mark is None


@pytest.mark.requirement("N14")
async def test_a_link_to_a_server_that_was_replaced_is_opened_again_and_then_refused(database: str) -> None:
    link, guard = ReconnectingConnection(database, Purpose.SCHEDULER), guard_of(database)
    conn = await link.get()
    assert await link.get() is conn
    assert link.server is not None
    guard.accept(replace(link.server, timeline=link.server.timeline + 1), "elsewhere")
    with pytest.raises(StaleServer, match="has seen timeline 2"):
        await link.get()
    assert conn.closed


async def test_an_alarm_has_every_connection_opened_again(database: str) -> None:
    links = [ReconnectingConnection(database, Purpose.SCHEDULER), ReconnectingConnection(database, Purpose.READ)]
    before = [await link.get() for link in links]
    guard_of(database).mark_replaced()
    after = [await link.get() for link in links]
    assert not set(before) & set(after)
    assert [await link.get() for link in links] == after
    for link in links:
        await link.close()


@pytest.mark.requirement("A14")
async def test_a_connection_that_broke_is_opened_once_and_counted(database: str) -> None:
    link = ReconnectingConnection(database, Purpose.RUNNER)
    conn = await link.get()
    count = metrics.RECONNECTS.labels(purpose="runner")._value
    before = count.get()
    await conn.close()
    first, second = await asyncio.gather(link.get(), link.get())
    assert first is second
    assert (link.reconnects, count.get()) == (1, before + 1)
    await link.close()


async def test_whoever_listens_moves_on_with_the_rest_of_its_process(
    database: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.db.notify.LOOK_UP_SECONDS", 0.02)
    heard, said = asyncio.Event(), Said()
    listeners = (
        "select pid from pg_stat_activity where application_name = 'evertick-listen' and datname = current_database()"
    )
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(listen_forever(database, [Channel.SCHEDULE], lambda _: heard.set(), log=said.log))
        first = await eventually(lambda: value(conn, listeners))
        guard_of(database).mark_replaced()
        await eventually(lambda: value(conn, f"{listeners} and pid <> %s", first))
        heard.clear()

        async def is_heard() -> bool:
            await notify(conn, Channel.SCHEDULE)
            return heard.is_set()

        await eventually(is_heard)
        listening.cancel()
    assert said.events("listen_failed") == []


async def test_a_wake_up_leaves_the_session_as_durable_as_it_was(conn: AsyncConnection) -> None:
    await notify(conn, Channel.TASKS)
    assert await value(conn, "select current_setting('synchronous_commit')") == "on"


async def test_whoever_wakes_others_also_watches(database: str, conn: AsyncConnection) -> None:
    said = Said()
    waker = Notifier(database, is_enabled=False, log=said.log)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(waker.run())
        await eventually(lambda: value(conn, "select count(*) from server_timeline"))
        running.cancel()
    await waker.close()
    assert said.all == []
    assert guard_of(database).mark is not None
