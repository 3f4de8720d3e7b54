"""Migrations: forward only, once each, whoever starts at the same time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection
from evertick.db.migrate import LOCK_KEY, MIGRATIONS_DIRECTORY, USUAL, LockRetry, migrate, migrations, status
from evertick.db.statements import sql
from evertick.domain.errors import MigrationBlocked, SchemaMismatch
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def write(directory: Path, **scripts: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (directory / f"{name[1:]}.sql").write_text(script)
    return directory


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three migrations, each of which would fail if it ran twice or before the one above it."""
    return write(
        tmp_path / "migrations",
        _0001_first="create table thing (id int primary key); insert into thing values (1);",
        _0002_second="alter table thing add column name text not null default '100 %';",
        _0003_third="create function thing_name() returns text language sql as $$ select name from thing $$;",
    )


async def test_pending_migrations_are_applied_in_order_and_only_once(empty_database: str, three: Path) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        before = await status(conn, three, None)
        assert (len(before.applied), len(before.pending), before.is_current) == (0, 3, False)
        assert await migrate(conn, three, None) == ["0001_first", "0002_second", "0003_third"]
        assert await migrate(conn, three, None) == []
        after = await status(conn, three, None)
        assert [record.label for record in after.applied] == ["0001_first", "0002_second", "0003_third"]
        assert after.is_current
        assert await (await conn.execute("select evertick.thing_name()")).fetchone() == ("100 %",)


async def test_a_later_release_adds_only_what_is_new(empty_database: str, three: Path) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        write(three, _0004_fourth="drop function thing_name()")
        assert [migration.label for migration in (await status(conn, three, None)).pending] == ["0004_fourth"]
        assert await migrate(conn, three, None) == ["0004_fourth"]


async def test_a_failing_migration_leaves_those_before_it_and_nothing_of_itself(
    empty_database: str, three: Path
) -> None:
    write(three, _0003_third="create table half (); select 1 / 0")
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await migrate(conn, three, None)
        assert len((await status(conn, three, None)).applied) == 2
        assert await (await conn.execute("select to_regclass('evertick.half')")).fetchone() == (None,)


def test_ten_processes_that_start_at_once_apply_each_migration_once(empty_database: str, three: Path) -> None:
    command = [sys.executable, "-m", "tests.db.migrating", empty_database, str(three)]
    with ExitStack() as stack:
        starters = [
            stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(10)
        ]
        for starter in starters:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "ready\n"
        outputs = []
        for starter in starters:
            assert starter.stdin is not None
            starter.stdin.write("go\n")
            starter.stdin.flush()
        for starter in starters:
            outputs.append(json.loads(starter.communicate(timeout=120)[0]))
            assert starter.returncode == 0
    assert sorted(label for labels in outputs for label in labels) == ["0001_first", "0002_second", "0003_third"]


async def test_a_starter_waits_for_a_migration_that_takes_longer_than_its_lock_timeout(
    empty_database: str, three: Path
) -> None:
    async with (
        await connect(empty_database, purpose=Purpose.SCHEDULER) as busy,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as starter,
        await connect(empty_database, purpose=Purpose.READ) as observer,
        asyncio.TaskGroup() as group,
    ):
        await starter.execute("set lock_timeout = '20ms'")
        seen: set[object] = set()
        async with busy.transaction():
            await busy.execute(sql("migrate", "lock"), {"key": LOCK_KEY})
            waiting = group.create_task(migrate(starter, three, None))
            await eventually(lambda: has_asked(observer, starter.info.backend_pid, times=3, seen=seen))
            assert not waiting.done()
        assert await waiting == ["0001_first", "0002_second", "0003_third"]


async def has_asked(observer: psycopg.AsyncConnection, backend: int, *, times: int, seen: set[object]) -> bool:
    """Whether a session has been seen at rest after that many questions: it has no snapshot between them."""
    query = "select state_change from pg_stat_activity where pid = %s and state = 'idle' and xact_start is null"
    seen.update(await (await observer.execute(query, [backend])).fetchall())
    return len(seen) >= times


@pytest.mark.requirement("N33")
async def test_a_program_works_with_the_migrations_of_the_release_after_it(empty_database: str, three: Path) -> None:
    write(three, _0003_third="-- oldest program: 0002\ncreate table later ();")
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        (three / "0003_third.sql").unlink()
        found = await status(conn, three, None)
        assert (found.is_current, [each.label for each in found.newer]) == (True, ["0003_third"])
        assert await migrate(conn, three, None) == []
        (three / "0002_second.sql").unlink()
        with pytest.raises(SchemaMismatch, match=r"newer.*0003_third.*ends at 0001_first"):
            await status(conn, three, None)


@pytest.mark.requirement("N33")
async def test_one_of_several_later_migrations_that_needs_a_newer_program_is_enough_to_refuse(
    empty_database: str, three: Path
) -> None:
    write(
        three,
        _0003_third="-- oldest program: 0003\ncreate table later ();",
        _0004_fourth="-- oldest program: 0002\ncreate table still_later ();",
    )
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        for name in ("0003_third", "0004_fourth"):
            (three / f"{name}.sql").unlink()
        with pytest.raises(SchemaMismatch, match=r"newer.*0004_fourth"):
            await status(conn, three, None)


@pytest.mark.parametrize("line", ["-- oldest program: 4", "--oldest program: 0002", "create table x ();"])
def test_a_migration_that_does_not_say_who_may_work_beside_it_is_for_nobody_older(tmp_path: Path, line: str) -> None:
    write(tmp_path, _0001_first="create table a ();", _0002_second=f"{line}\n-- oldest program: 0001\n")
    assert [each.oldest_program for each in migrations(tmp_path)] == [1, 2]


@pytest.mark.requirement("N33")
async def test_whoever_uses_a_table_is_not_held_up_by_a_migration_that_waits_for_another(
    empty_database: str, three: Path
) -> None:
    """A reader has the table for long. The migration asks, gives way to those who came after it, and asks again."""
    given_up: list[str] = []
    async with (
        await connect(empty_database, purpose=Purpose.SCHEDULER) as reader,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as user,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as migrating,
        asyncio.TaskGroup() as group,
    ):
        await migrate(migrating, three, None)
        write(three, _0004_fourth="alter table thing add column later int not null default 7;")
        reader_pid = reader.info.backend_pid
        async with reader.transaction():
            await reader.execute("select count(*) from thing")
            patience = LockRetry(lock_seconds=0.2, pause_seconds=0.02)
            done = group.create_task(migrate(migrating, three, None, patience=patience, tell=given_up.append))
            await eventually(lambda: stands_before_a_lock(user, migrating.info.backend_pid))
            # Behind the migration in line, and past it as soon as that gives way.
            await user.execute("set lock_timeout = 0")
            await user.execute("insert into thing values (2, 'not held up')")
            await eventually(lambda: len(given_up) > 1)
            assert not done.done()
        assert await done == ["0004_fourth"]
        assert await (await user.execute("select later from thing where id = 2")).fetchone() == (7,)
    told = f"0004_fourth waits for a table that is in use, by evertick-scheduler (pid {reader_pid}) for "
    assert given_up[0].startswith(told)


async def stands_before_a_lock(observer: psycopg.AsyncConnection, backend: int) -> bool:
    query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
    return await (await observer.execute(query, [backend])).fetchone() == (True,)


async def test_a_migration_that_a_deadlock_ended_is_tried_again(empty_database: str, three: Path) -> None:
    """Whoever has the tables in the other order may have to give way, or the migration has to."""
    write(
        three,
        _0004_fourth="create sequence tries;",
        # What a sequence has given stays given: the first try ends as the victim of a deadlock does.
        _0005_fifth="do $$ begin if nextval('tries') = 1 then raise sqlstate '40P01'; end if; end $$;",
    )
    given_up: list[str] = []
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        applied = await migrate(conn, three, None, patience=LockRetry(pause_seconds=0.0), tell=given_up.append)
    assert applied[-1] == "0005_fifth"
    assert len(given_up) == 1


INDEX = "-- oldest program: 0003\n-- Why.\ncreate unique index concurrently thing_by_name on thing (name);"


async def is_valid(conn: psycopg.AsyncConnection) -> bool | None:
    query = "select indisvalid from pg_index where indexrelid = to_regclass('evertick.thing_by_name')"
    row = await (await conn.execute(query)).fetchone()
    return row[0] if row else None


@pytest.mark.requirement("N33")
async def test_an_index_is_made_while_everybody_writes_and_several_ask_for_it(empty_database: str, three: Path) -> None:
    """It waits for who has written and not committed; nobody waits for it. The other starter has no part in that."""
    async with (
        await connect(empty_database, purpose=Purpose.SCHEDULER) as writer,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as user,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as one,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as other,
        asyncio.TaskGroup() as group,
    ):
        await migrate(one, three, None)
        write(three, _0004_index=INDEX, _0005_fifth="create table later ();")
        limits = "select current_setting('statement_timeout'), current_setting('lock_timeout')"
        before = await (await one.execute(limits)).fetchone()
        async with writer.transaction():
            await writer.execute("insert into thing values (2, 'open')")
            given_up: list[str] = []
            done = [group.create_task(migrate(each, three, None, tell=given_up.append)) for each in (one, other)]
            pids = [each.info.backend_pid for each in (one, other)]
            await eventually(lambda: any_stands_before_a_lock(user, pids))
            await user.execute("insert into thing values (3, 'not held up')")
            assert not any(each.done() for each in done)
        applied = [label for each in done for label in await each]
        assert sorted(applied) == ["0004_index", "0005_fifth"]
        assert await is_valid(user)
        assert given_up == []
        assert [await (await each.execute(limits)).fetchone() for each in (one, other)] == [before, before]
        # Each connection keeps the one on its set of functions.
        held = (
            "select count(*) from pg_locks join pg_database d on d.oid = database"
            " where locktype = 'advisory' and mode <> 'ShareLock' and d.datname = current_database()"
        )
        assert await (await user.execute(held)).fetchone() == (0,)


async def any_stands_before_a_lock(observer: psycopg.AsyncConnection, backends: list[int]) -> bool:
    query = "select count(*) > 0 from pg_stat_activity where pid = any(%s) and wait_event_type = 'Lock'"
    return await (await observer.execute(query, [backends])).fetchone() == (True,)


async def test_half_an_index_that_a_try_left_behind_is_made_anew(empty_database: str, three: Path) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        await conn.execute("insert into thing values (2)")
        write(three, _0004_index=INDEX)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await migrate(conn, three, None)
        assert await is_valid(conn) is False
        await conn.execute("delete from thing where id = 2")
        assert await migrate(conn, three, None) == ["0004_index"]
        assert await is_valid(conn)


async def test_an_index_beside_the_work_needs_a_session_of_its_own(empty_database: str, three: Path) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        write(three, _0004_index=INDEX)
        assert isinstance(conn, TimedConnection)
        conn.is_pooled = True
        with pytest.raises(MigrationBlocked, match=r"Building an index .* needs its own session.*server's own address"):
            await migrate(conn, three, None)


@pytest.mark.parametrize(
    "script",
    [
        "create table x (y int); create index concurrently z on x (y);",
        "create index concurrently z on x (y); create index concurrently w on x (y);",
        "drop index concurrently z;",
    ],
)
def test_what_is_made_beside_the_work_is_alone_in_its_migration(tmp_path: Path, script: str) -> None:
    with pytest.raises(SchemaMismatch, match=r"0001_first\.sql does something concurrently"):
        migrations(write(tmp_path / "migrations", _0001_first=script))


async def test_a_migration_that_never_gets_its_table_says_so_and_has_changed_nothing(
    empty_database: str, three: Path
) -> None:
    async with (
        await connect(empty_database, purpose=Purpose.SCHEDULER) as reader,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as migrating,
    ):
        await migrate(migrating, three, None)
        write(three, _0004_fourth="create table half (); alter table thing add column later int;")
        async with reader.transaction():
            await reader.execute("select count(*) from thing")
            patience = LockRetry(lock_seconds=0.02, pause_seconds=0.0, give_up_seconds=0.1)
            with pytest.raises(
                MigrationBlocked, match=r"0004_fourth waits .* timed out after 0\.1 s and is not applied"
            ):
                await migrate(migrating, three, None, patience=patience)
        assert [each.label for each in (await status(migrating, three, None)).pending] == ["0004_fourth"]
        assert await (await reader.execute("select to_regclass('evertick.half')")).fetchone() == (None,)


def test_a_table_is_asked_for_longer_than_an_autovacuum_is_spared_and_shorter_than_a_claim_waits() -> None:
    server_spares_seconds, claim_waits_seconds = 1.0, 5.0
    assert server_spares_seconds < USUAL.lock_seconds < claim_waits_seconds


async def test_a_schema_newer_than_the_program_is_refused(empty_database: str, three: Path) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        (three / "0003_third.sql").unlink()
        for verb in (migrate, status):
            with pytest.raises(SchemaMismatch, match=r"newer.*0003_third.*ends at 0002_second\. Upgrade Evertick"):
                await verb(conn, three, None)


async def test_a_database_of_before_the_first_release_is_refused_as_what_it_is(
    empty_database: str, three: Path
) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        await conn.execute("alter table evertick.migration drop column oldest_program")
        assert not (await status(conn, three, None)).pending
        path = next(three.glob("0002*"))
        path.write_text(path.read_text() + "-- changed\n")
        with pytest.raises(SchemaMismatch, match="differs from"):
            await status(conn, three, None)


async def test_a_changed_migration_that_was_applied_is_refused(empty_database: str, three: Path) -> None:
    async with await connect(empty_database, purpose=Purpose.SCHEDULER) as conn:
        await migrate(conn, three, None)
        write(three, _0002_second="alter table thing add column name text")
        for verb in (migrate, status):
            with pytest.raises(SchemaMismatch, match=r"0002_second differs .* must not change"):
                await verb(conn, three, None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("0001_a", "0003_b"), "0003_b is in the place of number 0002"),
        (("0001_a", "0001_b"), "0001_b is in the place of number 0002"),
        (("0001_a", "second"), "second.sql is not a valid migration name"),
    ],
)
def test_migrations_are_numbered_without_a_gap(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    for name in names:
        (tmp_path / f"{name}.sql").touch()
    with pytest.raises(SchemaMismatch, match=message):
        migrations(tmp_path)


async def test_our_own_migrations_make_a_current_schema(conn: psycopg.AsyncConnection) -> None:
    assert (await status(conn)).is_current
    assert [migration.number for migration in migrations()] == list(range(1, len(migrations()) + 1))
    assert MIGRATIONS_DIRECTORY.is_dir()
