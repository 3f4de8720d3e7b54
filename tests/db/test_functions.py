"""The stored functions as one set per release: complete, side by side with another release's, and dropped when unused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db import failpoints
from evertick.db.connect import Purpose, connect
from evertick.db.function_sets import FunctionSet, install, lock_key, own_set
from evertick.db.migrate import MIGRATIONS_DIRECTORY, migrate, refuse_pending, status
from evertick.db.statements import FUNCTIONS_DIRECTORY
from evertick.domain.errors import SchemaMismatch
from tests.engine.world import value
from tests.waiting import eventually


def release(tmp_path: Path, answer: int, *more: str) -> Path:
    """The functions of some other release: one that gives `answer`, and whatever else is in `more`."""
    folder = tmp_path / f"functions-{answer}"
    folder.mkdir()
    body = f"create function answer() returns int language sql as 'select {answer}';"
    for number, text in enumerate([body, *more], 1):
        (folder / f"{number:02}_x.sql").write_text(text)
    return folder


@pytest.fixture
async def installer(database: str) -> AsyncIterator[AsyncConnection]:
    """Whoever installs the sets of other releases, while `conn` uses ours."""
    async with await connect(database, purpose=Purpose.SCHEDULER) as connection:
        yield connection


async def installed(conn: AsyncConnection) -> set[str]:
    """The hashes that have both a row and a schema."""
    query = "select f.hash from evertick.function_set f join pg_namespace n on n.nspname = 'evertick_fn_' || f.hash"
    return {str(each) for (each,) in await (await conn.execute(query)).fetchall()}


async def call(url: str, functions: FunctionSet) -> object:
    """What a program with these functions is answered."""
    options = f"-c search_path={functions.search_path}"
    async with await AsyncConnection.connect(url, options=options, autocommit=True) as conn:
        return await value(conn, "select answer()")


async def test_the_whole_set_passes_the_checks_of_the_server(conn: AsyncConnection) -> None:
    """Installed without them, because functions call each other; here everything is there already."""
    await conn.execute("set check_function_bodies = on")
    for script in own_set().scripts:
        again = re.sub(r"^create (function|view)", r"create or replace \1", script, flags=re.MULTILINE)
        await conn.execute(re.sub(r"^create type [^;]*;", "", again, flags=re.MULTILINE))


def test_the_tables_have_only_the_functions_that_they_need() -> None:
    text = "".join(path.read_text() for path in MIGRATIONS_DIRECTORY.glob("*.sql"))
    assert re.findall(r"create (?:or replace )?function (\w+)", text) == ["clock", "run_display_id", "enqueue"], (
        "applications call the last one, whatever release runs"
    )


async def test_a_program_whose_functions_are_missing_is_refused_with_what_to_do(
    conn: AsyncConnection, database: str
) -> None:
    await conn.execute(f"drop schema {own_set().schema} cascade")  # type: ignore[arg-type]
    found = await status(conn)
    assert not found.is_current and not found.pending
    with pytest.raises(
        SchemaMismatch, match=rf"lacks migration functions_{own_set().hash}\. Run `evertick db migrate`"
    ):
        refuse_pending(found, database)
    assert await migrate(conn) == [own_set().label], "as after a restore of the tables alone"
    assert (await status(conn)).is_current


@pytest.mark.requirement("N33")
async def test_two_releases_call_their_own_functions_each(
    conn: AsyncConnection, installer: AsyncConnection, database: str, tmp_path: Path
) -> None:
    old, new = release(tmp_path, 1), release(tmp_path, 2)
    await migrate(installer, functions=old)
    options = f"-c search_path={own_set(old).search_path}"
    async with await AsyncConnection.connect(database, options=options, autocommit=True) as before:
        async with before.transaction():
            assert await value(before, "select answer()") == 1
            assert await migrate(installer, functions=new) == [own_set(new).label]
            assert await value(before, "select answer()") == 1, "also in a transaction that is under way"
        assert await value(before, "select answer()") == 1
        assert await call(database, own_set(new)) == 2
        assert await call(database, own_set(old)) == 1, "a release that is rolled back finds its functions"
    assert (await status(conn)).is_current


@pytest.mark.requirement("N33")
async def test_nothing_that_runs_waits_for_a_new_set(conn: AsyncConnection, database: str) -> None:
    """Its views take no lock that a claim, a plan or a vacuum would meet."""
    other = FunctionSet(hash="0" * 12, scripts=own_set().scripts)
    async with await connect(database, purpose=Purpose.SCHEDULER) as installing, installing.transaction():
        await install(installing, other)
        query = """select distinct l.mode from pg_locks l join pg_class c on c.oid = l.relation
                    where l.pid = %s and c.relnamespace = 'evertick'::regnamespace and c.relname !~ '^function_set'"""
        modes = await (await conn.execute(query, [installing.info.backend_pid])).fetchall()
    assert modes == [("AccessShareLock",)]


@pytest.mark.requirement("N33")
async def test_a_set_goes_when_it_is_neither_new_nor_used(
    conn: AsyncConnection, installer: AsyncConnection, database: str, tmp_path: Path
) -> None:
    folders = [release(tmp_path, number) for number in range(4)]
    used, unused, second, newest = [own_set(each).hash for each in folders]
    async with await AsyncConnection.connect(database, autocommit=True) as holder:
        await holder.execute("select pg_advisory_lock_shared(%s)", [lock_key(used)])
        for folder in folders:
            await migrate(installer, functions=folder)
        # Ours is in use by `conn`.
        assert await installed(conn) == {own_set().hash, used, second, newest}
        assert unused not in {row[0] for row in await (await conn.execute("select hash from function_set")).fetchall()}
    await eventually(lambda: value(conn, "select pg_try_advisory_xact_lock(%s)", lock_key(used)))
    assert await migrate(installer, functions=folders[-1]) == []
    assert await installed(conn) == {own_set().hash, second, newest}


async def test_the_own_set_is_never_dropped_however_old_it_is(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    """An older release that migrates again, with no other connection of its own."""
    folders = [release(tmp_path, number) for number in range(3)]
    old = own_set(folders[0])
    async with await AsyncConnection.connect(database, autocommit=True) as holder:
        await holder.execute("select pg_advisory_lock_shared(%s)", [lock_key(old.hash)])
        for folder in folders:
            await migrate(conn, functions=folder)
    await eventually(lambda: value(conn, "select pg_try_advisory_xact_lock(%s)", lock_key(old.hash)))
    assert await migrate(conn, functions=folders[0]) == []
    assert old.hash in await installed(conn)


@pytest.mark.parametrize("purpose", Purpose)
async def test_every_connection_holds_its_set(conn: AsyncConnection, database: str, purpose: Purpose) -> None:
    held = "select count(*) from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and granted and pid = %s"
    async with await connect(database, purpose=purpose) as other:
        pid = other.info.backend_pid
        assert await value(conn, held, pid) == 1
        assert not await value(conn, "select pg_try_advisory_xact_lock(%s)", lock_key(own_set().hash))


async def test_a_set_that_cannot_be_made_as_a_whole_leaves_nothing(conn: AsyncConnection, tmp_path: Path) -> None:
    broken = release(tmp_path, 1, "create view half as select * from nothing_like_that")
    with pytest.raises(psycopg.errors.UndefinedTable):
        await migrate(conn, functions=broken)
    assert await installed(conn) == {own_set().hash}
    assert await value(conn, "select to_regnamespace(%s)", own_set(broken).schema) is None


async def test_who_dies_while_it_installs_leaves_nothing(conn: AsyncConnection, database: str, tmp_path: Path) -> None:
    new = release(tmp_path, 1)
    failpoints.arm("function_sets.record:drop_reply")
    try:
        with pytest.raises(psycopg.OperationalError, match="the connection is lost"):
            async with await connect(database, purpose=Purpose.SCHEDULER) as dying:
                await migrate(dying, functions=new)
    finally:
        failpoints.disarm()
    assert await installed(conn) == {own_set().hash}
    assert await value(conn, "select to_regnamespace(%s)", own_set(new).schema) is None
    assert await migrate(conn, functions=new) == [own_set(new).label]


async def test_of_several_that_migrate_at_once_one_installs(empty_database: str) -> None:
    async def start() -> list[str]:
        async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
            return await migrate(conn)

    done = await asyncio.gather(*[start() for _ in range(4)])
    assert sorted(label for labels in done for label in labels) == ["0001_baseline", own_set().label]


def test_a_program_without_its_function_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="There are no function files in"):
        own_set(tmp_path)
    assert sorted(FUNCTIONS_DIRECTORY.glob("*.sql"))
