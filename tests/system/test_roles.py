"""The whole life of a run with each service under a login of its own, which may do only what that service does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from psycopg import AsyncConnection, conninfo

from evertick.api.context import ApiContext
from evertick.config import Settings
from evertick.db import roles
from evertick.domain.access import Actor, Role
from evertick.domain.encryption import new_key
from evertick.domain.stored_values import ValueKind
from evertick.engine import accounts
from evertick.engine.secrets import put_value
from evertick.publisher.publisher import Publisher
from evertick.secrets.keyring import load_keyring
from evertick.ui.app import make_app
from tests.api.conftest import Client
from tests.databases import Cluster
from tests.system.processes import Installation
from tests.waiting import eventually

DAGS = """
from evertick import TaskContext, dag, task

@task(secrets=["door"], retries=1, retry_delay=0.1, pool="few")
def open_it(context: TaskContext):
    print("knocking")
    if context.attempt == 1:
        raise OSError("shut")
    return len(context.secrets["door"])

@task
def look(length: int):
    print("it is", length)
    return length * 2

@dag(schedule="@every 1h")
def house():
    look(open_it())
"""


@pytest.fixture
def logins(cluster: Cluster, database: str) -> Iterator[dict[str, str]]:
    """The address of the database for each role. Logins are the server's: they go with the test."""
    names = {role: f"{role}_{conninfo.conninfo_to_dict(database)['dbname']}" for role in roles.MAY}
    with cluster.admin() as admin:
        for name in names.values():
            admin.execute(f"create role {name} login")  # type: ignore[call-overload]
    yield {role: conninfo.make_conninfo(database, user=name) for role, name in names.items()}
    with cluster.admin() as admin:
        for name in names.values():
            admin.execute(f"drop role {name}")  # type: ignore[call-overload]


async def test_a_run_from_its_file_to_its_log_with_a_role_for_each_service(
    database: str, conn: AsyncConnection, logins: dict[str, str], tmp_path: Path
) -> None:
    await roles.apply(conn)
    for role, address in logins.items():
        await conn.execute(f"grant {role} to {conninfo.conninfo_to_dict(address)['user']}")  # type: ignore[call-overload]
    keys = (new_key(),)
    settings = Settings(home=tmp_path / "api", dags_folder=tmp_path / "dags", api_rate_limit=0, secret_keys=keys)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "house.py").write_text(DAGS)
    log = structlog.get_logger()
    async with Installation(database, tmp_path / "there", secret_keys=keys) as there:
        await put_value(
            conn, load_keyring(settings), kind=ValueKind.SECRET, name="door", value="sesame-open-wide", actor=Actor("t")
        )
        publisher = Publisher(settings, url=logins[roles.PUBLISHER], environment={"PATH": "/usr/bin"}, log=log)
        scheduler = await there.start("scheduler", database_url=logins[roles.SCHEDULER])
        runner = await there.start("runner", database_url=logins[roles.RUNNER])
        await accounts.add_user(conn, name="ann", role=Role.ADMIN, actor=Actor("test"))
        token = await accounts.issue(
            conn, await accounts.find_user(conn, "ann"), kind="token", name="t", actor=Actor("t"), seconds=600
        )
        context = ApiContext(settings, logins[roles.API], log)
        async with Client(make_app(context), token.secret) as ann:
            await ann.ok("PUT", "/api/v1/pools/few", status=201, json={"slots": 1})
            await publisher.tick()
            made = await ann.ok("POST", "/api/v1/dags/house/runs", json={}, status=201)
            run_id = made["run_id"]
            assert await there.ended(run_id, 60) == "success"
            assert "it is 16" in (await ann.get(f"/api/v1/runs/{run_id}/tasks/look/logs.txt")).text
            await ann.ok("POST", f"/api/v1/runs/{run_id}/clear", json={"tasks": ["look"]})
            assert await there.ended(run_id, 60) == "success"
        for pool in (context.readers, context.writers):
            for _, link in pool._idle:
                await link.close()
        await eventually(lambda: there.value("select count(*) = 1 from schedule_state where next_due > now()"))
        for service in (scheduler, runner):
            assert await service.terminate() == 0
            denied = [each for each in service.events() if "permission denied" in str(each)]
            assert denied == []


async def test_a_service_without_its_role_says_so_and_goes_on_once_it_has_it(
    database: str, conn: AsyncConnection, logins: dict[str, str], tmp_path: Path
) -> None:
    await roles.apply(conn)
    user = conninfo.conninfo_to_dict(logins[roles.RUNNER])["user"]
    await conn.execute(f"grant {roles.SCHEDULER} to {user}")  # type: ignore[call-overload]
    async with Installation(database, tmp_path / "there") as there:
        runner = there.launch("runner", database_url=logins[roles.RUNNER])
        told = await runner.saw("permission_denied", loop="register")
        assert "evertick db roles" in told["message"] and "permission denied" in told["error"]
        await conn.execute(f"grant {roles.RUNNER} to {user}")  # type: ignore[call-overload]
        await runner.saw("runner_started")
        assert await runner.terminate() == 0
        await conn.execute(f"revoke {roles.RUNNER} from {user}")  # type: ignore[call-overload]
        stopped = there.launch("runner", database_url=logins[roles.RUNNER])
        await stopped.saw("permission_denied", loop="register")
        assert await stopped.terminate() == 0 and "Traceback" not in stopped.tail(100)
