"""Airflow's official client against the real server: written by another door, read by the client, values compared."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import airflow_client.client as airflow
import pytest
import structlog
from airflow_client.client.exceptions import ApiException
from psycopg import AsyncConnection

from evertick.api.server import serve
from evertick.config import Settings
from evertick.db.queries import dags
from evertick.domain.access import Actor, Role
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.schedules.dependencies import Asset, after
from evertick.engine import accounts
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import deliver_dependencies as hear_arrivals
from evertick.engine.waits import update_asset, wake
from evertick.runtime.listen_socket import address_of, bound
from tests.api.applications import shared_app
from tests.engine.test_after import waiting
from tests.engine.test_children import parent
from tests.engine.world import Runner, lead, make_dag, put, start

Call = Callable[..., Any]


class Official:
    """The client, in a thread: it is synchronous."""

    def __init__(self, address: str, token: str) -> None:
        self._client = airflow.ApiClient(airflow.Configuration(host=address, access_token=token))

    async def __call__(self, api: str, operation: str, *arguments: Any, **options: Any) -> Any:
        method = getattr(getattr(airflow, api)(self._client), operation)
        return await asyncio.to_thread(method, *arguments, **options)

    async def refused(self, status: int, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ApiException) as error:
            await self(*arguments, **options)
        assert error.value.status == status, error.value


@pytest.fixture
async def address(database: str) -> AsyncIterator[str]:
    at: socket.socket = bound("127.0.0.1", 0)
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(shared_app, Settings(api_rate_limit=0), database, structlog.get_logger(), at, stop)
    )
    yield address_of(at)
    stop.set()
    await serving


@pytest.fixture
async def client(address: str, conn: AsyncConnection) -> Official:
    await accounts.add_user(conn, name="root", role=Role.ADMIN, actor=Actor("test"))
    row = await accounts.find_user(conn, "root")
    issued = await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=600)
    return Official(address, issued.secret)


async def test_pools_are_made_changed_and_counted(client: Official, conn: AsyncConnection) -> None:
    made = await client("PoolApi", "post_pool", airflow.PoolBody(name="db", slots=1))
    assert (made.name, made.slots, made.open_slots) == ("db", 1, 1)
    await client.refused(409, "PoolApi", "post_pool", airflow.PoolBody(name="db", slots=1))
    await put(conn, make_dag("etl", {"t": []}, task_gates=(GateSpec(kind=GateKind.POOL, name="db"),)))
    await start(conn, "etl"), await start(conn, "etl")
    pool = await client("PoolApi", "get_pool", "db")
    assert (pool.occupied_slots, pool.queued_slots, pool.scheduled_slots, pool.open_slots) == (1, 1, 1, 0)
    patch = airflow.PoolPatchBody(pool="db", slots=5, include_deferred=False)
    assert (await client("PoolApi", "patch_pool", "db", patch)).slots == 5
    await client("PoolApi", "post_pool", airflow.PoolBody(name="api", slots=2))
    for options, names in (
        ({}, ["default_pool", "api", "db"]),
        ({"order_by": ["-name"]}, ["default_pool", "db", "api"]),
        ({"order_by": ["slots"]}, ["api", "db", "default_pool"]),
        ({"pool_name_pattern": "ap"}, ["api"]),
        ({"pool_name_prefix_pattern": "db"}, ["db"]),
        ({"limit": 1, "offset": 1}, ["api"]),
    ):
        assert [each.name for each in (await client("PoolApi", "get_pools", **options)).pools] == names, options
    await client("PoolApi", "delete_pool", "api")
    await client.refused(404, "PoolApi", "get_pool", "api")
    await client.refused(409, "PoolApi", "delete_pool", "db")


async def test_health_version_and_import_errors(client: Official, conn: AsyncConnection, address: str) -> None:
    anonymous = Official(address, "")
    assert (await anonymous("VersionApi", "get_version")).version.startswith("3.")
    health = await anonymous("MonitorApi", "get_health")
    assert (health.metadatabase.status, health.scheduler.status) == ("healthy", "unhealthy")
    await lead(conn)
    assert (await anonymous("MonitorApi", "get_health")).scheduler.status == "healthy"
    for file in ("a.py", "b.py"):
        await dags.put_import_error(conn, file=file, line=3, message="no module x", detail="Traceback of theirs")
    found = await client("ImportErrorApi", "get_import_errors")
    assert [each.filename for each in found.import_errors] == ["a.py", "b.py"]
    assert "no module x" in found.import_errors[0].stack_trace
    down = await client("ImportErrorApi", "get_import_errors", order_by=["-filename"])
    assert [each.filename for each in down.import_errors] == ["b.py", "a.py"]
    only = await client("ImportErrorApi", "get_import_errors", filename_pattern="b")
    assert [each.filename for each in only.import_errors] == ["b.py"]
    one = await client("ImportErrorApi", "get_import_error", found.import_errors[0].import_error_id)
    assert one.filename == "a.py"
    await anonymous.refused(401, "DAGApi", "get_dags")


async def test_a_run_says_what_kind_of_start_it_had(client: Official, conn: AsyncConnection) -> None:
    for spec in (make_dag("child", {"work": []}), parent(), waiting("taker", after(Asset("orders")))):
        await put(conn, spec)
    for spec in (waiting("follower", after("child")), waiting("cron", "* * * * *")):
        await put(conn, spec)
    epoch, runner = await lead(conn), await Runner.join(conn)
    await start(conn, "parent")
    await update_asset(conn, asset="orders", extra={}, actor=Actor("user:ann"))
    await conn.execute("update schedule_state set next_due = next_due - interval '1 minute' where next_due is not null")
    for _ in range(3):
        await runner.drain()
        await wake(conn, shard=0, epoch=epoch, batch=100)
        await hear_arrivals(conn, shard=0, epoch=epoch, limit=100)
        await fire_schedules(conn, shard=0, epoch=epoch, batch=100)
    runs = (await client("DagRunApi", "get_dag_runs", "~")).dag_runs
    told = {run.dag_id: (run.run_type.value, run.triggered_by.value) for run in runs}
    assert told == {
        "parent": ("manual", "timetable"),
        "child": ("operator_triggered", "operator"),
        "taker": ("asset_triggered", "asset"),
        "follower": ("scheduled", "timetable"),
        "cron": ("scheduled", "timetable"),
    }
    for run in runs:
        alone = await client("DagRunApi", "get_dag_run", run.dag_id, run.dag_run_id)
        assert (alone.run_type, alone.triggered_by) == (run.run_type, run.triggered_by)
    for types, dags_found in (
        (["asset_triggered"], {"taker"}),
        (["operator_triggered"], {"child"}),
        (["manual"], {"parent"}),
        (["scheduled"], {"follower", "cron"}),
        (["scheduled", "asset_triggered"], {"follower", "cron", "taker"}),
        (["asset_triggered", "operator_triggered"], {"taker", "child"}),
        (["backfill"], set()),
        (["asset_materialization"], set()),
    ):
        for order in ("id", "-run_after", "dag_run_id"):
            found = await client("DagRunApi", "get_dag_runs", "~", run_type=types, order_by=[order])
            assert ({run.dag_id for run in found.dag_runs}, found.total_entries) == (dags_found, len(dags_found)), types
    for pattern, dags_found in (("rder", {"taker"}), ("rates", set())):
        found = await client("DagRunApi", "get_dag_runs", "~", consuming_asset_pattern=pattern)
        assert {run.dag_id for run in found.dag_runs} == dags_found
