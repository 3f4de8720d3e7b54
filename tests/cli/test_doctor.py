"""`evertick doctor` finds what is really misconfigured, and says what to do."""

from __future__ import annotations

import resource
import socket
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from psycopg import AsyncConnection, conninfo

from evertick.config import Settings
from evertick.db import roles
from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrations
from evertick.db.queries.server import ServerFacts, StoredLogs, server
from evertick.doctor import database as doctor_database
from evertick.doctor.database import ConnectionRoute, Finding, check_clock, check_logs, check_server
from evertick.doctor.machine import check_descriptors, check_space
from evertick.domain.access import Actor, Role
from evertick.domain.encryption import new_key
from evertick.engine import accounts
from evertick.engine.deployments import note_deployment
from evertick.engine.remote_attempts import claim_for_dispatch
from tests.cli.conftest import Cli
from tests.cli.test_connection import be_migrated_further
from tests.databases import Cluster
from tests.engine.world import Runner, lead, make_dag, put, start, value

# How the test's own server is run is not the doctor's fault.
OF_TEST_SERVER = {"fsync", "full_page_writes", "synchronous_commit", "autovacuum", "disk"}
Codes = Callable[[], Awaitable[set[str]]]


@pytest.fixture
async def well(cli: Cli, conn: AsyncConnection, nowhere: Path) -> None:
    """An installation with nothing wrong."""
    (nowhere / "dags").mkdir()
    (nowhere / ".evertick").mkdir(mode=0o700)
    await lead(conn)
    await Runner.join(conn)
    await accounts.add_user(conn, name="admin", role=Role.ADMIN, actor=Actor("test"))
    await conn.execute("update account set password_hash = 'x'")


@pytest.fixture
def codes(cli: Cli) -> Codes:
    async def look() -> set[str]:
        ran = await cli("doctor", "--json")
        found = ran.json["findings"]
        assert ran.status == any(each["grade"] == "error" for each in found)
        assert ran.json["is_well"] is (ran.status == 0)
        for each in found:
            assert all(each[name] for name in ("what", "why", "next_step")), each
        return {each["code"] for each in found} - OF_TEST_SERVER

    return look


async def test_where_all_is_well_nothing_is_found(well: None, codes: Codes) -> None:
    assert await codes() == set()


async def test_people_get_each_finding_with_its_reason_and_the_next_step(cli: Cli, conn: AsyncConnection) -> None:
    ran = await cli("doctor")
    assert ran.status == 1
    assert "error: No scheduler leads." in ran.out and "evertick scheduler" in ran.out
    assert ran.out.rstrip().endswith("warnings.")


async def test_nobody_who_leads_or_runs_and_nobody_with_a_password(
    cli: Cli, conn: AsyncConnection, codes: Codes
) -> None:
    assert await codes() == {"no_leader", "no_runner", "no_password", "dags_folder"}


async def test_an_unserved_queue_a_broken_file_and_a_quarantined_row(
    well: None, conn: AsyncConnection, codes: Codes
) -> None:
    await put(conn, make_dag("ml", {"train": []}, task_queue="gpu"))
    run = await start(conn, "ml")
    await conn.execute(
        "insert into import_error (file, message, occurred_at) values ('bad.py', 'no such module', clock())"
    )
    await conn.execute("select quarantine_row('run', %s, 'promote', 'it fails', true)", [run])
    await note_deployment(conn, name="team", kind="git", source={}, problem="the repository cannot be reached")
    assert await codes() == {"unserved_queue", "import_errors", "deployment_failed", "quarantine"}


async def test_work_elsewhere_that_nobody_looks_after_or_that_cannot_begin_is_found(
    well: None, conn: AsyncConnection, codes: Codes
) -> None:
    await put(conn, make_dag("ml", {"train": [], "test": []}, task_queue="gpu"))
    await start(conn, "ml")
    there = await Runner.join(conn, executor="far", queues=["gpu"], slots=5)
    assert len(await claim_for_dispatch(conn, session=there.session, queues=["gpu"], free=2)) == 2
    assert await codes() == set()
    await conn.execute("update dispatch set last_error = 'Unschedulable', queued_at = clock() - interval '9 minutes'")
    assert await codes() == set()
    await conn.execute("update dispatch set queued_at = clock() - interval '11 minutes'")
    assert await codes() == {"not_begun"}
    await conn.execute("update dispatch set started_at = clock()")
    assert await codes() == set()
    await conn.execute(
        "update runner set ended_at = clock(), end_reason = 'stopped' where session = %s", [there.session]
    )
    assert await codes() == {"unserved_executor"}


async def test_a_login_with_a_role_is_told_what_it_may_not_look_at_and_one_without_rights_that_it_has_none(
    well: None, codes: Codes, conn: AsyncConnection, database: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await roles.apply(conn)
    name = f"berlin_{conninfo.conninfo_to_dict(database)['dbname']}"
    with cluster.admin() as admin:
        admin.execute(f"create role {name} login")  # type: ignore[call-overload]
    monkeypatch.setenv("EVERTICK_DATABASE_URL", conninfo.make_conninfo(database, user=name))
    try:
        assert await codes() == {"no_rights"}
        await conn.execute(f"grant {roles.RUNNER} to {name}")  # type: ignore[call-overload]
        assert await codes() == {"not_allowed"}
    finally:
        with cluster.admin() as admin:
            admin.execute(f"drop role {name}")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("EVERTICK_RETENTION_DAYS", "0", "retention"),
        ("EVERTICK_ROUTING_FILE", "nothing.toml", "routing_file"),
        ("EVERTICK_ROUTING_FILE", __file__, "routing_file"),
        ("EVERTICK_RETENTON_DAYS", "5", "misspelled"),
        ("EVERTICK_SECRET_KEY", "x", "misspelled"),
        ("EVERTICK_LOST_AFTER_SECONDS", "5", "settings"),
        ("EVERTICK_DAGS_FOLDER", "nothing", "dags_folder"),
        ("EVERTICK_RUNNER_SLOTS", "10000000", "descriptors"),
        ("EVERTICK_TICK_SECONDS", "nan", "settings"),
        ("EVERTICK_DATABASE_URL", "postgresql://evertick:hunter2@127.0.0.1:1/x", "database"),
    ],
)
async def test_a_wrong_setting_is_found(
    well: None, cli: Cli, codes: Codes, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, code: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert await codes() == {code}
    assert "hunter2" not in (await cli("doctor")).out


async def test_a_storage_that_does_not_answer_is_found(
    well: None, codes: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"": "s3://attic", "_ENDPOINT": "http://127.0.0.1:9", "_KEY_ID": "k", "_SECRET_KEY": "s"}
    for name, text in given.items():
        monkeypatch.setenv(f"EVERTICK_STORAGE{name}", text)
    assert await codes() == {"storage"}


async def test_an_open_door_is_found(
    well: None, conn: AsyncConnection, codes: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_API_HOST", "0.0.0.0")
    assert await codes() == set()
    await conn.execute("update account set password_hash = null")
    assert await codes() == {"open_door"}


async def test_a_port_that_somebody_has_is_found(well: None, codes: Codes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("EVERTICK_API_PORT", str(other.getsockname()[1]))
        assert await codes() == {"api_port"}


async def test_files_that_others_may_read_or_write_are_found(well: None, codes: Codes, nowhere: Path) -> None:
    key = nowhere / ".evertick" / "secret.key"
    key.write_text("x")
    key.chmod(0o644)
    (nowhere / ".evertick").chmod(0o777)
    assert await codes() == {"key_file", "home"}


async def test_stored_values_without_their_key_are_found(
    well: None, conn: AsyncConnection, codes: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = (
        "insert into stored_value (kind, name, content, key_id, changed_by, changed_at)"
        " values ('secret', 'db', 'x', 'gone', 'test', clock())"
    )
    await conn.execute(insert)
    assert await codes() == {"secret_key"}
    # Another key does not help.
    monkeypatch.setenv("EVERTICK_SECRET_KEYS", new_key())
    assert await codes() == {"secret_key"}


async def test_a_database_that_loses_what_it_said_is_found(well: None, cli: Cli, conn: AsyncConnection) -> None:
    name = await value(conn, "select current_database()")
    await conn.execute(f'alter database "{name}" set synchronous_commit = off')  # type: ignore[arg-type]
    found = (await cli("doctor", "--json")).json["findings"]
    assert "synchronous_commit" in {each["code"] for each in found}


async def test_a_database_that_was_not_migrated_is_found(
    cli: Cli, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", empty_database)
    found = (await cli("doctor", "--json")).json["findings"]
    assert "migrations" in {each["code"] for each in found}


async def test_an_old_snapshot_is_found(
    well: None, database: str, codes: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_database, "LONGEST_SNAPSHOT_SECONDS", 0.0)
    async with await connect(database, purpose=Purpose.SCHEDULER) as other, other.transaction():
        await other.execute("select pg_current_xact_id()")
        assert await codes() == {"old_snapshot"}


async def test_each_setting_of_a_server_is_judged(conn: AsyncConnection) -> None:
    """Those that need a restart of the server, by what it would tell."""
    told = await server(conn)
    good = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on"}
    numbers = {"max_connections": 100, "kept_connections": 3, "connections": 20, "role_limit": -1}
    fine = {**{name: getattr(told, name) for name in ServerFacts.__slots__}, **good, **numbers}
    assert list(check_server(ServerFacts(**fine))) == []
    for wrong, code in (
        ({"fsync": "off"}, "fsync"),
        ({"full_page_writes": "off"}, "full_page_writes"),
        ({"autovacuum": "off"}, "autovacuum"),
        ({"track_counts": "off"}, "track_counts"),
        ({"max_connections": 20}, "max_connections"),
        ({"connections": 95}, "connections"),
        ({"role_limit": 5}, "role_limit"),
        ({"is_standby": True}, "standby"),
        ({"encoding": "SQL_ASCII"}, "encoding"),
    ):
        assert [each.code for each in check_server(ServerFacts(**{**fine, **wrong}))] == [code]


def test_clocks_disks_and_limits_are_judged() -> None:
    def said(found: object) -> list[tuple[str, str]]:
        assert isinstance(found, list)
        return [(each.code, each.grade) for each in found if isinstance(each, Finding)]

    assert [said(list(check_clock(skew))) for skew in (0.0, 1.9, 30.0, -30.0)] == [
        [],
        [],
        *[[("clock", "warning")]] * 2,
    ]
    sizes = (10**12, 10**9, 10**7)
    assert [said(list(check_space(Path("x"), size))) for size in sizes] == [
        [],
        [("disk", "warning")],
        [("disk", "error")],
    ]
    settings = Settings(runner_slots=100)
    limits = (resource.RLIM_INFINITY, 10_000, 256)
    assert [said(list(check_descriptors(settings, limit))) for limit in limits] == [[], [], [("descriptors", "error")]]


def _way(host: str, *, is_encrypted: bool, sslmode: str | None = None) -> ConnectionRoute:
    return ConnectionRoute(
        host=host, address="" if host.startswith("/") else host, is_encrypted=is_encrypted, sslmode=sslmode
    )


@pytest.mark.parametrize(
    ("way", "codes"),
    [
        (_way("/run/postgresql", is_encrypted=False), []),
        (_way("127.0.0.1", is_encrypted=False), []),
        (_way("10.0.0.7", is_encrypted=False), ["no_tls"]),
        (_way("10.0.0.7", is_encrypted=True, sslmode="require"), ["unverified_tls"]),
        (_way("10.0.0.7", is_encrypted=True), ["unverified_tls"]),
        (_way("10.0.0.7", is_encrypted=True, sslmode="verify-full"), []),
    ],
)
def test_a_way_over_the_network_on_which_others_can_listen_is_warned_of(way: ConnectionRoute, codes: list[str]) -> None:
    assert [each.code for each in doctor_database.check_route(way)] == codes


@pytest.mark.requirement("N33")
async def test_an_upgrade_under_way_is_told(well: None, cli: Cli, conn: AsyncConnection, codes: Codes) -> None:
    await be_migrated_further(conn, oldest_program=len(migrations()))
    assert await codes() == {"later_schema"}
    await conn.execute("update runner set version = '99.0', name = 'berlin'")
    assert await codes() == {"later_schema", "other_release"}
    said = (await cli("doctor")).out
    assert f"{len(migrations()) + 1:04}_future of a later release" in said
    assert f"berlin is 99.0. This is {version('evertick')}." in said
    await conn.execute("update runner set version = %s", [version("evertick")])
    assert await codes() == {"later_schema"}


async def test_the_rights_of_services_are_printed_or_given(cli: Cli, conn: AsyncConnection) -> None:
    printed = await cli("db", "roles")
    assert printed.out.startswith("begin;\n") and printed.out.endswith("commit;\n")
    assert "to evertick_runner;" in printed.out
    assert not await roles.are_used(conn)
    given = await cli.json("db", "roles", "--apply")
    assert (
        given["is_applied"]
        and printed.out == "begin;\n" + "".join(f"{x};\n" for x in given["statements"]) + "commit;\n"
    )
    assert await roles.are_used(conn)


def test_logs_that_nobody_can_reach_or_that_wait_for_long_are_found() -> None:
    storage = {"storage": "s3://attic", "storage_key_id": "k", "storage_secret_key": "s"}

    def judged(settings: Settings, *, are_there: bool, waiting: float | None) -> list[str]:
        return [each.code for each in check_logs(settings, StoredLogs(are_there, waiting))]

    assert judged(Settings(), are_there=True, waiting=None) == ["storage"]
    assert judged(Settings(), are_there=False, waiting=1e6) == []
    moving = Settings(**storage, log_archive=True)  # type: ignore[arg-type]
    assert judged(moving, are_there=True, waiting=4000) == judged(moving, are_there=True, waiting=None) == []
    assert judged(moving, are_there=True, waiting=4300) == ["log_moves"]


async def test_logs_in_a_storage_that_is_not_named_here_are_found(
    well: None, conn: AsyncConnection, codes: Codes
) -> None:
    await conn.execute("insert into log_archive_object (run_id, bytes) values (1, 1)")
    assert await codes() == {"storage"}


async def test_security_lists_what_is_weak_though_it_works(
    cli: Cli, conn: AsyncConnection, well: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def weak() -> set[str]:
        ran = await cli("doctor", "--security", "--json")
        assert ran.status == 0
        return {each["code"] for each in ran.json["findings"]} - {"root"}

    assert await weak() == {"database_roles"}
    await accounts.add_user(conn, name="ci", role=Role.ADMIN, actor=Actor("test"))
    row = await accounts.find_user(conn, "ci")
    await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=None)
    await conn.execute("update credential set created_at = clock() - interval '100 days'")
    for name, text in {"API_HOST": "0.0.0.0", "ADMIN_PASSWORD": "x", "API_RATE_LIMIT": "0"}.items():
        monkeypatch.setenv(f"EVERTICK_{name}", text)
    monkeypatch.setenv("EVERTICK_WEBHOOK_ALLOWED_NETWORKS", "10.0.0.0/8,0.0.0.0/0")
    monkeypatch.setenv("EVERTICK_OIDC_FILE", "oidc.toml")
    await conn.execute("update account set password_hash = null")
    assert await weak() == {
        *("database_roles", "endless_tokens", "unused_tokens", "admin_tokens", "no_local_admin"),
        *("no_tls", "admin_password", "rate_limit", "webhook_networks"),
    }
