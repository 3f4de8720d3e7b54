"""The proxy does to a real connection what each of its modes says, to one group and to nobody else."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, conninfo

from tests.chaos.proxy import Mode, Proxy, proxied
from tests.waiting import eventually, eventually_sync

Conn = AsyncConnection[Any]


@pytest.fixture(scope="module")
def proxy(cluster: Any) -> Iterator[Proxy]:
    with Proxy.start(place_of(cluster.url)) as running:
        yield running


@pytest.fixture
def group(proxy: Proxy, request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name
    proxy.listen(name)
    yield name
    proxy.heal(name)


@pytest.fixture
async def table(database: str) -> AsyncIterator[Conn]:
    """A direct connection past the proxy, with a table for what arrives."""
    async with await AsyncConnection.connect(database, autocommit=True) as conn:
        await conn.execute("create table arrived (n int)")
        yield conn


def place_of(url: str) -> str:
    parts = conninfo.conninfo_to_dict(url)
    host, port = str(parts["host"]), parts.get("port") or 5432
    return f"unix:{host}/.s.PGSQL.{port}" if host.startswith("/") else f"{host}:{port}"


async def open_through(proxy: Proxy, group: str, url: str, **options: Any) -> Conn:
    port = proxy.status()[group]["port"]
    return await AsyncConnection.connect(proxied(url, port), autocommit=True, connect_timeout=30, **options)


async def arrived(table: Conn) -> list[int]:
    cursor = await table.execute("select n from arrived order by n")
    return [row[0] for row in await cursor.fetchall()]


async def seconds_of(work: Any) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def sessions(table: Conn) -> list[int]:
    return [row[0] for row in await (await table.execute("select pid from pg_stat_activity")).fetchall()]


async def test_what_is_let_pass_arrives_unchanged(proxy: Proxy, group: str, database: str) -> None:
    async with await open_through(proxy, group, database) as conn:
        cursor = await conn.execute("select repeat('é', %s), generate_series(1, 3)", [200_000])
        rows = await cursor.fetchall()
    assert [row[1] for row in rows] == [1, 2, 3]
    assert rows[0][0] == "é" * 200_000
    assert proxy.status()[group]["down_bytes"] > 3 * 400_000


async def test_a_unix_socket_in_front_works_the_same(proxy: Proxy, database: str, tmp_path: Path) -> None:
    place = proxy.listen("unix", at=f"unix:{tmp_path}/.s.PGSQL.6000")
    async with await AsyncConnection.connect(proxied(database, place)) as conn:
        cursor = await conn.execute("select 1")
        assert await cursor.fetchone() == (1,)


async def test_a_client_that_asks_for_encryption_is_told_no(proxy: Proxy, group: str, database: str) -> None:
    url = conninfo.make_conninfo(database, host="127.0.0.1", port=proxy.status()[group]["port"], sslmode="prefer")
    async with await AsyncConnection.connect(url) as conn:
        assert conn.info.status.name == "OK"


async def test_delayed_bytes_arrive_later(proxy: Proxy, group: str, database: str) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.delay(100, jitter_ms=10))
        assert await seconds_of(conn.execute("select 1")) >= 0.2


async def test_what_is_delayed_is_delivered_when_it_heals(proxy: Proxy, group: str, database: str) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.delay(3_600_000))
        asked = asyncio.create_task(conn.execute("select 1"))
        await asyncio.wait([asked], timeout=0.1)
        proxy.heal(group)
        await asked


async def test_throttled_bytes_take_their_time(proxy: Proxy, group: str, database: str) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.throttle(200_000))
        assert await seconds_of(conn.execute("select repeat('x', 100000)")) >= 0.4


async def test_nothing_moves_through_a_black_hole_until_it_heals(
    proxy: Proxy, group: str, database: str, table: Conn
) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.blackhole())
        stuck = asyncio.create_task(conn.execute("insert into arrived values (1)"))
        newcomer = asyncio.create_task(open_through(proxy, group, database))
        await eventually(lambda: proxy.status()[group]["accepted"] == 2)
        done, _ = await asyncio.wait([stuck, newcomer], timeout=0.3)
        assert not done and await arrived(table) == []
        proxy.heal(group)
        await stuck
        await (await newcomer).close()
        assert await arrived(table) == [1]


async def test_a_close_does_not_get_through_a_black_hole(proxy: Proxy, group: str, database: str, table: Conn) -> None:
    conn = await open_through(proxy, group, database)
    pid = conn.info.backend_pid
    proxy.set(group, Mode.blackhole())
    await conn.close()
    # Another client's close, made later, is seen meanwhile.
    async with await AsyncConnection.connect(database) as other:
        other_pid = other.info.backend_pid
    await eventually(lambda: no_session(table, other_pid))
    assert pid in await sessions(table)
    proxy.heal(group)
    await eventually(lambda: no_session(table, pid))


async def no_session(table: Conn, pid: int) -> bool:
    return pid not in await sessions(table)


async def test_one_way_up_the_statement_arrives_and_its_answer_waits(
    proxy: Proxy, group: str, database: str, table: Conn
) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.one_way("up"))
        asked = asyncio.create_task(conn.execute("insert into arrived values (1)"))
        await eventually(lambda: arrived(table))
        assert not asked.done()
        proxy.heal(group)
        await asked


async def test_one_way_down_the_statement_waits(proxy: Proxy, group: str, database: str, table: Conn) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.one_way("down"))
        asked = asyncio.create_task(conn.execute("insert into arrived values (1)"))
        await asyncio.wait([asked], timeout=0.2)
        assert await arrived(table) == []
        proxy.heal(group)
        await asked
        assert await arrived(table) == [1]


async def test_refused_connections_leave_the_open_ones_alone(proxy: Proxy, group: str, database: str) -> None:
    async with await open_through(proxy, group, database) as conn:
        proxy.set(group, Mode.refuse())
        with pytest.raises(psycopg.OperationalError):
            await open_through(proxy, group, database)
        await conn.execute("select 1")
    assert proxy.status()[group]["refused"] == 1


async def test_a_reset_breaks_one_group_alone(proxy: Proxy, group: str, database: str) -> None:
    proxy.listen("bystander")
    async with await open_through(proxy, "bystander", database) as spared:
        conn = await open_through(proxy, group, database)
        pid = conn.info.backend_pid
        assert proxy.reset(group) == 1
        with pytest.raises(psycopg.OperationalError):
            await conn.execute("select 1")
        await eventually(lambda: no_session(spared, pid))
        async with await open_through(proxy, group, database) as again:
            await again.execute("select 1")


def test_a_reset_is_a_reset_and_no_ordinary_end(proxy: Proxy, group: str) -> None:
    with socket.create_connection(("127.0.0.1", proxy.status()[group]["port"])) as client:
        eventually_sync(lambda: proxy.reset(group) == 1)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


async def test_a_dropped_reply_leaves_its_commit(proxy: Proxy, group: str, database: str, table: Conn) -> None:
    conn = await open_through(proxy, group, database)
    proxy.drop_reply(group)
    with pytest.raises(psycopg.OperationalError):
        await conn.execute("insert into arrived values (1)")
    assert await arrived(table) == [1]
    assert proxy.status()[group]["dropped"] == ["insert into arrived values (1)"]
    async with await open_through(proxy, group, database) as again:
        await again.execute("insert into arrived values (2)")
    assert proxy.status()[group]["armed"] == 0


async def test_the_reply_that_is_dropped_is_that_of_the_commit(
    proxy: Proxy, group: str, database: str, table: Conn
) -> None:
    conn = await open_through(proxy, group, database)
    proxy.drop_reply(group)
    await conn.execute("begin")
    await conn.execute("insert into arrived values (1)")
    assert await arrived(table) == []
    with pytest.raises(psycopg.OperationalError):
        await conn.execute("commit")
    assert await arrived(table) == [1]
    assert proxy.status()[group]["dropped"] == ["commit"]


async def test_a_trap_takes_only_the_statement_that_it_is_set_for(
    proxy: Proxy, group: str, database: str, table: Conn
) -> None:
    conn = await open_through(proxy, group, database, prepare_threshold=0)
    proxy.drop_reply(group, match="insert into arrived")
    statement = "insert into arrived values (%s)"
    await conn.execute("select %s::int", [1])
    with pytest.raises(psycopg.errors.UndefinedColumn):
        await conn.execute("insert into arrived values (no_such_column)")
    with pytest.raises(psycopg.OperationalError):
        await conn.execute(statement, [1])
    assert await arrived(table) == [1]


async def test_a_prepared_statement_is_known_by_its_text(proxy: Proxy, group: str, database: str, table: Conn) -> None:
    conn = await open_through(proxy, group, database, prepare_threshold=0)
    statement = "insert into arrived values (%s)"
    await conn.execute(statement, [1])
    await conn.execute("select %s::int", [1])
    proxy.drop_reply(group, match="insert into arrived")
    await conn.execute("select %s::int", [1])
    with pytest.raises(psycopg.OperationalError):
        await conn.execute(statement, [2])
    assert await arrived(table) == [1, 2]


async def test_in_a_pipeline_the_right_answer_is_lost(proxy: Proxy, group: str, database: str, table: Conn) -> None:
    conn = await open_through(proxy, group, database)
    proxy.drop_reply(group, match="(2)")
    with pytest.raises(psycopg.OperationalError):
        async with conn.pipeline() as pipeline:
            await conn.execute("insert into arrived values (1)")
            await pipeline.sync()
            await conn.execute("insert into arrived values (2)")
    assert await arrived(table) == [1, 2]


async def test_new_connections_follow_a_redirection(cluster: Any, database: str) -> None:
    with Proxy.start("127.0.0.1:1") as lost:
        port = lost.listen("service")
        with pytest.raises(psycopg.OperationalError):
            await AsyncConnection.connect(proxied(database, port))
        lost.redirect(place_of(cluster.url))
        async with await AsyncConnection.connect(proxied(database, port)) as conn:
            await conn.execute("select 1")


def test_a_wrong_command_is_explained_and_harmless(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match="no group 'nobody'"):
        proxy.reset("nobody")
    with pytest.raises(ValueError, match="no direction"):
        Mode.one_way("sideways")
    assert isinstance(proxy.status(), dict)


def test_the_proxy_ends_with_its_harness(cluster: Any) -> None:
    proxy = Proxy.start(place_of(cluster.url))
    proxy.listen("service")
    assert Path(f"/proc/{proxy.pid}").exists()
    proxy.stop()
    assert not Path(f"/proc/{proxy.pid}").exists()


async def test_bytes_that_are_no_postgres_pass_as_they_are() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with Proxy.start(f"127.0.0.1:{port}") as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.listen("api", speaks="bytes")))
        writer.write(b"hello\n")
        assert await reader.read() == b"HELLO\n"
        writer.close()
        with pytest.raises(ValueError, match="no statements"):
            proxy.drop_reply("api")
    server.close()


async def test_of_http_the_answer_that_something_was_done_is_lost_and_no_other() -> None:
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode().strip()
        asked.append(line)
        writer.write(b"HTTP/1.1 %d x\r\n\r\n" % (409 if "refused" in line else 200))
        await writer.drain()
        writer.close()

    async def ask(port: int, line: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{line}\r\n\r\n".encode())
        try:
            return await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with Proxy.start(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as proxy:
        port = int(proxy.listen("agents", speaks="http"))
        proxy.drop_reply("agents", match="/finish")
        assert (await ask(port, "POST /start HTTP/1.1")).startswith(b"HTTP/1.1 200")
        assert (await ask(port, "POST /finish?refused HTTP/1.1")).startswith(b"HTTP/1.1 409")
        with pytest.raises(ConnectionError):
            await ask(port, "POST /finish HTTP/1.1")
        assert (await ask(port, "POST /finish HTTP/1.1")).startswith(b"HTTP/1.1 200")
        assert proxy.status()["agents"]["dropped"] == ["POST /finish HTTP/1.1"]
    assert len(asked) == 4, "each arrived, once"
    server.close()
