"""Connections: what each purpose sets, what is refused, and what a message may say."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection, conninfo
from psycopg.sql import SQL, Identifier

from evertick.db import failover as clusters
from evertick.db.connect import Purpose, connect, refuse_old_server
from evertick.db.connection import TimedConnection, where
from evertick.db.function_sets import own_set
from evertick.db.statements import retry_on_deadlock
from evertick.domain.errors import PostgresUnavailable
from tests.databases import Cluster
from tests.db.other_servers import other_server
from tests.external_postgres import PASSWORD

SECRET = "s3cret/word"
SECRET_URL = "postgresql://someone:s3cret%2Fword@127.0.0.1:1/evertick"
UNREADABLE_URLS = [
    "s3cret",
    "postgresql://[s3cret",
    "postgresql://user:s3cret/word@host/database",
    "postgresql://user:pass@s3cret@host/database",
    "postgresql://user:1/s3cret@host/database",
    "postgresql://host:s3cret/database",
]


async def show(conn: AsyncConnection, setting: str) -> str:
    row = await (await conn.execute("select current_setting(%s)", [setting])).fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.parametrize("purpose", Purpose)
async def test_every_purpose_has_its_name_its_timeouts_and_our_schema(shared_database: str, purpose: Purpose) -> None:
    async with await connect(shared_database, purpose=purpose) as conn:
        assert conn.autocommit
        assert await show(conn, "application_name") == f"evertick-{purpose}"
        assert await show(conn, "search_path") == own_set().search_path
        assert await show(conn, "timezone") == "UTC"
        assert await show(conn, "jit") == "off"
        for timeout in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            assert await show(conn, timeout) != "0"


@pytest.mark.parametrize("purpose", [Purpose.RUNNER, Purpose.SCHEDULER])
async def test_the_hot_path_never_plans_from_the_statistics_of_the_moment(
    shared_database: str, purpose: Purpose
) -> None:
    async with await connect(shared_database, purpose=purpose) as conn:
        assert await show(conn, "plan_cache_mode") == "force_generic_plan"
        assert await show(conn, "enable_seqscan") == "off"


async def test_a_hot_connection_prepares_a_statement_at_its_first_use(shared_database: str) -> None:
    async with await connect(shared_database, purpose=Purpose.RUNNER) as conn:
        await conn.execute("select 1 + %s::int", [1])
        rows = await conn.execute("select count(*) from pg_prepared_statements where statement like 'select 1 +%%'")
        assert await rows.fetchone() == (1,)


async def test_a_reading_connection_cannot_write(shared_database: str) -> None:
    async with await connect(shared_database, purpose=Purpose.READ) as conn:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await conn.execute("create table evertick.unwanted ()")


async def test_options_in_the_url_are_kept_and_ours_are_added(shared_database: str) -> None:
    url = conninfo.make_conninfo(shared_database, options="-c work_mem=7MB -c search_path=elsewhere")
    async with await connect(url, purpose=Purpose.READ) as conn:
        assert await show(conn, "work_mem") == "7MB"
        assert await show(conn, "search_path") == own_set().search_path


async def test_an_unreachable_server_is_named_without_the_password() -> None:
    with pytest.raises(PostgresUnavailable) as refusal:
        await connect(SECRET_URL, purpose=Purpose.READ)
    assert "127.0.0.1:1 (database evertick)" in str(refusal.value)
    assert SECRET not in str(refusal.value)


async def test_a_wrong_password_is_told_without_showing_it(postgres_url_external: str) -> None:
    url = conninfo.make_conninfo(postgres_url_external, password="wrong but secret")
    with pytest.raises(PostgresUnavailable, match="password authentication failed") as refusal:
        await connect(url, purpose=Purpose.READ)
    assert "wrong but secret" not in str(refusal.value)
    assert PASSWORD not in str(refusal.value)


@pytest.mark.parametrize("url", UNREADABLE_URLS)
async def test_a_url_that_cannot_be_read_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(PostgresUnavailable) as refusal:
        await connect(url, purpose=Purpose.READ)
    assert "s3cret" not in str(refusal.value)
    assert "postgresql://user:password@host:5432/database" in str(refusal.value)


def test_the_place_of_a_url_is_its_host_port_and_database() -> None:
    assert where("postgresql:///evertick?host=/run/x%20y&user=evertick") == "/run/x y (database evertick)"
    assert where(SECRET_URL) == "127.0.0.1:1 (database evertick)"
    assert where("dbname=x") == "the default socket (database x)"


def test_a_server_older_than_15_is_refused_by_its_version() -> None:
    refuse_old_server(150000, "db.example")
    with pytest.raises(PostgresUnavailable, match=r"PostgreSQL 14\.9 at db\.example is too old.*needs 15 or newer"):
        refuse_old_server(140009, "db.example")


async def test_the_victim_of_a_deadlock_runs_again_and_both_finish(empty_database: str) -> None:
    async with (
        await connect(empty_database, purpose=Purpose.SCHEDULER) as first,
        await connect(empty_database, purpose=Purpose.SCHEDULER) as second,
    ):
        for conn in (first, second):
            await conn.execute("set deadlock_timeout = '20ms'")
        await first.execute("create table public.pair as select id, 0 as hits from generate_series(1, 2) id")
        both_hold_one = asyncio.Barrier(2)
        meetings = {1: 0, 2: 0}

        async def cross(conn: AsyncConnection, one: int, other: int) -> None:
            async with conn.transaction():
                await conn.execute("update public.pair set hits = hits + 1 where id = %s", [one])
                meetings[one] += 1
                if meetings[one] == 1:
                    await both_hold_one.wait()
                await conn.execute("update public.pair set hits = hits + 1 where id = %s", [other])

        async with asyncio.TaskGroup() as group:
            group.create_task(retry_on_deadlock(lambda: cross(first, 1, 2)))
            group.create_task(retry_on_deadlock(lambda: cross(second, 2, 1)))
        # Once more at least: who comes back sooner than the other one wakes meets it again.
        assert min(meetings.values()) >= 1 and sum(meetings.values()) >= 3
        assert await (await first.execute("select array_agg(hits) from public.pair")).fetchone() == ([2, 2],)


async def test_a_transaction_that_always_deadlocks_fails_after_its_tries() -> None:
    tries = 0

    async def doomed() -> None:
        nonlocal tries
        tries += 1
        raise psycopg.errors.SerializationFailure

    with pytest.raises(psycopg.errors.SerializationFailure):
        await retry_on_deadlock(doomed, tries=3)
    assert tries == 3


async def test_any_other_error_is_not_tried_again() -> None:
    tries = 0

    async def wrong() -> None:
        nonlocal tries
        tries += 1
        raise psycopg.errors.UniqueViolation

    with pytest.raises(psycopg.errors.UniqueViolation):
        await retry_on_deadlock(wrong)
    assert tries == 1


async def test_every_server_tells_an_ordinary_role_who_it_is(any_cluster: Cluster, any_postgres: str) -> None:
    with any_cluster.admin() as admin:
        admin.execute(SQL("create role {} login password 'plain'").format(Identifier("plain")))
        try:
            url = conninfo.make_conninfo(any_postgres, user="plain", password="plain")
            async with await connect(url, purpose=Purpose.READ) as conn:
                sight = await clusters.read_server_status(conn)
                assert isinstance(conn, TimedConnection)
                assert conn.server == sight.server
        finally:
            admin.execute(SQL("drop role {}").format(Identifier("plain")))
    assert sight.untold is None
    assert sight.server is not None and sight.server.timeline == 1
    assert not sight.is_standby


COCKROACH = "CockroachDB CCL v25.2.1 (x86_64-pc-linux-gnu, built 2026/01/12 10:11:12, go1.23.7)"
YUGABYTE = "PostgreSQL 15.12-YB-2025.2.0.0-b0 on x86_64-pc-linux-gnu, compiled by clang, 64-bit"


@pytest.mark.parametrize(
    ("version", "parameters", "says"),
    [
        (COCKROACH, {"server_version": "13.0.0", "crdb_version": COCKROACH}, "is CockroachDB.*advisory locks"),
        (YUGABYTE, {"server_version": "15.12-YB-2025.2.0.0-b0"}, "is YugabyteDB.*ctid"),
        # Behind a proxy that does not pass the parameters on.
        (COCKROACH, {"server_version": "15.0.0"}, "is CockroachDB.*advisory locks"),
        (YUGABYTE, {"server_version": "15.12"}, "is YugabyteDB.*ctid"),
        ("PostgreSQL 15.12", {"server_version": "15.12"}, "unknown function"),
    ],
)
async def test_a_server_that_is_not_postgresql_is_refused_by_name(
    version: str, parameters: dict[str, str], says: str
) -> None:
    async with other_server(version, parameters) as url:
        with pytest.raises(PostgresUnavailable, match=says) as caught:
            await connect(url, purpose=Purpose.SCHEDULER)
        assert "too old" not in str(caught.value)
        program = Path(sys.executable).with_name("evertick")
        if "crdb_version" in parameters:
            # A service tries again, as with every server that cannot be used, and says why.
            for command in ("doctor", "scheduler"):
                done = await asyncio.create_subprocess_exec(
                    program, command, env={**os.environ, "EVERTICK_DATABASE_URL": url}, stdout=PIPE, stderr=STDOUT
                )
                assert done.stdout is not None
                said = b""
                async with asyncio.timeout(60):
                    while b"is CockroachDB, which Evertick cannot use" not in said:
                        part = await done.stdout.readline()
                        assert part, said
                        said += part
                if command == "doctor":
                    assert await done.wait() != 0
                else:
                    done.kill()
                    await done.wait()
