"""What each role of a service may do in the database, and what it may not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db import roles
from evertick.db.function_sets import own_set
from evertick.db.migrate import MIGRATIONS_DIRECTORY, migrate, migrations, status
from evertick.db.roles import API, MAY, PUBLISHER, RUNNER, SCHEDULER, statements_of
from evertick.db.statements import text_of
from tests.test_sql import ALL, declared, numbered

# What a runner that somebody else has got hold of must not be able to do.
NOT_THE_RUNNERS = {
    "read who may sign in": "select * from account",
    "read the hashes of tokens": "select * from credential",
    "make itself an account": "insert into account (name, role) values ('mallory', 'admin')",
    "list stored values": "select * from stored_value",
    "lock stored values": "select reencrypt_value('secret', 'x', 'a', 'b', 'c')",
    "store a value": "select put_value('secret', 'x', 'y', 'k', null, ('mallory', null, null), false)",
    "change a DAG": "update dag set is_paused = true",
    "publish a DAG": "select publish_dags('{}', '[]', '{}', '{}', '[]', ('mallory', null, null))",
    "change code": "update bundle set archive = ''",
    "put code": "insert into bundle (hash, file, archive, created_at) values ('x', 'x', '', now())",
    "move a task past its verb": "update task set state = 'success'",
    "end a run": "update run_status set state = 'success'",
    "take a lease without a claim": "insert into lease (session, run_id, idx, map_index, epoch) values (1, 1, 0, -1, 1)",
    "delete a run": "delete from run",
    "delete attempts": "delete from attempt",
    "delete logs": "delete from log_chunk",
    "change logs": "update log_chunk set content = ''",
    "delete the journal": "delete from audit_log",
    "change the journal": "update audit_log set actor = 'nobody'",
    "read the journal": "select * from audit_log",
    "lead": "select try_acquire_shard(0::smallint, 'mallory', 5, false)",
    "make a table": "create table evertick.loot (x int)",
    "make a function": "create function evertick.loot() returns int language sql as 'select 1'",
    "make a function where Evertick has its own": "create function loot() returns int language sql as 'select 1'",
    "forget a set of functions": "delete from function_set",
    "forget a migration": "delete from migration",
}


@pytest.fixture
async def shared(conn: AsyncConnection) -> AsyncConnection:
    """The database's owner, once the roles have their rights in it."""
    await roles.apply(conn)
    return conn


async def explained(conn: AsyncConnection, name: str) -> str | None:
    """What PostgreSQL says when it would begin that statement, as far as rights go."""
    text = text_of(name)
    try:
        async with conn.transaction(force_rollback=True):
            await conn.execute(f"prepare asked as {numbered(text)}", prepare=False)
            count = len(set(re.findall(r"%\((\w+)\)s", text)))
            nulls = f"({', '.join(['null'] * count)})" if count else ""
            await conn.execute(f"explain execute asked{nulls}", prepare=False)
    except psycopg.errors.InsufficientPrivilege as error:
        return str(error)
    finally:
        await conn.execute("deallocate all")
    return None


@pytest.mark.parametrize("role", MAY)
async def test_a_role_may_begin_every_statement_of_its_service(shared: AsyncConnection, role: str) -> None:
    await shared.execute(f"set role {role}")
    refused = {name: why for name in statements_of(role) if (why := await explained(shared, name))}
    assert refused == {}


async def test_a_role_may_not_begin_what_only_others_do(shared: AsyncConnection) -> None:
    """Where the table or function of a statement is nobody's but theirs."""
    for role, theirs in {
        RUNNER: (
            "accounts.list_accounts",
            "secrets.find",
            "secrets.list_all",
            "trigger_run",
            "clear_tasks",
            "poll_work",
        ),
        SCHEDULER: ("accounts.authenticate", "finish_and_claim", "publish_dags", "put_value", "delete_run"),
        PUBLISHER: ("accounts.authenticate", "finish_and_claim", "try_acquire_shard", "trigger_run", "clear_tasks"),
        # An API claims and finishes for runners over HTTPS.
        API: ("try_acquire_shard", "poll_work", "prune_runs", "migrate.record"),
    }.items():
        await shared.execute(f"set role {role}")
        assert [name for name in theirs if await explained(shared, name) is None] == [], role
        await shared.execute("reset role")


async def test_a_runner_may_do_nothing_but_run(shared: AsyncConnection) -> None:
    await shared.execute(f"set role {RUNNER}")
    for deed, statement in NOT_THE_RUNNERS.items():
        try:
            await shared.execute(statement)  # type: ignore[call-overload]
        except psycopg.errors.InsufficientPrivilege:
            continue
        pytest.fail(f"a runner may {deed}")


def test_every_statement_is_somebodys_or_the_owners() -> None:
    known = {f"{noun}.{name}" for noun, name in ALL} | declared().keys()
    anybodys = {name for role in MAY for name in statements_of(role)}
    owners = ("lock", "lock_session", "unlock_session", "set_lock_timeout", "in_the_way", "record")
    assert known - anybodys == {
        *(f"migrate.{name}" for name in owners),
        *(f"function_sets.{name}" for name in ("record", "superseded", "forget")),
        "requests.enqueue",  # of applications
        *("state.server_name", "state.set_path", "state.commit_attempt"),  # of tasks
    }


@pytest.mark.parametrize("role", MAY)
def test_every_statement_that_a_role_is_given_exists(role: str) -> None:
    mine = statements_of(role)
    for pattern in MAY[role]:
        assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), name) for name in mine), pattern


async def test_a_function_of_ones_own_is_not_taken_for_evertick_s(shared: AsyncConnection) -> None:
    """What works with the owner's rights looks at nothing that the caller has made, in whatever order he searches."""
    schema = own_set().schema
    query = """select count(*), array_agg(p.proname) filter (where (p.proconfig @> array[%s]) is not true)
                 from pg_proc p where p.prosecdef and p.proname <> 'enqueue'
                   and p.pronamespace in ('evertick'::regnamespace, %s::regnamespace)"""
    found = await (await shared.execute(query, [f"search_path={schema}, evertick, pg_temp", schema])).fetchone()
    assert found is not None and found[0] > 50 and found[1] is None
    await shared.execute(f"set role {RUNNER}")
    await shared.execute(
        "create temporary table lease (session bigint, run_id bigint, idx int, map_index int, epoch int)"
    )
    await shared.execute("insert into pg_temp.lease values (1, 1, 0, -1, 1)")
    await shared.execute(f"set search_path = pg_temp, {schema}, evertick")
    found = await shared.execute("select * from values_of_attempt(1, 1, 0, -1, 1, '{secret}', '{x}')")
    assert await found.fetchall() == []


async def test_a_migration_renews_the_rights_where_the_roles_are_used(shared: AsyncConnection, tmp_path: Path) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS_DIRECTORY, folder)
    number = len(migrations()) + 1
    replaced = (
        "create or replace function clock() returns timestamptz language sql stable as 'select clock_timestamp()';"
    )
    (folder / f"{number:04}_later.sql").write_text(replaced)
    await shared.execute(f"revoke execute on all functions in schema {own_set().schema}, evertick from {RUNNER}")
    assert await migrate(shared, folder) == [f"{number:04}_later"]
    await shared.execute(f"set role {RUNNER}")
    assert await explained(shared, "finish_and_claim") is None


@pytest.mark.requirement("N33")
async def test_a_migration_takes_no_right_away_that_the_release_before_needs(
    shared: AsyncConnection, tmp_path: Path
) -> None:
    """The new release asks for less than the old one did; whose services are at work."""
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS_DIRECTORY, folder)
    (folder / f"{len(migrations()) + 1:04}_later.sql").write_text("create table later ();")
    await shared.execute(f"grant select on audit_log to {RUNNER}")
    query = f"select has_table_privilege('{RUNNER}', 'evertick.audit_log', 'select')"
    await migrate(shared, folder)
    assert await (await shared.execute(query)).fetchone() == (True,)
    await roles.apply(shared)
    assert await (await shared.execute(query)).fetchone() == (False,)


@pytest.mark.requirement("N33")
async def test_a_migration_and_the_rights_to_what_it_made_come_together(
    shared: AsyncConnection, tmp_path: Path
) -> None:
    """Where the rights cannot be given, the migration has not happened: nobody sees a verb without them."""
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS_DIRECTORY, folder)
    name = f"{len(migrations()) + 1:04}_later"
    (folder / f"{name}.sql").write_text(
        "create function refuse() returns event_trigger language plpgsql as $$ begin raise 'no rights today'; end $$;"
        "create event trigger refuse on ddl_command_start when tag in ('GRANT') execute function refuse()"
    )
    with pytest.raises(psycopg.errors.RaiseException, match="no rights today"):
        await migrate(shared, folder)
    assert [each.label for each in (await status(shared, folder)).pending] == [name]


async def test_a_database_without_them_is_left_as_it_is(conn: AsyncConnection) -> None:
    assert not await roles.are_used(conn)
