"""The database has no connection left, or no room for its log: tasks go on, and all resumes by itself."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrate
from evertick.domain.errors import PostgresUnavailable
from tests.databases import quick_folder
from tests.engine import invariants
from tests.system.mortal_postgres import MortalPostgres, mortal_postgres
from tests.system.processes import Installation
from tests.system.two_servers import Member
from tests.system.work import Published, executed_twice, let_go, publish_work, schedule_now, start_run
from tests.waiting import elapse, eventually

FIRES = "select fire_at from run where fire_at is not null order by 1"
GONE = "select count(*) from runner where ended_at is not null"
UNFINISHED = "select count(*) from run_status where finished_at is null"
BREAK = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"


@asynccontextmanager
async def installed(url: str, work: Published, folder: Path, **settings: Any) -> AsyncIterator[Installation]:
    async with Installation(url, folder, **settings) as there:
        await invariants.install(there.conn)
        await publish_work(there.conn, work)
        yield there
        assert await invariants.violations(there.conn) == []
        assert executed_twice(there.effects()) == []


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder in memory where there is room."""
    with tempfile.TemporaryDirectory(prefix="evertick-test-", dir=quick_folder()) as folder:
        yield Path(folder)


@pytest.fixture
def mortal(quick_path: Path) -> Iterator[MortalPostgres]:
    with mortal_postgres(quick_path / "home") as server:
        yield server


@pytest.fixture
def mortal_database(mortal: MortalPostgres) -> str:
    return mortal.cluster.database_url(mortal.cluster.create(mortal.cluster.template()))


# Crowded ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_server(quick_path: Path) -> Iterator[Member]:
    """A server with few connections, some of them reserved for Evertick's role, as the manual says."""
    with ExitStack() as stack:
        member = Member(quick_path / "small")
        stack.callback(member.stop)
        member.run(
            "initdb", "-D", member.data, "-U", "postgres", "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8"
        )
        member.user = "postgres"
        member.start(max_connections="45", reserved_connections="30", superuser_reserved_connections="3")
        with member.connect() as admin:
            admin.execute("create role evertick login in role pg_use_reserved_connections")
            admin.execute("create role crowd login")
            admin.execute("create database evertick owner evertick")
        yield member


@contextmanager
def crowd(member: Member) -> Iterator[str]:
    """Somebody else takes every connection that he can get; gives what he was told when there was none left."""
    url = conninfo.make_conninfo(member.url, user="crowd")
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(psycopg.connect(url, autocommit=True))
            except psycopg.OperationalError as refusal:
                yield str(refusal)
                return


@pytest.mark.requirement("N18")
async def test_reserved_connections_keep_leader_and_heartbeats_going_when_others_take_all(
    small_server: Member, tmp_path: Path, long: Published
) -> None:
    """N18."""
    url = conninfo.make_conninfo(small_server.url, user="evertick", dbname="evertick")
    await _migrate(url)
    async with installed(url, long, tmp_path / "there") as there:
        services = [await there.start("scheduler"), await there.start("runner", runner_id="r1")]
        held = await start_run(there.conn, "holding")
        await there.begun("hold")
        with crowd(small_server) as refusal:
            assert "reserved" in refusal
            with pytest.raises(PostgresUnavailable, match="All connections are in use: see 'Connections'"):
                await connect(conninfo.make_conninfo(url, user="crowd"), purpose=Purpose.READ)
            # Worse: everything must be opened again while there is nothing to be had.
            with small_server.connect() as admin:
                admin.execute(BREAK, ["evertick"])
            await there.reconnect()
            instants = await schedule_now(there.conn, long, "alone", every=0.1, times=10)
            await eventually(
                lambda: there.value("select count(*) = %s from run where fire_at is not null", len(instants))
            )
            let_go(there.effects_file)
            assert await there.ended(held) == "success"
        await eventually(lambda: there.value(f"select ({UNFINISHED}) = 0"))
        assert [row[0] for row in await there.rows(FIRES)] == instants
        assert await there.value(GONE) == 0
        assert all(service.is_alive for service in services)


async def _migrate(url: str) -> None:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn)


# Full ---------------------------------------------------------------------------------------------------------


@contextmanager
def small_volume(place: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own that is soon full; no test where we may not mount one."""
    place.mkdir(parents=True)
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounting.returncode != 0:
        pytest.skip(f"a small volume needs the right to mount: {mounting.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.requirement("N20", "B9")
async def test_a_full_log_volume_stops_writing_kills_nothing_and_is_over_when_there_is_room(
    mortal: MortalPostgres, mortal_database: str, quick_path: Path, tmp_path: Path, long: Published
) -> None:
    """N20."""
    with small_volume(quick_path / "wal", 64) as volume:
        url = mortal_database
        await mortal.take_down()
        log_files = quick_path / "home" / "postgres" / "pg_wal"
        shutil.move(log_files, volume)
        log_files.symlink_to(volume / "pg_wal")
        mortal.let_up()
        await eventually(lambda: _answers(url), 60)
        async with installed(url, long, tmp_path / "there", lost_after_seconds=1.0) as there:
            services = [await there.start("scheduler"), await there.start("runner", runner_id="r1")]
            held = await start_run(there.conn, "holding")
            await there.begun("hold")
            filler = volume / "filler"
            acknowledged = await _trigger_until_full(there, filler)
            for service in services:
                await service.saw("database_unreachable", within_seconds=60)
            await elapse(1.5)
            let_go(there.effects_file)
            filler.unlink()
            await there.reconnect()
            assert await there.ended(held) == "success"
            await eventually(lambda: there.value(f"select ({UNFINISHED}) = 0"), 30)
            found = {row[0] for row in await there.rows("select run_id from run where key is not null")}
            assert acknowledged <= found, "an acknowledged write is gone"
            assert await there.value(GONE) == 0
            assert {each.epoch for each in there.effects() if each.run_id == held} == {1}
            assert all(service.is_alive for service in services)


async def _answers(url: str) -> bool:
    try:
        (await connect(url, purpose=Purpose.READ)).pgconn.finish()
    except PostgresUnavailable:
        return False
    return True


async def _trigger_until_full(there: Installation, filler: Path) -> set[int]:
    """Leave no room, and write until the database can no more. Returns the runs that were acknowledged."""
    acknowledged: set[int] = set()
    number = 0
    while True:
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        number += 1
        try:
            async with asyncio.timeout(20):
                acknowledged.add(await start_run(there.conn, "alone", key=f"k{number}"))
                await there.conn.execute("select pg_logical_emit_message(true, 'test', repeat('x', 1000000))")
        except (psycopg.Error, TimeoutError):
            return acknowledged
