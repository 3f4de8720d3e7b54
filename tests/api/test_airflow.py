"""Airflow's official client against the real server: written by another door, read by the client, values compared."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import airflow_client.client as airflow
import pytest
import structlog
from airflow_client.client.exceptions import ApiException
from psycopg import AsyncConnection

from evertick.api.serving import serve
from evertick.config import Settings
from evertick.domain.access import Role
from evertick.domain.attempt import TaskKey
from evertick.domain.gates import GateKind, GateSpec
from evertick.domain.retry import RetryPolicy
from evertick.engine import accounts
from evertick.services.listening import address_of, bound
from evertick.store import dags, logs, runs
from evertick.store.logs import NewChunk
from tests.engine.world import Runner, lead, make_dag, put, run_state, start, states

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
    serving = asyncio.create_task(serve(Settings(api_rate=0), database, structlog.get_logger(), at, stop))
    yield address_of(at)
    stop.set()
    await serving


@pytest.fixture
async def client(address: str, conn: AsyncConnection) -> Official:
    await accounts.add_user(conn, name="root", role=Role.ADMIN, actor="test")
    row = await accounts.find_user(conn, "root")
    issued = await accounts.issue(conn, row, kind="token", name="t", actor="test", seconds=600)
    return Official(address, issued.secret)


async def put_two(conn: AsyncConnection) -> None:
    shape = {"extract": [], "load": ["extract"]}
    etl = make_dag(
        "etl",
        shape,
        every="@every 1h",
        tags=("finance", "daily"),
        description="Loads.",
        max_active_runs=3,
        task_timeout_seconds=90.0,
        task_retry=RetryPolicy(retries=1, delay_seconds=5),
    )
    await put(conn, etl)
    await put(conn, make_dag("other", {"t": []}, tags=("daily",)))


async def test_dags_and_tasks_have_their_values(client: Official, conn: AsyncConnection) -> None:
    await put_two(conn)
    found = await client("DAGApi", "get_dags")
    assert ([dag.dag_id for dag in found.dags], found.total_entries) == (["etl", "other"], 2)
    one = found.dags[0]
    assert (one.description, one.is_paused, one.max_active_runs) == ("Loads.", False, 3)
    assert [tag.name for tag in one.tags] == ["finance", "daily"]
    assert one.next_dagrun_run_after is not None and found.dags[1].next_dagrun_run_after is None
    for options, names in (
        ({"tags": ["finance"]}, ["etl"]),
        ({"tags": ["daily", "finance"], "tags_match_mode": "any"}, ["etl", "other"]),
        ({"tags": ["daily", "finance"], "tags_match_mode": "all"}, ["etl"]),
        ({"dag_id_pattern": "TH"}, ["other"]),
        ({"dag_id_pattern": "TH|etl"}, ["etl", "other"]),
        ({"dag_id_prefix_pattern": "e"}, ["etl"]),
        ({"paused": True}, []),
        ({"paused": False}, ["etl", "other"]),
        ({"order_by": ["-dag_id"]}, ["other", "etl"]),
        ({"limit": 1}, ["etl"]),
        ({"limit": 1, "offset": 1}, ["other"]),
    ):
        assert [dag.dag_id for dag in (await client("DAGApi", "get_dags", **options)).dags] == names, options
    assert (await client("DAGApi", "get_dag", "etl")).timetable_summary is not None
    details = await client("DAGApi", "get_dag_details", "etl")
    assert (details.timezone, details.latest_dag_version.version_number) == ("UTC", 1)
    assert (await client("DAGApi", "patch_dag", "etl", airflow.DAGPatchBody(is_paused=True))).is_paused
    row = await dags.find(conn, "etl")
    assert row is not None and row.paused
    assert [dag.dag_id for dag in (await client("DAGApi", "get_dags", paused=True)).dags] == ["etl"]
    tasks = await client("TaskApi", "get_tasks", "etl")
    assert [(task.task_id, task.downstream_task_ids, task.retries) for task in tasks.tasks] == [
        ("extract", ["load"], 1),
        ("load", [], 1),
    ]
    down = await client("TaskApi", "get_tasks", "etl", order_by="-task_id")
    assert [task.task_id for task in down.tasks] == ["load", "extract"]
    task = await client("TaskApi", "get_task", "etl", "load")
    assert (task.execution_timeout.seconds, task.trigger_rule, task.queue) == (90, "all_success", "default")
    await client.refused(404, "DAGApi", "get_dag", "none")
    await client.refused(404, "TaskApi", "get_task", "etl", "none")
    await client.refused(400, "DAGApi", "get_dags", order_by=["secret"])


async def test_a_run_is_triggered_read_filtered_and_ended_by_hand(client: Official, conn: AsyncConnection) -> None:
    await put_two(conn)
    body = airflow.TriggerDAGRunPostBody(dag_run_id="mine", logical_date=None, conf=None)
    made = await client("DagRunApi", "trigger_dag_run", "etl", body)
    assert (made.dag_run_id, made.state.value, made.run_type.value) == ("mine", "running", "manual")
    assert (made.triggered_by.value, made.triggering_user_name) == ("rest_api", "root")
    await client.refused(409, "DagRunApi", "trigger_dag_run", "etl", body)
    await client.refused(404, "DagRunApi", "trigger_dag_run", "none", body)
    bad = airflow.TriggerDAGRunPostBody(logical_date=None, conf={"unknown": 1})
    await client.refused(400, "DagRunApi", "trigger_dag_run", "etl", bad)
    second, third = await start(conn, "etl"), await start(conn, "other")
    await (await Runner.join(conn)).drain({"t": "failed"})
    everything = await client("DagRunApi", "get_dag_runs", "~")
    ids = [run.dag_run_id for run in everything.dag_runs]
    assert len(ids) == 3 and ids[0] == "mine" and everything.total_entries == 3
    assert ids[1].endswith(f"__{second}") and ids[2].endswith(f"__{third}")
    for each in everything.dag_runs:
        again = await client("DagRunApi", "get_dag_run", each.dag_id, each.dag_run_id)
        assert again.dag_run_id == each.dag_run_id and again.duration is not None
    now = datetime.now(UTC)
    for options, count in (
        ({"state": ["failed"]}, 1),
        ({"state": ["success"]}, 2),
        ({"state": ["failed", "success"]}, 3),
        ({"run_type": ["manual"]}, 3),
        ({"run_type": ["scheduled"]}, 0),
        ({"run_id_pattern": "min"}, 1),
        ({"run_id_prefix_pattern": "manual__"}, 2),
        ({"run_after_gte": now - timedelta(hours=1)}, 3),
        ({"run_after_gte": now + timedelta(hours=1)}, 0),
        ({"start_date_lte": now + timedelta(hours=1)}, 3),
        ({"start_date_lte": now - timedelta(hours=1)}, 0),
        ({"end_date_gte": now - timedelta(hours=1)}, 3),
        ({"end_date_gte": now + timedelta(hours=1)}, 0),
        ({"duration_lte": 1000.0}, 3),
        ({"duration_gte": 1000.0}, 0),
        ({"triggering_user_name_pattern": "root"}, 1),
        ({"dag_id_pattern": "oth"}, 1),
        ({"limit": 2}, 2),
        ({"limit": 2, "offset": 2}, 1),
        ({"dag_version": [1]}, 3),
        ({"dag_version": [2]}, 0),
    ):
        assert len((await client("DagRunApi", "get_dag_runs", "~", **options)).dag_runs) == count, options
    for order, first in (
        ("id", ids[0]),
        ("-id", ids[2]),
        ("run_after", ids[0]),
        ("-run_after", ids[2]),
        ("-dag_id", ids[2]),
    ):
        assert (await client("DagRunApi", "get_dag_runs", "~", order_by=[order])).dag_runs[0].dag_run_id == first, order
    assert len((await client("DagRunApi", "get_dag_runs", "etl")).dag_runs) == 2
    await client.refused(404, "DagRunApi", "get_dag_run", "etl", ids[2])
    await client.refused(404, "DagRunApi", "get_dag_run", "etl", "none")
    opened = await client("DagRunApi", "trigger_dag_run", "etl", airflow.TriggerDAGRunPostBody(logical_date=None))
    patch = airflow.DAGRunPatchBody(state="success")
    ended = await client("DagRunApi", "patch_dag_run", "etl", opened.dag_run_id, patch)
    assert ended.state.value == "success"
    shown = await client("TaskInstanceApi", "get_task_instances", "etl", opened.dag_run_id)
    assert {task.state.value for task in shown.task_instances} == {"skipped"}, "as a queued run there"


async def test_clearing_is_a_dry_run_unless_asked(client: Official, conn: AsyncConnection) -> None:
    await put_two(conn)
    run_id = await start(conn, "etl", key="r1")
    await (await Runner.join(conn)).drain()
    assert await run_state(conn, run_id) == "success"
    await client("TaskInstanceApi", "post_clear_task_instances", "etl", airflow.ClearTaskInstancesBody(dag_run_id="r1"))
    api = airflow.DagRunApi(client._client)
    raw = await asyncio.to_thread(api.clear_dag_run_without_preload_content, "etl", "r1", airflow.DAGRunClearBody())
    assert raw.status == 200 and await run_state(conn, run_id) == "success", "both bodies default to a dry run"
    load = airflow.ClearTaskInstancesBodyTaskIdsInner("load")
    only = airflow.ClearTaskInstancesBody(dag_run_id="r1", only_failed=False, dry_run=False, task_ids=[load])
    cleared = await client("TaskInstanceApi", "post_clear_task_instances", "etl", only)
    assert [task.task_id for task in cleared.task_instances] == ["load"]
    assert (await states(conn, run_id))["load"] == "available" and await run_state(conn, run_id) == "running"
    await (await Runner.join(conn)).drain()
    await asyncio.to_thread(
        api.clear_dag_run_without_preload_content, "etl", "r1", airflow.DAGRunClearBody(dry_run=False)
    )
    assert (await states(conn, run_id)) == {"extract": "available", "load": "waiting"}


async def test_task_instances_tries_logs_and_results(client: Official, conn: AsyncConnection) -> None:
    await put_two(conn)
    run_id = await start(conn, "etl", key="r1")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    key = TaskKey(run_id, claim.idx, claim.map_index)
    text = "1700000000000000 INFO hello\n1700000001000000 ERROR oops\n"
    chunk = NewChunk(key=key, epoch=claim.epoch, seq=0, until=len(text), content=text)
    await logs.append(conn, session=runner.session, chunks=[chunk])
    where = ("etl", "r1")
    running = await client("TaskInstanceApi", "get_task_instance", *where, "extract")
    assert (running.state.value, running.try_number, running.max_tries, running.map_index) == ("running", 1, 1, -1)
    await runner.finish(claim, result={"n": 3})
    listed = await client("TaskInstanceApi", "get_task_instances", *where)
    assert [(task.task_id, task.state.value) for task in listed.task_instances] == [
        ("extract", "success"),
        ("load", "queued"),
    ]
    for options, names in (
        ({"state": ["queued"]}, ["load"]),
        ({"state": ["failed"]}, []),
        ({"task_id": "load"}, ["load"]),
        ({"queue": ["default"]}, ["extract", "load"]),
        ({"queue": ["gpu"]}, []),
        ({"try_number": [1]}, ["extract"]),
        ({"map_index": [-1]}, ["extract", "load"]),
        ({"map_index": [0]}, []),
        ({"task_display_name_pattern": "oa"}, ["load"]),
        ({"order_by": ["-task_id"]}, ["load", "extract"]),
        ({"order_by": ["task_id"]}, ["extract", "load"]),
        ({"limit": 1, "offset": 1}, ["load"]),
    ):
        shown = await client("TaskInstanceApi", "get_task_instances", *where, **options)
        assert [task.task_id for task in shown.task_instances] == names, options
    tries = await client("TaskInstanceApi", "get_task_instance_tries", *where, "extract")
    assert [(each.try_number, each.state.value, each.hostname) for each in tries.task_instances] == [
        (1, "success", "h")
    ]
    one = await client("TaskInstanceApi", "get_task_instance_try_details", *where, "extract", 1)
    assert one.try_number == 1
    log = await client("TaskInstanceApi", "get_log", *where, "extract", 1)
    assert [line.event for line in log.content.actual_instance] == ["hello", "oops"]
    await client.refused(404, "TaskInstanceApi", "get_log", *where, "extract", 2)
    entries = await client("XComApi", "get_xcom_entries", *where, "extract")
    expected = await conn.execute("select value from result where run_id = %s", [run_id])
    (stored,) = await expected.fetchone() or (None,)
    assert [each.key for each in entries.xcom_entries] == (["return_value"] if stored is not None else [])
    if stored is not None:
        entry = await client("XComApi", "get_xcom_entry", "etl", "extract", "r1", "return_value")
        assert entry.actual_instance.value == stored
    await client.refused(404, "XComApi", "get_xcom_entry", "etl", "load", "r1", "return_value")
    patch = airflow.PatchTaskInstanceBody(new_state="skipped")
    await client("TaskInstanceApi", "patch_task_instance", *where, "load", patch)
    assert (await states(conn, run_id))["load"] == "skipped"
    await client.refused(404, "TaskInstanceApi", "get_task_instance", *where, "none")
    row = await runs.find(conn, run_id)
    assert row is not None and row.state == "success"


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
        ({}, ["api", "db"]),
        ({"order_by": ["-name"]}, ["db", "api"]),
        ({"order_by": ["slots"]}, ["api", "db"]),
        ({"pool_name_pattern": "ap"}, ["api"]),
        ({"pool_name_prefix_pattern": "d"}, ["db"]),
        ({"limit": 1, "offset": 1}, ["db"]),
    ):
        assert [each.name for each in (await client("PoolApi", "get_pools", **options)).pools] == names, options
    await client("PoolApi", "delete_pool", "api")
    await client.refused(404, "PoolApi", "get_pool", "api")
    await client.refused(409, "PoolApi", "delete_pool", "db")


async def test_backfills_are_foreseen_made_paused_and_canceled(client: Official, conn: AsyncConnection) -> None:
    await put_two(conn)
    last = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    body = airflow.BackfillPostBody(
        dag_id="etl", from_date=last - timedelta(hours=3), to_date=last, max_active_runs=2, run_backwards=False
    )
    foreseen = await client("BackfillApi", "create_backfill_dry_run", body)
    assert foreseen.total_entries == len(foreseen.backfills) in (3, 4)
    assert (await client("BackfillApi", "list_backfills", "etl")).backfills == []
    made = await client("BackfillApi", "create_backfill", body)
    assert (made.dag_id, made.max_active_runs, made.is_paused) == ("etl", 2, False)
    assert (await client("BackfillApi", "pause_backfill", made.id)).is_paused
    assert not (await client("BackfillApi", "unpause_backfill", made.id)).is_paused
    assert (await client("BackfillApi", "cancel_backfill", made.id)).completed_at is not None
    assert (await client("BackfillApi", "get_backfill", made.id)).completed_at is not None
    assert [each.id for each in (await client("BackfillApi", "list_backfills", "etl")).backfills] == [made.id]
    assert (await client("BackfillApi", "list_backfills", "other")).backfills == []
    await client.refused(404, "BackfillApi", "get_backfill", made.id + 100)


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
