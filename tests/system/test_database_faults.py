"""The database is away, slow, locked, crowded or full: tasks go on, nothing alive is given up, and all resumes by itself."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from psycopg.sql import SQL, Identifier

from tests.databases import quick_folder
from tests.engine import invariants
from tests.system.mortal_postgres import MortalPostgres, mortal_postgres
from tests.system.processes import Installation
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


async def begun(there: Installation, count: int) -> set[tuple[int, int]]:
    """Wait until so many bodies have begun; which runs, in which processes."""

    def found() -> set[tuple[int, int]] | None:
        bodies = {(each.run_id, each.pid) for each in there.effects() if each.what == "begin"}
        return bodies if len(bodies) == count else None

    bodies: set[tuple[int, int]] = await eventually(found, 60)
    return bodies


def ended(there: Installation) -> set[tuple[int, int]]:
    return {(each.run_id, each.pid) for each in there.effects() if each.what == "end"}


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


@pytest.mark.requirement("N15", "K9", "K3", "A7", "B9")
async def test_an_outage_far_longer_than_any_threshold_kills_no_task(
    mortal: MortalPostgres, mortal_database: str, tmp_path: Path, long: Published
) -> None:
    """N15: three times the silence after which a runner is given up, with many bodies at work."""
    async with installed(mortal_database, long, tmp_path / "there", runner_slots=10, lost_after_seconds=1.0) as there:
        services = [await there.start("scheduler"), there.launch("scheduler")]
        services += [await there.start("runner", runner_id=name) for name in ("r1", "r2")]
        runs = [await start_run(there.conn, "holding") for _ in range(20)]
        bodies = await begun(there, 20)
        await mortal.take_down()
        await elapse(3 * 1.0)
        let_go(there.effects_file)
        await eventually(lambda: ended(there) == bodies)
        mortal.let_up()
        await there.reconnect()
        assert [await there.ended(run_id) for run_id in runs] == ["success"] * 20
        assert await there.value(GONE) == 0
        assert await there.value("select count(*) from attempt") == 0, "something ran again"
        assert all(service.is_alive for service in services)


@pytest.mark.requirement("N16", "A1", "A7")
@pytest.mark.parametrize("table", ["task", "runner"])
async def test_a_table_that_somebody_locks_for_long_delays_and_kills_nothing(
    database: str, tmp_path: Path, long: Published, table: str
) -> None:
    """N16: for longer than the silence after which a runner is given up."""
    async with installed(database, long, tmp_path / "there", lost_after_seconds=1.0) as there:
        services = [await there.start("scheduler"), await there.start("runner", runner_id="r1")]
        held = await start_run(there.conn, "holding")
        await there.begun("hold")
        instants = await schedule_now(there.conn, long, "alone", every=0.2, times=10)
        with psycopg.connect(there.url) as somebody:
            somebody.execute(SQL("lock table evertick.{} in access exclusive mode").format(Identifier(table)))
            await elapse(1.5)
        let_go(there.effects_file)
        assert await there.ended(held) == "success"
        await eventually(
            lambda: there.value("select count(*) = %s from run where fire_at is not null", len(instants)), 20
        )
        await eventually(lambda: there.value(f"select ({UNFINISHED}) = 0"), 60)
        assert [row[0] for row in await there.rows(FIRES)] == instants
        assert await there.value(GONE) == 0
        assert await there.value("select count(*) from attempt") == 0
        assert all(service.is_alive for service in services)


@pytest.mark.requirement("N04", "N13", "A10", "I3", "I7")
async def test_connections_that_are_broken_again_and_again_cost_no_fire_and_no_task(
    there: Installation, long: Published
) -> None:
    services = [await there.start("scheduler"), there.launch("scheduler")]
    services += [await there.start("runner", runner_id=name) for name in ("r1", "r2")]
    instants = await schedule_now(there.conn, long, "single", every=0.1, times=25)
    database = str(conninfo.conninfo_to_dict(there.url)["dbname"])
    with psycopg.connect(there.url, dbname="postgres", autocommit=True) as admin:
        while (await _count(admin, database)) < len(instants):
            admin.execute(BREAK, [database])
            await elapse(0.25)
    await there.reconnect()
    await eventually(lambda: there.value(f"select ({UNFINISHED}) = 0"), 60)
    assert [row[0] for row in await there.rows(FIRES)] == instants
    assert await there.value(GONE) == 0
    assert all(service.is_alive for service in services)


async def _count(admin: psycopg.Connection[Any], database: str) -> int:
    """On a connection of its own each time: those of the others are being broken."""
    url = conninfo.make_conninfo(admin.info.dsn, dbname=database, user=admin.info.user)
    while True:
        with suppress(psycopg.OperationalError):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                found = await conn.execute("select count(*) from evertick.run where fire_at is not null")
                row = await found.fetchone()
                assert row is not None
                return int(row[0])
