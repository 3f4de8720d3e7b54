"""Behind a pooler that gives each transaction another session: noticed, explained, and never wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import AsyncConnection, conninfo
from psycopg.sql import SQL, Identifier

from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection, has_own_session
from evertick.db.notify import Channel
from evertick.domain.errors import PostgresUnavailable, StaleServer
from evertick.runtime.connections import ReconnectingConnection, listen_forever
from evertick.runtime.server_watch import ServerWatch
from tests.databases import Cluster
from tests.engine import invariants
from tests.system.hosting import Said
from tests.system.pooler import pooler
from tests.system.processes import Installation
from tests.system.two_servers import two_servers
from tests.system.work import Published, executed_twice, publish_work, schedule_now, start_run
from tests.waiting import elapse, eventually


def name_of(url: str) -> str:
    return str(conninfo.conninfo_to_dict(url)["dbname"])


@pytest.fixture
def prepared(cluster: Cluster, database: str) -> Iterator[str]:
    """What an operator must set for Evertick to work through a pooler."""
    with cluster.admin() as admin:
        admin.execute(SQL("alter database {} set search_path = evertick").format(Identifier(name_of(database))))
    yield database


async def test_a_pooler_that_takes_no_session_settings_is_named_with_what_to_do(
    cluster: Cluster, database: str
) -> None:
    with pooler(cluster.url, ignore_startup_parameters="extra_float_digits") as before:
        with pytest.raises(PostgresUnavailable) as refusal:
            await connect(before.url(name_of(database)), purpose=Purpose.SCHEDULER)
    assert "unsupported startup parameter" in str(refusal.value)
    assert "A connection pooler is in front of it: use the server's own address" in str(refusal.value)


async def test_a_pooler_that_drops_session_settings_is_refused_before_anything_is_written(
    cluster: Cluster, database: str
) -> None:
    with pooler(cluster.url) as before:
        for purpose in Purpose:
            with pytest.raises(
                PostgresUnavailable, match="behind a pooler that drops session settings: search_path is"
            ):
                await connect(before.url(name_of(database)), purpose=purpose)


@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_nothing_is_kept_in_a_session_that_may_be_anybodys(cluster: Cluster, prepared: str, mode: str) -> None:
    with pooler(cluster.url, pool_mode=mode) as before:
        async with await connect(before.url(name_of(prepared)), purpose=Purpose.RUNNER) as conn:
            assert not has_own_session(conn)
            for _ in range(8):
                await conn.execute("select 1 + %s::int", [1])
            assert conn.prepare_threshold is None
            found = await conn.execute("select count(*) from pg_prepared_statements")
            assert await found.fetchone() == (0,)


async def test_nobody_listens_through_a_pooler_nor_tries_to_again_and_again(cluster: Cluster, prepared: str) -> None:
    with pooler(cluster.url) as before:
        known = before.logins()
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(
                listen_forever(before.url(name_of(prepared)), [Channel.SCHEDULE], lambda _: None, log=Said().log)
            )
            await eventually(lambda: before.logins() > known)
            await elapse(0.5)
            listening.cancel()
        assert before.logins() == known + 1


@pytest.mark.requirement("A10", "A4", "N01", "I3", "K1")
async def test_through_a_pooler_the_lease_alone_keeps_everything_right(
    cluster: Cluster, prepared: str, conn: AsyncConnection, tmp_path: Path, long: Published
) -> None:
    with pooler(cluster.url) as before:
        async with Installation(before.url(name_of(prepared)), tmp_path / "there") as there:
            await invariants.install(conn)
            await publish_work(there.conn, long)
            leader, successor = await there.start("scheduler"), there.launch("scheduler")
            runners = [await there.start("runner", runner_id=name) for name in ("r1", "r2")]
            instants = await schedule_now(conn, long, "single", every=0.1, times=25)
            run = await start_run(there.conn, "many")
            await leader.saw("schedules_fired")
            await leader.kill()
            await successor.saw("leadership_acquired")
            assert await there.ended(run) == "success"
            over = "select count(*) = %s from run_status where state = 'success'"
            await eventually(lambda: there.value(over, len(instants) + 1), 30)
            fired = await there.rows("select fire_at from run where fire_at is not null order by 1")
            assert [row[0] for row in fired] == instants
            for service in (successor, *runners):
                told = await service.saw("pooler_detected")
                assert "leadership rests on its lease alone" in told["message"]
            listening = (
                "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%%'"
            )
            assert await there.value(listening) == 0
            # Direct connections hold the lock of their functions; this one is the only one of them.
            kept = (
                "select count(*) from pg_locks l where locktype = 'advisory' and granted and pid <> %s"
                " and database = (select oid from pg_database where datname = current_database())"
            )
            for service in (successor, *runners):
                await service.terminate()
            assert await there.value(kept, conn.info.backend_pid) == 0, (
                "a lock was left in a session that is somebody else's now"
            )
            assert await invariants.violations(conn) == []
            assert executed_twice(there.effects()) == []


@pytest.mark.requirement("N14")
async def test_a_server_that_changes_behind_an_open_connection_is_noticed_at_the_next_look(primary_data: Path) -> None:
    with two_servers(primary_data, is_synchronous=False) as pair:
        with pair.first.connect() as admin:
            admin.execute("alter database postgres set search_path = evertick")
        pair.add_standby()
        pair.promote()
        with pooler(pair.second.url) as before:
            url = before.url("postgres")
            link, other = ReconnectingConnection(url, Purpose.MONITOR), ReconnectingConnection(url, Purpose.SCHEDULER)
            # It stands for a service at work; there is no schema here to mark in.
            watch = ServerWatch(url, link.get, Said().log)
            conn = await link.get()
            assert isinstance(conn, TimedConnection) and conn.server is not None and conn.server.timeline == 2
            held = await other.get()
            await watch.look_again(conn)
            before.point_to(pair.first.url)

            async def is_noticed() -> bool:
                try:
                    await watch.look_again(conn)
                except StaleServer as refusal:
                    return "has seen timeline 2" in str(refusal)
                return False

            await eventually(is_noticed)
            with pytest.raises(StaleServer):
                await other.get()
            assert held.closed
            await link.close()
