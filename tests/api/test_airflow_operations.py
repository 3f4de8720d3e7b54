"""Every operation of Airflow's official client: written by another door and read by the client, or the reverse; values compared.

A function `op_NAME` is the scenario of the operation NAME. One that has none, and is not among those that are absent, fails a test.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import airflow_client.client as airflow
import pytest
import pytest_asyncio

from evertick.bundles.bundle import pack
from evertick.db.queries import dags, logs, runs
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import NamedSchedule, TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.domain.schedules.dependencies import Asset, after
from evertick.domain.schedules.partition_keys import daily
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import deliver_dependencies as hear_arrivals
from evertick.engine.publish import publish
from evertick.engine.tasks import clear, select_tasks
from evertick.engine.waits import Decision, decide_approval, find_approval
from tests.api.airflow_world import JANUARY, World, operations, people, served
from tests.api.test_airflow_lists import LISTS
from tests.databases import Cluster
from tests.engine.test_after import waiting
from tests.engine.test_mapping import THREE
from tests.engine.world import T0, lead, make_dag, names_of, put, run_state, states, value

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What clients seldom call: the only operations that may be absent.
TIER_3 = {
    *("favorite_dag", "unfavorite_dag", "patch_task_group_instances"),
    *("patch_task_group_instances_dry_run", "get_external_log_url", "get_extra_links", "get_hitl_detail_try_detail"),
    *("list_task_state_store", "get_task_state_store", "set_task_state_store", "patch_task_state_store"),
    *("delete_task_state_store", "clear_task_state_store", "list_asset_state_store", "get_asset_state_store"),
    *("set_asset_state_store", "delete_asset_state_store", "clear_asset_state_store", "create_default_connections"),
    *("enqueue_connection_test", "get_connection_test", "get_asset_aliases", "get_asset_alias", "list_dag_warnings"),
    *("reparse_dag_file", "get_jobs", "get_config", "get_config_value", "get_plugins", "import_errors"),
    *("get_providers", "login", "logout"),
}
# The client's name: why there is nothing to call. The answer is 404, or 405 where another method has that path.
ABSENT = {
    "enqueue_connection_test": "a server does not connect to wherever it is told",
    "get_asset_alias": "no aliases",
    "get_connection_test": "a server does not connect to wherever it is told",
    "login": "people sign in at /auth/login, programs bring a token",
    "logout": "people sign out at /auth/logout",
    "reparse_dag_file": "files are read when they change",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(cluster: Cluster, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    name = cluster.create(template)
    async with served(cluster.database_url(name), tmp_path_factory.mktemp("keys") / "secret.key") as made:
        await people(made)
        yield made
    cluster.drop(name)


def scenarios() -> dict[str, Any]:
    return {name.removeprefix("op_"): found for name, found in globals().items() if name.startswith("op_")}


async def test_every_operation_has_a_scenario_or_says_why_it_is_absent() -> None:
    known = {each.name for each in operations()}
    assert len(known) > 120
    assert set(scenarios()) | set(LISTS) | set(ABSENT) == known
    assert not set(ABSENT) & (set(scenarios()) | set(LISTS))
    assert set(ABSENT) <= TIER_3 <= known, "what clients call often is there"


async def fresh(world: World, name: str, **options: Any) -> str:
    """A DAG of its own for a scenario, a and then b, in a queue of its own: what others left in theirs is none of its business."""
    await put(world.conn, make_dag(name, {"a": [], "b": ["a"]}, task_queue=name, **options))
    return name


async def drain(world: World, queue: str, outcome: dict[str, str] | None = None) -> None:
    while claims := await world.runner.claim(queues=(queue,)):
        for claim, name in zip(claims, await names_of(world.conn, claims), strict=True):
            assert await world.runner.finish(claim, (outcome or {}).get(name, "success")) == []


async def ended(world: World, dag: str, key: str, outcome: dict[str, str] | None = None, **options: Any) -> int:
    run_id = await world.start(dag, key, **options)
    await drain(world, dag, outcome)
    return run_id


# DAGs ---------------------------------------------------------------------------------------------------------------


async def op_get_dag(world: World) -> None:
    dag = await world.client("get_dag", "etl")
    assert (dag.dag_id, dag.description, dag.is_paused, dag.max_active_runs) == ("etl", "Loads.", False, 3)
    assert [tag.name for tag in dag.tags] == ["finance", "daily"] and dag.fileloc == "etl.py"
    assert dag.next_dagrun_run_after == T0 + timedelta(hours=1) and dag.timetable_periodic
    assert not dag.has_import_errors and (await world.client("get_dag", "other")).has_import_errors
    assert await world.client.status_of("get_dag", "none") == 404


async def op_get_dag_details(world: World) -> None:
    await world.start(await fresh(world, "busy"), "b1")
    details = await world.client("get_dag_details", "busy")
    assert (details.timezone, details.latest_dag_version.version_number, details.active_runs_count) == ("UTC", 1, 1)
    assert (await world.client("get_dag_details", "etl")).active_runs_count == 0
    assert (await world.client("get_dag_details", "etl")).params["rows"]["value"] == 1


async def op_patch_dag(world: World) -> None:
    name = await fresh(world, "pausing")
    assert (await world.client("patch_dag", name, airflow.DAGPatchBody(is_paused=True))).is_paused
    row = await dags.find(world.conn, name)
    assert row is not None and row.paused
    for mask in (["other"], ["is_paused", "other"]):
        wish = airflow.DAGPatchBody(is_paused=False)
        assert await world.client.status_of("patch_dag", name, wish, update_mask=mask) == 400
    assert (await world.client("get_dag", name)).is_paused, "what is refused changes nothing"
    assert not (await world.client("patch_dag", name, wish, update_mask=["is_paused"])).is_paused


async def op_patch_dags(world: World) -> None:
    for name in ("many_1", "many_2"):
        await fresh(world, name)
    done = await world.client("patch_dags", airflow.DAGPatchBody(is_paused=True), dag_id_prefix_pattern="many_")
    assert [(dag.dag_id, dag.is_paused) for dag in done.dags] == [("many_1", True), ("many_2", True)]
    row = await dags.find(world.conn, "etl")
    assert row is not None and not row.paused


async def op_delete_dag(world: World) -> None:
    name = await fresh(world, "leaving")
    await world.client("delete_dag", name)
    row = await dags.find(world.conn, name)
    assert row is not None and row.deleted_at is not None
    assert await world.client.status_of("get_dag", name) == 404


async def op_favorite_dag(world: World) -> None:
    await world.client("favorite_dag", "etl")
    assert await world.client.status_of("favorite_dag", "none") == 404


async def op_unfavorite_dag(world: World) -> None:
    await world.client("unfavorite_dag", "etl")
    assert await world.client.status_of("unfavorite_dag", "none") == 404


async def op_get_tasks(world: World) -> None:
    found = (await world.client("get_tasks", "etl")).tasks
    assert [(task.task_id, task.downstream_task_ids, task.queue) for task in found] == [
        ("extract", ["side.load"], "default"),
        ("side.load", [], "gpu"),
    ]
    down = await world.client("get_tasks", "etl", order_by="-task_id")
    assert [task.task_id for task in down.tasks] == ["side.load", "extract"]


async def op_get_task(world: World) -> None:
    task = await world.client("get_task", "etl", "side.load")
    assert (task.pool, task.pool_slots, task.operator_name, task.is_mapped) == ("db", 2, "PythonOperator", False)
    assert (await world.client("get_task", "other", "t")).is_mapped
    assert await world.client.status_of("get_task", "etl", "none") == 404


async def op_get_dag_version(world: World) -> None:
    name = await fresh(world, "growing")
    await put(world.conn, make_dag(name, {"a": []}))
    versions = (await world.client("get_dag_versions", name)).dag_versions
    assert [each.version_number for each in versions] == [1, 2]
    assert (await world.client("get_dag_version", name, 2)).id == versions[1].id
    assert await world.client.status_of("get_dag_version", name, 3) == 404


async def op_get_dag_source(world: World, tmp_path: Path) -> None:
    (tmp_path / "src.py").write_text("# the source\n", encoding="utf-8")
    bundle = pack(tmp_path, "src.py", [])
    packed = {"bundle_hash": bundle.hash, "file": "src.py", "archive": bundle.archive, "uses_threads": None}
    await dags.put_bundle(world.conn, **packed)  # type: ignore[arg-type]
    spec = make_dag("sourced", {"a": []})
    await publish(world.conn, spec=spec, file="src.py", bundle_hash=bundle.hash, actor=Actor("test"))
    found = await world.client("get_dag_source", "sourced")
    assert (found.content, found.version_number) == ("# the source\n", 1)
    assert await world.client.status_of("get_dag_source", "sourced", version_number=9) == 404


async def op_get_dag_stats(world: World) -> None:
    (stats,) = (await world.client("get_dag_stats", dag_ids=["etl"])).dags
    assert {each.state.value: each.count for each in stats.stats} == {
        "queued": 0,
        "running": 0,
        "success": 1,
        "failed": 1,
    }


async def op_list_dag_warnings(world: World) -> None:
    assert (await world.client("list_dag_warnings")).dag_warnings == []


async def op_get_import_error(world: World) -> None:
    (listed,) = (await world.client("get_import_errors")).import_errors
    one = await world.client("get_import_error", listed.import_error_id)
    assert one.filename == "other.py" and "no module x" in one.stack_trace
    assert await world.client.status_of("get_import_error", 1) == 404


# Runs ---------------------------------------------------------------------------------------------------------------


async def op_get_dag_run(world: World) -> None:
    run = await world.client("get_dag_run", "etl", "r1")
    assert (run.state.value, run.run_type.value, run.conf) == ("failed", "manual", {"rows": 5})
    assert (run.logical_date, run.run_after, run.duration) == (JANUARY, T0 + timedelta(hours=1), 1800.0)
    assert (run.triggered_by.value, run.triggering_user_name) == ("rest_api", "root")
    assert await world.client.status_of("get_dag_run", "etl", "o1") == 404, "of another DAG"


async def op_trigger_dag_run(world: World) -> None:
    name, at = await fresh(world, "triggered"), datetime(2024, 3, 1, 12, tzinfo=UTC)
    body = airflow.TriggerDAGRunPostBody(dag_run_id="mine", logical_date=at, note="why")
    made = await world.client("trigger_dag_run", name, body)
    assert (made.dag_run_id, made.logical_date, made.note, made.state.value) == ("mine", at, "why", "running")
    row = await dags.find(world.conn, name)
    assert row is not None
    query = "select key || ' ' || triggered_by from run where dag_id = %s and fire_at = %s"
    assert await value(world.conn, query, row.dag_id, at) == "mine user:root"
    for other, status in (
        (airflow.TriggerDAGRunPostBody(dag_run_id="mine", logical_date=None), 409),
        (airflow.TriggerDAGRunPostBody(dag_run_id="second", logical_date=at), 409),
        (airflow.TriggerDAGRunPostBody(logical_date=datetime(1, 1, 1, tzinfo=UTC)), 400),
    ):
        assert await world.client.status_of("trigger_dag_run", name, other) == status, other
    later = airflow.TriggerDAGRunPostBody(logical_date=None, run_after=datetime(2100, 1, 1, tzinfo=UTC))
    delayed = await world.client("trigger_dag_run", name, later)
    assert (delayed.state.value, delayed.run_after) == ("queued", later.run_after)
    plain = await world.client("trigger_dag_run", name, airflow.TriggerDAGRunPostBody(logical_date=None))
    assert plain.logical_date is None and plain.dag_run_id.startswith("manual__")
    assert (
        await world.client.status_of("trigger_dag_run", "other", airflow.TriggerDAGRunPostBody(logical_date=None))
        == 400
    )


async def op_patch_dag_run(world: World) -> None:
    name = await fresh(world, "patched")
    run_id = await world.start(name, "p1")
    ended_by_hand = await world.client("patch_dag_run", name, "p1", airflow.DAGRunPatchBody(state="success", note="n"))
    assert (ended_by_hand.state.value, ended_by_hand.note) == ("success", "n")
    assert set((await states(world.conn, run_id)).values()) == {"skipped"}, "as a queued run there"
    for state in ("failed", "success"):
        patch = airflow.DAGRunPatchBody(state=state)
        assert (await world.client("patch_dag_run", name, "p1", patch)).state.value == state
        assert await run_state(world.conn, run_id) == state, "a run that has ended is judged anew"
    again = await world.client("patch_dag_run", name, "p1", airflow.DAGRunPatchBody(state="queued"))
    assert again.state.value == "running" and again.note == "n", "the note stays"
    assert (await states(world.conn, run_id))["a"] == "available"
    kept = await world.client("patch_dag_run", name, "p1", airflow.DAGRunPatchBody(note="x"), update_mask=["state"])
    assert kept.note == "n"
    gone = await world.client("patch_dag_run", name, "p1", airflow.DAGRunPatchBody(note=""))
    assert gone.note is None


async def op_delete_dag_run(world: World) -> None:
    name = await fresh(world, "deleted")
    run_id = await world.start(name, "d1")
    (claim,) = await world.runner.claim(1, queues=(name,))
    assert await world.client.status_of("delete_dag_run", name, "d1") == 409, "it is running"
    await world.runner.finish(claim)
    await drain(world, name)
    await world.client("delete_dag_run", name, "d1")
    assert await runs.find(world.conn, run_id) is None
    assert await value(world.conn, "select count(*) from pending_cleanup where kind = 'run' and id = %s", run_id) == 1
    assert (
        await value(world.conn, "select actor from audit_log where action = 'delete_run' and run_id = %s", run_id)
        == "user:root"
    )
    assert await world.client.status_of("delete_dag_run", name, "d1") == 404


async def op_clear_dag_run(world: World) -> None:
    name = await fresh(world, "cleared")
    run_id = await ended(world, name, "c1", {"b": "failed"})
    answer = await world.client.raw("clear_dag_run", name, "c1", airflow.DAGRunClearBody())
    foreseen = json.loads(answer.data)
    assert [each["task_id"] for each in foreseen["task_instances"]] == ["a", "b"], "a dry run unless asked"
    only = await world.client.raw("clear_dag_run", name, "c1", airflow.DAGRunClearBody(only_failed=True))
    assert [each["task_id"] for each in json.loads(only.data)["task_instances"]] == ["b"]
    assert await run_state(world.conn, run_id) == "failed"
    await world.client.raw("clear_dag_run", name, "c1", airflow.DAGRunClearBody(dry_run=False, only_failed=True))
    assert await states(world.conn, run_id) == {"a": "success", "b": "available"}
    await world.client.raw("clear_dag_run", name, "c1", airflow.DAGRunClearBody(dry_run=False))
    assert (await states(world.conn, run_id))["a"] == "available"


async def op_clear_dag_runs(world: World) -> None:
    name = await fresh(world, "cleared_many")
    ids = [await ended(world, name, key) for key in ("m1", "m2", "m3")]
    chosen = [airflow.BulkDAGRunBody(dag_run_id=key) for key in ("m1", "m3")]
    foreseen = await world.client.raw("clear_dag_runs", name, airflow.BulkDAGRunClearBody(dag_runs=chosen))
    assert json.loads(foreseen.data)["total_entries"] == 4
    await world.client.raw("clear_dag_runs", name, airflow.BulkDAGRunClearBody(dag_runs=chosen, dry_run=False))
    assert [await run_state(world.conn, each) for each in ids] == ["running", "success", "running"]


async def op_bulk_dag_runs(world: World) -> None:
    name = await fresh(world, "bulk_runs")
    ids = [await ended(world, name, key) for key in ("k1", "k2")]
    body = airflow.BulkBodyBulkDAGRunBody.from_dict(
        {
            "actions": [
                {"action": "update", "entities": [{"dag_run_id": "k1", "state": "failed", "note": "bulk"}]},
                {"action": "delete", "entities": ["k2", "none"]},
            ]
        }
    )
    done = await world.client("bulk_dag_runs", name, body)
    assert done.update.success == [f"{name}.k1"] and done.delete.success == [f"{name}.k2"]
    assert [error["status_code"] for error in done.delete.errors] == [404]
    assert await run_state(world.conn, ids[0]) == "failed" and await runs.find(world.conn, ids[1]) is None
    assert (await world.client("get_dag_run", name, "k1")).note == "bulk"


async def op_get_list_dag_runs_batch(world: World) -> None:
    for body, expected in (
        (airflow.DAGRunsBatchBody(dag_ids=["etl"]), ["r1", "r2"]),
        (airflow.DAGRunsBatchBody(dag_ids=["etl"], states=["failed"]), ["r1"]),
        (airflow.DAGRunsBatchBody(dag_ids=["etl"], order_by="-id", page_limit=1), ["r2"]),
        (airflow.DAGRunsBatchBody(dag_ids=["etl"], page_offset=1), ["r2"]),
        (airflow.DAGRunsBatchBody(dag_ids=["etl"], logical_date_lte=JANUARY), ["r1"]),
        (airflow.DAGRunsBatchBody(dag_ids=["etl"], duration_gt=1800.0), ["r2"]),
        (airflow.DAGRunsBatchBody(dag_ids=["etl"], conf_contains="7"), ["r2"]),
        (airflow.DAGRunsBatchBody(dag_ids=["none"]), []),
    ):
        found = await world.client("get_list_dag_runs_batch", "~", body)
        assert [run.dag_run_id for run in found.dag_runs] == expected, body


async def op_wait_dag_run_until_finished(world: World) -> None:
    answer = await world.client.raw("wait_dag_run_until_finished", "etl", "r2", interval=0.2, result=["extract"])
    lines = [json.loads(line) for line in answer.data.splitlines()]
    assert lines == [{"state": "success", "results": {"extract": 4}}]


async def op_get_upstream_asset_events(world: World) -> None:
    assert (await world.client("get_upstream_asset_events", "etl", "r1")).asset_events == []
    assert await world.client.status_of("get_upstream_asset_events", "etl", "none") == 404


# Task instances -----------------------------------------------------------------------------------------------------


async def op_get_task_instance(world: World) -> None:
    task = await world.client("get_task_instance", "etl", "r1", "side.load")
    assert (task.state.value, task.try_number, task.max_tries, task.hostname) == ("failed", 1, 0, "h")
    assert (task.pool, task.pool_slots, task.queue, task.operator) == ("db", 2, "gpu", "PythonOperator")
    assert (task.start_date, task.logical_date) == (T0 + timedelta(hours=1.5), JANUARY)
    assert await world.client.status_of("get_task_instance", "etl", "r1", "none") == 404
    assert await world.client.status_of("get_task_instance", "other", "o1", "t") == 404, "it is mapped"


async def op_get_mapped_task_instance(world: World) -> None:
    task = await world.client("get_mapped_task_instance", "other", "o1", "t", 0)
    assert (task.state.value, task.map_index, task.rendered_map_index) == ("running", 0, "0")
    assert await world.client.status_of("get_mapped_task_instance", "other", "o1", "t", 7) == 404


async def op_get_task_instances_batch(world: World) -> None:
    for body, expected in (
        (airflow.TaskInstancesBatchBody(dag_ids=["etl"], state=["failed"]), ["r1.side.load"]),
        (airflow.TaskInstancesBatchBody(dag_run_ids=["r2"]), ["r2.extract", "r2.side.load"]),
        (
            airflow.TaskInstancesBatchBody(dag_ids=["etl"], task_ids=["extract"], order_by="-id"),
            ["r2.extract", "r1.extract"],
        ),
        (airflow.TaskInstancesBatchBody(dag_ids=["etl"], pool=["db"], page_limit=1, page_offset=1), ["r2.side.load"]),
        (airflow.TaskInstancesBatchBody(dag_ids=["etl"], queue=["none"]), []),
        (airflow.TaskInstancesBatchBody(dag_ids=["etl"], executor=["none"]), []),
    ):
        found = await world.client("get_task_instances_batch", "~", "~", body)
        assert [f"{task.dag_run_id}.{task.task_id}" for task in found.task_instances] == expected, body


async def op_patch_task_instance(world: World) -> None:
    name = await fresh(world, "marked")
    days = [datetime(2024, 5, day, tzinfo=UTC) for day in (1, 2, 3)]
    ids = [await world.start(name, f"x{place}", at=at) for place, at in enumerate(days)]
    patch = airflow.PatchTaskInstanceBody(new_state="success", note="by hand")
    done = await world.client("patch_task_instance", name, "x1", "a", patch)
    assert [(task.task_id, task.state.value, task.note) for task in done.task_instances] == [
        ("a", "success", "by hand")
    ]
    assert await states(world.conn, ids[1]) == {"a": "success", "b": "available"}
    assert await world.client.status_of("patch_task_instance", name, "x1", "a", patch) == 409, "it is so already"
    wide = airflow.PatchTaskInstanceBody(new_state="failed", include_downstream=True, include_future=True)
    done = await world.client("patch_task_instance", name, "x1", "a", wide)
    assert {(task.dag_run_id, task.task_id) for task in done.task_instances} >= {("x1", "a"), ("x2", "a")}
    assert (await states(world.conn, ids[0]))["a"] == "available", "the past was not meant"
    assert await run_state(world.conn, ids[2]) == "failed"
    up = airflow.PatchTaskInstanceBody(new_state="skipped", include_upstream=True)
    done = await world.client("patch_task_instance", name, "x0", "b", up)
    assert {task.task_id for task in done.task_instances} == {"a", "b"}
    noted = airflow.PatchTaskInstanceBody(note="only this")
    (task,) = (await world.client("patch_task_instance", name, "x0", "b", noted, update_mask=["note"])).task_instances
    assert (task.note, task.state.value) == ("only this", "skipped")


async def op_patch_task_instance_dry_run(world: World) -> None:
    name = await fresh(world, "foreseen")
    run_id = await world.start(name, "f1")
    patch = airflow.PatchTaskInstanceBody(new_state="failed", include_downstream=True)
    found = await world.client("patch_task_instance_dry_run", name, "f1", "a", patch)
    assert [task.task_id for task in found.task_instances] == ["a", "b"]
    assert await states(world.conn, run_id) == {"a": "available", "b": "waiting"}


async def mapped(world: World, name: str) -> int:
    """Its one task has three instances."""
    await put(world.conn, make_dag(name, {"t": []}, task_queue=name, per_task={"t": {"mapping": THREE}}))
    return await world.start(name, f"{name}1")


async def op_patch_task_instance_by_map_index(world: World) -> None:
    run_id = await mapped(world, "map_marked")
    patch = airflow.PatchTaskInstanceBody(new_state="success")
    done = await world.client("patch_task_instance_by_map_index", "map_marked", "map_marked1", "t", 1, patch)
    assert [(task.map_index, task.state.value) for task in done.task_instances] == [(1, "success")]
    query = "select string_agg(map_index || ' ' || state, ',' order by map_index) from task where run_id = %s"
    assert await value(world.conn, query, run_id) == "0 available,1 success,2 available"


async def op_patch_task_instance_dry_run_by_map_index(world: World) -> None:
    await mapped(world, "map_foreseen")
    patch = airflow.PatchTaskInstanceBody(new_state="success")
    where = ("map_foreseen", "map_foreseen1", "t", 2, patch)
    found = await world.client("patch_task_instance_dry_run_by_map_index", *where)
    assert [(task.map_index, task.state.value) for task in found.task_instances] == [(2, "queued")]


async def op_patch_task_group_instances(world: World) -> None:
    await put(world.conn, make_dag("grouped", {"g.a": [], "g.b": [], "c": []}))
    run_id = await world.start("grouped", "g1")
    patch = airflow.PatchTaskInstanceBody(new_state="skipped")
    done = await world.client("patch_task_group_instances", "grouped", "g1", "g", patch)
    assert [task.task_id for task in done.task_instances] == ["g.a", "g.b"]
    assert await states(world.conn, run_id) == {"g.a": "skipped", "g.b": "skipped", "c": "available"}
    assert await world.client.status_of("patch_task_group_instances", "grouped", "g1", "none", patch) == 404


async def op_patch_task_group_instances_dry_run(world: World) -> None:
    await put(world.conn, make_dag("regrouped", {"g.a": [], "c": []}))
    run_id = await world.start("regrouped", "g2")
    patch = airflow.PatchTaskInstanceBody(new_state="skipped")
    found = await world.client("patch_task_group_instances_dry_run", "regrouped", "g2", "g", patch)
    assert [task.task_id for task in found.task_instances] == ["g.a"]
    assert (await states(world.conn, run_id))["g.a"] == "available"


async def op_bulk_task_instances(world: World) -> None:
    name = await fresh(world, "bulk_tasks")
    run_id = await world.start(name, "t1")
    body = airflow.BulkBodyBulkTaskInstanceBody.from_dict(
        {
            "actions": [
                {
                    "action": "update",
                    "entities": [{"task_id": "a", "new_state": "success"}, {"task_id": "z", "new_state": "success"}],
                }
            ]
        }
    )
    done = await world.client("bulk_task_instances", name, "t1", body)
    assert done.update.success == [f"{name}.t1.a[-1]"] and [error["status_code"] for error in done.update.errors] == [
        404
    ]
    assert (await states(world.conn, run_id))["a"] == "success"
    again = await world.client("bulk_task_instances", name, "t1", body)
    assert sorted(error["status_code"] for error in again.update.errors) == [404, 409]


async def op_delete_task_instance(world: World) -> None:
    assert await world.client.status_of("delete_task_instance", "etl", "r1", "extract") == 409
    assert await world.client.status_of("delete_task_instance", "etl", "r1", "none") == 404


async def op_post_clear_task_instances(world: World) -> None:
    name = await fresh(world, "reset")
    days = [datetime(2024, 6, day, tzinfo=UTC) for day in (1, 2, 3)]
    ids = [await ended(world, name, f"y{place}", {"b": "failed"}, at=at) for place, at in enumerate(days)]

    async def cleared(**options: Any) -> list[str]:
        answer = await world.client("post_clear_task_instances", name, airflow.ClearTaskInstancesBody(**options))
        return sorted(f"{each.dag_run_id}.{each.task_id}" for each in answer.task_instances)

    inner = airflow.ClearTaskInstancesBodyTaskIdsInner
    assert await cleared(dag_run_id="y1") == ["y1.b"], "only what failed unless asked"
    assert await cleared(dag_run_id="y1", only_failed=False, task_ids=[inner("a")]) == ["y1.a"]
    assert await cleared(dag_run_id="y1", only_failed=False, task_ids=[inner("a")], include_downstream=True) == [
        "y1.a",
        "y1.b",
    ]
    assert await cleared(dag_run_id="y1", only_failed=False, task_ids=[inner("b")], include_upstream=True) == [
        "y1.a",
        "y1.b",
    ]
    assert await cleared(dag_run_id="y1", include_past=True) == ["y0.b", "y1.b"]
    assert await cleared(dag_run_id="y1", include_future=True) == ["y1.b", "y2.b"]
    assert await cleared(start_date=days[1], end_date=days[2]) == ["y1.b", "y2.b"]
    assert await cleared(dag_run_id="y1", only_running=True) == []
    assert [await run_state(world.conn, each) for each in ids] == ["failed"] * 3, "a dry run unless asked"
    assert await cleared(dag_run_id="y0", include_future=True, dry_run=False, note="again") == ["y0.b", "y1.b", "y2.b"]
    assert [(await states(world.conn, each))["b"] for each in ids] == ["available"] * 3
    assert (await world.client("get_task_instance", name, "y2", "b")).note == "again"
    assert len(await world.runner.claim(3, queues=(name,))) == 3
    stopped = airflow.ClearTaskInstancesBody(dag_run_id="y0", only_failed=False, prevent_running_task=True)
    assert await world.client.status_of("post_clear_task_instances", name, stopped) == 409
    unknown = airflow.ClearTaskInstancesBody(dag_run_id="y0", task_ids=[inner("none")])
    assert await world.client.status_of("post_clear_task_instances", name, unknown) == 404


async def op_get_task_instance_tries(world: World) -> None:
    name = await fresh(world, "tried")
    run_id = await ended(world, name, "w1", {"b": "failed"})
    await world.client.raw("clear_dag_run", name, "w1", airflow.DAGRunClearBody(dry_run=False, only_failed=True))
    await drain(world, name)
    assert await run_state(world.conn, run_id) == "success"
    tries = (await world.client("get_task_instance_tries", name, "w1", "b")).task_instances
    assert [(each.try_number, each.state.value) for each in tries] == [(1, "failed"), (2, "success")]
    assert (await world.client("get_task_instance", name, "w1", "b")).try_number == 2, "the number of the latest one"


async def op_get_task_instance_try_details(world: World) -> None:
    one = await world.client("get_task_instance_try_details", "etl", "r1", "side.load", 1)
    assert (one.try_number, one.state.value) == (1, "failed")
    assert await world.client.status_of("get_task_instance_try_details", "etl", "r1", "side.load", 2) == 404


async def op_get_mapped_task_instance_tries(world: World) -> None:
    tries = (await world.client("get_mapped_task_instance_tries", "other", "o1", "t", 0)).task_instances
    assert [(each.try_number, each.state.value, each.map_index) for each in tries] == [(1, "running", 0)]


async def op_get_mapped_task_instance_try_details(world: World) -> None:
    assert (
        await world.client("get_mapped_task_instance_try_details", "other", "o1", "t", 1, 0)
    ).state.value == "running"
    assert await world.client.status_of("get_mapped_task_instance_try_details", "other", "o1", "t", 1, 1) == 404


async def op_get_task_instance_dependencies(world: World) -> None:
    await world.start(await fresh(world, "held"), "h1")
    (reason,) = (await world.client("get_task_instance_dependencies", "held", "h1", "b")).dependencies
    assert reason.name == "upstream" and "a" in reason.reason
    assert (await world.client("get_task_instance_dependencies", "etl", "r1", "extract")).dependencies == []


async def op_get_task_instance_dependencies_by_map_index(world: World) -> None:
    found = await world.client("get_task_instance_dependencies_by_map_index", "other", "o1", "t", 0)
    assert found.dependencies == []


async def op_get_log(world: World) -> None:
    name = await fresh(world, "logged")
    run_id = await world.start(name, "l1")
    (claim,) = await world.runner.claim(1, queues=(name,))
    key = TaskKey(run_id, claim.idx, claim.map_index)
    chunks = []
    for place in range(250):
        text = f"170000000{place % 10}000000 INFO line {place}\n"
        chunks.append(NewChunk(key=key, epoch=claim.epoch, seq=place, until=place + 1, content=text))
    await logs.append(world.conn, session=world.runner.session, chunks=chunks)
    await world.runner.finish(claim)
    whole = await world.client("get_log", name, "l1", "a", 1, full_content=True)
    assert [line.event for line in whole.content.actual_instance] == [f"line {place}" for place in range(250)]
    first = await world.client("get_log", name, "l1", "a", 1)
    rest = await world.client("get_log", name, "l1", "a", 1, token=first.continuation_token)
    parts = [line.event for page in (first, rest) for line in page.content.actual_instance]
    assert parts == [f"line {place}" for place in range(250)] and rest.continuation_token is None
    assert await world.client.status_of("get_log", name, "l1", "a", 2) == 404


async def op_get_external_log_url(world: World) -> None:
    assert await world.client.status_of("get_external_log_url", "etl", "r1", "extract", 1) == 404


async def op_get_extra_links(world: World) -> None:
    assert (await world.client("get_extra_links", "etl", "r1", "extract")).extra_links == {}


async def asking(world: World, dag: str, key: str, title: str = "Release?") -> int:
    """A run of a DAG of its own whose only task waits for somebody's answer."""
    form = declare_params({"version": Param(type=int, default=1, minimum=1)})
    wait = WaitSpec(kind=WaitKind.APPROVAL, name=title, form=form, timeout_seconds=3600)
    await put(world.conn, make_dag(dag, {f"ask_{dag}": []}, task_kind=TaskKind.WAIT, task_wait=wait))
    return await world.start(dag, key)


async def op_get_hitl_details(world: World) -> None:
    assert (await world.client("get_hitl_details", "etl", "r1")).hitl_details == []
    await asking(world, "hitl_a", "h1", "Release?")
    second = await asking(world, "hitl_b", "h2", "Drop 100%?")
    decision = Decision(is_approved=False, actor=Actor("user:bob"))
    await decide_approval(world.conn, run_id=second, task="ask_hitl_b", decision=decision)
    first = (await world.client("get_hitl_details", "hitl_a", "h1")).hitl_details
    assert [(each.subject, each.options, each.response_received) for each in first] == [
        ("Release?", ["Approve", "Reject"], False)
    ]
    assert first[0].params["version"]["value"] == 1 and first[0].task_instance.task_id == "ask_hitl_a"
    answered = (await world.client("get_hitl_details", "hitl_b", "~")).hitl_details[0]
    assert (answered.chosen_options, answered.responded_by_user.name) == (["Reject"], "bob")
    assert answered.responded_at is not None and answered.task_instance.state == "failed"

    async def asked(**how: Any) -> list[str]:
        found = await world.client("get_hitl_details", "~", "~", **{"dag_id_prefix_pattern": "hitl_", **how})
        assert found.total_entries >= len(found.hitl_details)
        return [each.task_instance.dag_id for each in found.hitl_details]

    both, later = ["hitl_a", "hitl_b"], datetime.now(UTC) + timedelta(days=36500)
    for one, other in (
        ({"dag_id_pattern": "itl_a"}, {"dag_id_pattern": "itl_b"}),
        ({"dag_id_prefix_pattern": "hitl_a"}, {"dag_id_prefix_pattern": "hitl_b"}),
        ({"task_id": "ask_hitl_a"}, {"task_id": "ask_hitl_b"}),
        ({"task_id_pattern": "HITL_A"}, {"task_id_pattern": "hitl_b"}),
        ({"task_id_prefix_pattern": "ask_hitl_a"}, {"task_id_prefix_pattern": "ask_hitl_b"}),
        ({"state": ["deferred"]}, {"state": ["failed"]}),
        ({"response_received": False}, {"response_received": True}),
        ({"subject_search": "release"}, {"subject_search": "100%"}),
        ({"limit": 1}, {"limit": 1, "offset": 1}),
        ({"order_by": ["ti_id"], "limit": 1}, {"order_by": ["-ti_id"], "limit": 1}),
        ({"order_by": ["-subject"], "limit": 1}, {"order_by": ["subject"], "limit": 1}),
        ({"order_by": ["dag_id"], "limit": 1}, {"order_by": ["-dag_id"], "limit": 1}),
        ({"order_by": ["run_id"], "limit": 1}, {"order_by": ["-run_id"], "limit": 1}),
        ({"order_by": ["task_display_name"], "limit": 1}, {"order_by": ["-task_display_name"], "limit": 1}),
        ({"order_by": ["task_instance_state"], "limit": 1}, {"order_by": ["-task_instance_state"], "limit": 1}),
    ):
        assert (await asked(**one), await asked(**other)) == (["hitl_a"], ["hitl_b"]), (one, other)
    for name in ("responded_by_user_id", "responded_by_user_name"):
        assert (await asked(**{name: ["bob"]}), await asked(**{name: ["ann"]})) == (["hitl_b"], [])
    for name in ("responded_at", "responded_by_user_id", "responded_by_user_name"):
        assert await asked(order_by=[name]) == ["hitl_b", "hitl_a"], "what has no value comes last"
    for name in ("created_at", "run_after", "rendered_map_index", "task_instance_operator"):
        assert sorted(await asked(order_by=[name])) == both
    for side, is_in in (("gte", False), ("gt", False), ("lte", True), ("lt", True)):
        assert bool(await asked(**{f"created_at_{side}": later})) is is_in
    assert (await asked(map_index=-1), await asked(map_index=0)) == (both, [])
    assert await asked(body_search="x") == []


async def op_get_hitl_detail(world: World) -> None:
    assert await world.client.status_of("get_hitl_detail", "etl", "r1", "extract", -1) == 404
    await asking(world, "asks_one", "o1")
    found = await world.client("get_hitl_detail", "asks_one", "o1", "ask_asks_one", -1)
    assert (found.subject, found.response_received, found.task_instance.dag_run_id) == ("Release?", False, "o1")


async def op_update_hitl_detail(world: World) -> None:
    run_id = await asking(world, "asks_two", "t1")
    place = ("asks_two", "t1", "ask_asks_two", -1)

    def answer(*chosen: str, **fields: object) -> Any:
        return airflow.UpdateHITLDetailPayload(chosen_options=list(chosen), params_input=fields)

    assert await world.client.status_of("update_hitl_detail", *place, answer("Maybe")) == 400
    assert await world.client.status_of("update_hitl_detail", *place, answer("Approve", version=0)) in (400, 422)
    done = await world.client("update_hitl_detail", *place, answer("Approve", version=3))
    assert (done.chosen_options, done.params_input) == (["Approve"], {"version": 3})
    row = await find_approval(world.conn, run_id=run_id, task="ask_asks_two")
    assert row.is_approved and row.fields == {"version": 3} and row.decided_by == f"user:{done.responded_by.name}"
    assert await world.client.status_of("update_hitl_detail", *place, answer("Reject")) == 409
    assert await world.client.status_of("update_hitl_detail", "etl", "r1", "extract", -1, answer("Reject")) == 404


async def op_get_hitl_detail_try_detail(world: World) -> None:
    run_id = await asking(world, "asks_three", "t1")
    place = ("asks_three", "t1", "ask_asks_three", -1)
    found = await world.client("get_hitl_detail_try_detail", *place, 1)
    assert (found.subject, found.task_instance.try_number, found.response_received) == ("Release?", 1, False)
    assert await world.client.status_of("get_hitl_detail_try_detail", *place, 2) == 404
    decision = Decision(is_approved=False, actor=Actor("user:bob"))
    await decide_approval(world.conn, run_id=run_id, task="ask_asks_three", decision=decision)
    await clear(world.conn, run_id=run_id, chosen=await select_tasks(world.conn, run_id=run_id), actor=Actor("test"))
    first, second = [await world.client("get_hitl_detail_try_detail", *place, number) for number in (1, 2)]
    assert (first.chosen_options, second.chosen_options) == (["Reject"], None)


async def op_set_task_state_store(world: World) -> None:
    """And the five others of a task in one run."""
    client, place = world.client, ("etl", "r1", "extract")
    body, patch = airflow.TaskStateStoreBody, airflow.TaskStateStorePatchBody
    await client("set_task_state_store", "job/1", *place, body(value={"id": 7}))
    assert (await client("get_task_state_store", "job/1", *place)).expires_at is not None, "thirty days by default"
    await client("set_task_state_store", "other", *place, body(value=[1]))
    listed = await client("list_task_state_store", *place)
    assert ([each.key for each in listed.task_state_store], listed.total_entries) == (["job/1", "other"], 2)
    await client("patch_task_state_store", "job/1", *place, patch(value="done"))
    found = await client("get_task_state_store", "job/1", *place)
    assert found.value == "done" and found.expires_at is not None
    assert await client.status_of("patch_task_state_store", "none", *place, patch(value=1)) == 404
    assert await client.status_of("set_task_state_store", "k", "etl", "r1", "nothing", body(value=1)) == 404
    await client("delete_task_state_store", "other", *place)
    assert await client.status_of("get_task_state_store", "other", *place) == 404
    await client("clear_task_state_store", *place, all_map_indices=True)
    assert (await client("list_task_state_store", *place)).task_state_store == []


op_list_task_state_store = op_get_task_state_store = op_patch_task_state_store = op_set_task_state_store
op_delete_task_state_store = op_clear_task_state_store = op_set_task_state_store


async def op_set_asset_state_store(world: World) -> None:
    """And the four others of an asset."""
    client, asset = world.client, (await world.client("get_assets")).assets[0]
    await client("set_asset_state_store", "cursor", asset.id, airflow.AssetStateStoreBody(value=3))
    await client("set_asset_state_store", "other", asset.id, airflow.AssetStateStoreBody(value="x"))
    found = await client("get_asset_state_store", "cursor", asset.id)
    assert (found.value, found.last_updated_by.kind) == (3, "api")
    await client("delete_asset_state_store", "other", asset.id)
    listed = await client("list_asset_state_store", asset.id)
    assert ([each.key for each in listed.asset_state_store], listed.total_entries) == (["cursor"], 1)
    await client("clear_asset_state_store", asset.id)
    assert (await client("list_asset_state_store", asset.id)).asset_state_store == []
    assert await client.status_of("list_asset_state_store", 1) == 404


op_list_asset_state_store = op_get_asset_state_store = op_set_asset_state_store
op_delete_asset_state_store = op_clear_asset_state_store = op_set_asset_state_store


# XComs --------------------------------------------------------------------------------------------------------------


async def op_get_xcom_entry(world: World) -> None:
    entry = await world.client("get_xcom_entry", "etl", "extract", "r1", "return_value")
    assert entry.actual_instance.value == {"n": 3}
    text = await world.client.raw("get_xcom_entry", "etl", "extract", "r1", "return_value", stringify=True)
    assert json.loads(json.loads(text.data)["value"]) == {"n": 3}
    assert await world.client.status_of("get_xcom_entry", "etl", "side.load", "r1", "return_value") == 404


async def op_create_xcom_entry(world: World) -> None:
    name = await fresh(world, "putting")
    run_id = await ended(world, name, "u1")
    body = airflow.XComCreateBody(key="size", value={"n": 1})
    made = await world.client("create_xcom_entry", name, "a", "u1", body)
    assert made.value == {"n": 1}
    assert await value(world.conn, "select value->'named' from result where run_id = %s", run_id) == {"size": {"n": 1}}
    assert await world.client.status_of("create_xcom_entry", name, "a", "u1", body) == 409
    await world.start(name, "u2")
    assert await world.client.status_of("create_xcom_entry", name, "a", "u2", body) == 409, "it has not succeeded yet"


async def op_update_xcom_entry(world: World) -> None:
    name = await fresh(world, "changing")
    run_id = await ended(world, name, "v1")
    await world.client("create_xcom_entry", name, "a", "v1", airflow.XComCreateBody(key="return_value", value=1))
    done = await world.client("update_xcom_entry", name, "a", "v1", "return_value", airflow.XComUpdateBody(value=[2]))
    assert done.value == [2]
    assert await value(world.conn, "select value from result where run_id = %s", run_id) == [2]
    missing = ("update_xcom_entry", name, "a", "v1", "none", airflow.XComUpdateBody(value=1))
    assert await world.client.status_of(*missing) == 404


async def op_delete_xcom_entry(world: World) -> None:
    name = await fresh(world, "dropping")
    run_id = await ended(world, name, "z1")
    await world.client("create_xcom_entry", name, "a", "z1", airflow.XComCreateBody(key="size", value=1))
    await world.client("delete_xcom_entry", name, "a", "z1", "size")
    assert await value(world.conn, "select count(*) from result where run_id = %s", run_id) == 0
    assert await world.client.status_of("delete_xcom_entry", name, "a", "z1", "size") == 404


# Pools, variables, connections --------------------------------------------------------------------------------------


async def op_post_pool(world: World) -> None:
    made = await world.client("post_pool", airflow.PoolBody(name="p1", slots=4, description="for p"))
    assert (made.name, made.slots, made.open_slots, made.description) == ("p1", 4, 4, "for p")
    assert await value(world.conn, "select capacity from gate where kind = 'pool' and name = 'p1'") == 4
    assert await world.client.status_of("post_pool", airflow.PoolBody(name="p1", slots=1)) == 409
    assert (await world.client("post_pool", airflow.PoolBody(name="p2", slots=-1))).slots == -1
    assert await world.client.status_of("post_pool", airflow.PoolBody(name="p3", slots=1, include_deferred=True)) == 400


async def op_get_pool(world: World) -> None:
    pool = await world.client("get_pool", "db")
    assert (pool.slots, pool.occupied_slots, pool.open_slots) == (3, 0, 3)
    assert await world.client.status_of("get_pool", "none") == 404


async def op_patch_pool(world: World) -> None:
    await world.client("post_pool", airflow.PoolBody(name="q1", slots=1, description="old"))
    patch = airflow.PoolPatchBody(pool="q1", slots=5, include_deferred=False, description="new")
    changed = await world.client("patch_pool", "q1", patch, update_mask=["slots"])
    assert (changed.slots, changed.description) == (5, "old")
    assert (await world.client("patch_pool", "q1", patch)).description == "new"
    other = airflow.PoolPatchBody(pool="q2", slots=6, include_deferred=True)
    assert (await world.client("patch_pool", "q1", other, update_mask=["slots"])).slots == 6
    for named in (["pool"], ["include_deferred"], None):
        assert await world.client.status_of("patch_pool", "q1", other, update_mask=named) == 400


async def op_delete_pool(world: World) -> None:
    await world.client("post_pool", airflow.PoolBody(name="d1", slots=1))
    await world.client("delete_pool", "d1")
    assert await world.client.status_of("get_pool", "d1") == 404
    assert await world.client.status_of("delete_pool", "db") == 409, "a DAG needs it"


async def op_bulk_pools(world: World) -> None:
    body = airflow.BulkBodyPoolBody.from_dict(
        {
            "actions": [
                {"action": "create", "entities": [{"name": "b1", "slots": 1}, {"name": "db", "slots": 1}]},
                {"action": "create", "action_on_existence": "skip", "entities": [{"name": "db", "slots": 1}]},
                {"action": "update", "entities": [{"name": "b1", "slots": 9}]},
            ]
        }
    )
    done = await world.client("bulk_pools", body)
    assert done.create.success == ["b1"] and [error["status_code"] for error in done.create.errors] == [409]
    assert done.update.success == ["b1"] and (await world.client("get_pool", "b1")).slots == 9


async def op_post_variable(world: World) -> None:
    made = await world.client("post_variable", airflow.VariableBody(key="v1", value={"a": 1}, description="d"))
    assert (made.key, made.value, made.description, made.is_encrypted) == ("v1", '{"a": 1}', "d", True)
    stored = await value(world.conn, "select content from stored_value where name = 'v1'")
    assert isinstance(stored, str) and '"a"' not in stored, "sealed"
    assert await world.client.status_of("post_variable", airflow.VariableBody(key="v1", value="x")) == 409
    assert await world.client.status_of("post_variable", airflow.VariableBody(key="no spaces", value="x")) == 400


async def op_get_variable(world: World) -> None:
    await world.client("post_variable", airflow.VariableBody(key="shown", value="plain"))
    assert (await world.client("get_variable", "shown")).value == "plain"
    for key, content in (("db_password", "canary-1"), ("nested", {"api_key": "canary-2", "n": 1})):
        await world.client("post_variable", airflow.VariableBody(key=key, value=content))
        answer = await world.client.raw("get_variable", key)
        assert "canary" not in answer.data.decode() and "***" in answer.data.decode()
    assert await world.client.status_of("get_variable", "none") == 404


async def op_patch_variable(world: World) -> None:
    await world.client("post_variable", airflow.VariableBody(key="w1", value="old", description="d"))
    body = airflow.VariableBody(key="w1", value="new", description="e")
    only = await world.client("patch_variable", "w1", body, update_mask=["value"])
    assert (only.value, only.description) == ("new", "d")
    kept = await world.client("patch_variable", "w1", airflow.VariableBody(key="w1", value="***"))
    assert kept.value == "new", "what was shown hidden is no new value"
    assert await world.client.status_of("patch_variable", "w2", airflow.VariableBody(key="w2", value="x")) == 404
    assert await world.client.status_of("patch_variable", "w1", airflow.VariableBody(key="w2", value="x")) == 400


async def op_delete_variable(world: World) -> None:
    await world.client("post_variable", airflow.VariableBody(key="x1", value="v"))
    await world.client("delete_variable", "x1")
    assert await value(world.conn, "select count(*) from stored_value where name = 'x1'") == 0
    assert await world.client.status_of("delete_variable", "x1") == 404


async def op_bulk_variables(world: World) -> None:
    body = airflow.BulkBodyVariableBody.from_dict(
        {
            "actions": [
                {"action": "create", "entities": [{"key": "y1", "value": "1"}, {"key": "y2", "value": "2"}]},
                {"action": "create", "action_on_existence": "overwrite", "entities": [{"key": "y1", "value": "3"}]},
                {"action": "delete", "action_on_non_existence": "skip", "entities": ["y2", "none"]},
            ]
        }
    )
    done = await world.client("bulk_variables", body)
    assert done.create.success == ["y1", "y2", "y1"] and done.delete.success == ["y2"] and done.delete.errors == []
    assert (await world.client("get_variable", "y1")).value == "3"


CONNECTION: dict[str, Any] = {"conn_type": "google_cloud", "host": "h", "login": "anna", "port": 5432}


async def op_post_connection(world: World) -> None:
    extra = json.dumps({"sslmode": "require", "api_key": "canary-4", "n": 1})
    body = airflow.ConnectionBody(connection_id="c1", password="canary-3", var_schema="shop", extra=extra, **CONNECTION)
    made = await world.client("post_connection", body)
    assert (made.conn_type, made.host, made.port, made.login, made.var_schema) == (
        "google_cloud",
        "h",
        5432,
        "anna",
        "shop",
    )
    answer = await world.client.raw("get_connection", "c1")
    assert "canary" not in answer.data.decode()
    assert made.password == "***" and json.loads(made.extra) == {"sslmode": "require", "api_key": "***", "n": 1}
    assert await world.client.status_of("post_connection", body) == 409
    broken = airflow.ConnectionBody(connection_id="c9", conn_type="x", extra="[1]")
    assert await world.client.status_of("post_connection", broken) == 400


async def op_get_connection(world: World) -> None:
    await world.client("post_connection", airflow.ConnectionBody(connection_id="c2", description="d", **CONNECTION))
    found = await world.client("get_connection", "c2")
    assert (found.password, found.extra, found.description) == (None, None, "d")
    assert await world.client.status_of("get_connection", "none") == 404


async def op_patch_connection(world: World) -> None:
    await world.client("post_connection", airflow.ConnectionBody(connection_id="c3", password="secret-3", **CONNECTION))
    body = airflow.ConnectionBody(connection_id="c3", conn_type="http", host="other", password="***")
    changed = await world.client("patch_connection", "c3", body, update_mask=["host"])
    assert (changed.host, changed.conn_type, changed.port) == ("other", "google_cloud", 5432)
    whole = await world.client("patch_connection", "c3", body)
    assert (whole.conn_type, whole.port, whole.password) == ("http", None, "***"), "the password stays"
    assert await world.client.status_of("patch_connection", "none", body) == 400


async def op_delete_connection(world: World) -> None:
    await world.client("post_connection", airflow.ConnectionBody(connection_id="c4", **CONNECTION))
    await world.client("delete_connection", "c4")
    assert await world.client.status_of("get_connection", "c4") == 404


async def op_bulk_connections(world: World) -> None:
    body = airflow.BulkBodyConnectionBody.from_dict(
        {
            "actions": [
                {"action": "create", "entities": [{"connection_id": "c5", "conn_type": "a"}]},
                {"action": "update", "entities": [{"connection_id": "c5", "conn_type": "b"}]},
                {"action": "delete", "entities": ["none"]},
            ]
        }
    )
    done = await world.client("bulk_connections", body)
    assert done.create.success == ["c5"] and done.update.success == ["c5"] and len(done.delete.errors) == 1
    assert (await world.client("get_connection", "c5")).conn_type == "b"


async def op_test_connection(world: World) -> None:
    assert not (
        await world.client("test_connection", airflow.ConnectionBody(connection_id="x", conn_type="http"))
    ).status


async def op_create_default_connections(world: World) -> None:
    await world.client("create_default_connections")


async def op_clear_dag_run_partitions(world: World) -> None:
    """A run for a partition is triggered, read, found, cleared and repeated by its key and date."""
    days = replace(make_dag("by_day", {"a": []}, task_queue="by_day"), schedules=(DAYS,))
    await put(world.conn, days)
    assert (await world.client("get_dag", "by_day")).timetable_partitioned
    body = airflow.TriggerDAGRunPostBody(logical_date=None, dag_run_id="first", partition_key="2026-01-31")
    made = await world.client("trigger_dag_run", "by_day", body)
    assert (made.partition_key, f"{made.partition_date:%m-%d}") == ("2026-01-31", "01-31")
    wrong = airflow.TriggerDAGRunPostBody(logical_date=None, partition_key="someday")
    assert await world.client.status_of("trigger_dag_run", "by_day", wrong) == 400
    await drain(world, "by_day")
    at = datetime(2026, 1, 31, tzinfo=UTC)
    for asked in (
        {"partition_key_pattern": "01-31"},
        {"partition_key_prefix_pattern": "2026-01"},
        {"partition_date_gte": at, "partition_date_lte": at},
    ):
        assert [run.dag_run_id for run in (await world.client("get_dag_runs", "by_day", **asked)).dag_runs] == ["first"]
    assert (await world.client("get_dag_runs", "by_day", partition_key_pattern="02-01")).dag_runs == []
    again = airflow.BulkDAGRunClearBody(partition_key="2026-01-31", dry_run=False)
    assert (await world.client("clear_dag_runs", "by_day", again)).actual_instance.total_entries == 1
    await drain(world, "by_day")
    range_ = {"from_date": at - timedelta(days=2), "to_date": at, "max_active_runs": 9}
    plan = await world.client("create_backfill_dry_run", airflow.BackfillPostBody(dag_id="by_day", **range_))
    assert [each.partition_key for each in plan.backfills] == ["2026-01-29", "2026-01-30", "2026-01-31"]
    by_date = airflow.ClearPartitionsBody(partition_date_start=at, clear_task_instances=True)
    told = await world.client("clear_dag_run_partitions", "by_day", by_date)
    assert (told.dag_runs_cleared, told.task_instances_cleared, told.dry_run) == (1, 1, True)
    by_key = airflow.ClearPartitionsBody(partition_key="2026-01-31", dry_run=False)
    assert (await world.client("clear_dag_run_partitions", "by_day", by_key)).dag_runs_cleared == 1
    assert (await world.client("get_dag_run", "by_day", "first")).partition_key is None
    by_id = airflow.ClearPartitionsBody(run_id="first", dry_run=False)
    assert (await world.client("clear_dag_run_partitions", "by_day", by_id)).dag_runs_cleared == 0
    assert await world.client.status_of("clear_dag_run_partitions", "by_day", airflow.ClearPartitionsBody()) == 400


DAYS = NamedSchedule(
    name="main",
    spec=parse_schedule({"kind": "cron", "expression": "0 3 * * *", "partitions": daily(offset=-1).to_text()}),
)


# Assets, backfills, events, and the rest ----------------------------------------------------------------------------


async def orders(world: World) -> int:
    (asset,) = (await world.client("get_assets", name_pattern="orders")).assets
    return int(asset.id)


async def op_get_asset(world: World) -> None:
    asset = await world.client("get_asset", await orders(world))
    assert [(task.dag_id, task.task_id) for task in asset.producing_tasks] == [("etl", "extract")]
    assert [dag.dag_id for dag in asset.scheduled_dags] == ["taker"]
    assert await world.client.status_of("get_asset", 1) == 404


async def op_materialize_asset(world: World) -> None:
    run = await world.client("materialize_asset", await orders(world), airflow.MaterializeAssetBody(dag_run_id="made"))
    assert (run.dag_id, run.dag_run_id) == ("etl", "made")
    await world.client("patch_dag_run", "etl", "made", airflow.DAGRunPatchBody(state="failed"))
    await world.client("delete_dag_run", "etl", "made")
    rates = (await world.client("get_assets", name_pattern="rates")).assets[0].id
    assert await world.client.status_of("materialize_asset", rates) == 409, "nothing updates it"


async def op_get_asset_aliases(world: World) -> None:
    assert (await world.client("get_asset_aliases")).asset_aliases == []


async def op_create_asset_event(world: World) -> None:
    """It is on record, and starts what waits for it alone: the run names it, and it names the run."""
    spec = waiting("after_prices", after(Asset("prices")))
    await put(world.conn, spec)
    asset = next(each.id for each in (await world.client("get_assets")).assets if each.name == "prices")
    body = airflow.CreateAssetEventsBody(asset_id=asset, extra={"rows": 7})
    made = await world.client("create_asset_event", body)
    assert (made.asset_id, made.name, made.uri, made.group) == (asset, "prices", "prices", "asset")
    assert made.extra == {"rows": 7, "from_rest_api": True} and made.created_dagruns == []
    assert (made.source_dag_id, made.source_task_id, made.source_run_id, made.source_map_index) == (
        None,
        None,
        None,
        -1,
    )
    query = "select extra || jsonb_build_object('by', updated_by) from asset_update where asset = 'prices'"
    assert await value(world.conn, query) == {"rows": 7, "from_rest_api": True, "by": "user:root"}
    await fire_only(world, "after_prices")
    (run,) = (await world.client("get_dag_runs", "after_prices")).dag_runs
    (listed,) = (await world.client("get_asset_events", asset_id=asset)).asset_events
    assert (listed.id, listed.timestamp, listed.extra) == (made.id, made.timestamp, made.extra)
    assert [(each.dag_id, each.run_id) for each in listed.created_dagruns] == [("after_prices", run.dag_run_id)]
    (before,) = (await world.client("get_upstream_asset_events", "after_prices", run.dag_run_id)).asset_events
    assert (before.id, before.extra, before.source_run_id) == (made.id, made.extra, None)
    again = await world.client("create_asset_event", airflow.CreateAssetEventsBody(asset_id=asset))
    assert again.id != made.id and again.extra == {"from_rest_api": True}
    down = (await world.client("get_asset_events", asset_id=asset, order_by=["-timestamp"])).asset_events
    assert {each.id for each in down} == {made.id, again.id}
    for wrong, status in (
        ({"asset_id": 1}, 404),
        ({"asset_id": asset, "partition_key": "a\tb"}, 400),
        ({"asset_id": asset, "access_control": airflow.AssetEventAccessControl(consumer_teams=["a"])}, 400),
        ({"asset_id": asset, "extra": {"x": "y" * 70_000}}, 400),
        ({"asset_id": asset, "unknown": 1}, 422),
    ):
        assert await world.client.status_of("create_asset_event", wrong_event(wrong)) == status, status
    assert await value(world.conn, "select count(*) from asset_update where run_id is null") == 2, (
        "what is refused is not on record"
    )


async def fire_only(world: World, dag: str) -> None:
    """What has arrived is heard of, and this DAG fires. Others, and who leads, are as before."""
    others = (
        "update schedule_state s set is_paused = %s from schedule c join dag d using (dag_id)"
        " where c.schedule_id = s.schedule_id and not d.is_paused and d.name <> %s"
    )
    await world.conn.execute(others, [True, dag])
    epoch = await lead(world.conn)
    await hear_arrivals(world.conn, shard=0, epoch=epoch, limit=100)
    await fire_schedules(world.conn, shard=0, epoch=epoch, batch=100)
    await world.conn.execute("update shard set lease_until = null")
    await world.conn.execute(others, [False, dag])


def wrong_event(fields: dict[str, Any]) -> Any:
    return airflow.CreateAssetEventsBody(
        **{name: value for name, value in fields.items() if name != "unknown"},
        additional_properties={name: value for name, value in fields.items() if name == "unknown"},
    )


async def hear(world: World) -> None:
    """The schedule of `taker` has heard of one of the two that it waits for."""
    await world.conn.execute(
        "insert into dependency_state (schedule_id, kind, name, run_id, occurred_at)"
        " select schedule_id, kind, name, 1, clock() from schedule_dependency where name = 'orders' on conflict do nothing"
    )


async def op_get_asset_queued_events(world: World) -> None:
    await hear(world)
    (event,) = (await world.client("get_asset_queued_events", await orders(world))).queued_events
    assert event.dag_id == "taker"
    before = {"before": "2001-01-01T00:00:00Z"}
    assert await world.client.status_of("get_asset_queued_events", 1, **before) == 404


async def op_get_dag_asset_queued_events(world: World) -> None:
    await hear(world)
    assert (await world.client("get_dag_asset_queued_events", "taker")).total_entries == 1
    assert (await world.client("get_dag_asset_queued_events", "etl")).total_entries == 0


async def op_get_dag_asset_queued_event(world: World) -> None:
    await hear(world)
    event = await world.client("get_dag_asset_queued_event", "taker", await orders(world))
    assert (event.dag_id, event.asset_id) == ("taker", await orders(world))
    assert await world.client.status_of("get_dag_asset_queued_event", "etl", await orders(world)) == 404


async def heard(world: World) -> object:
    return await value(world.conn, "select count(*) from dependency_state")


async def op_delete_asset_queued_events(world: World) -> None:
    await hear(world)
    early = {"before": "2001-01-01T00:00:00Z"}
    assert await world.client.status_of("delete_asset_queued_events", await orders(world), **early) == 404
    await world.client("delete_asset_queued_events", await orders(world))
    assert await heard(world) == 0
    assert await value(world.conn, "select max(actor) from audit_log where action = 'unhear'") == "user:root"


async def op_delete_dag_asset_queued_events(world: World) -> None:
    await hear(world)
    assert await world.client.status_of("delete_dag_asset_queued_events", "etl") == 404, "it has heard of nothing"
    assert await heard(world) == 1
    await world.client("delete_dag_asset_queued_events", "taker")
    assert await heard(world) == 0


async def op_delete_dag_asset_queued_event(world: World) -> None:
    await hear(world)
    rates = (await world.client("get_assets", name_pattern="rates")).assets[0].id
    assert await world.client.status_of("delete_dag_asset_queued_event", "taker", rates) == 404
    await world.client("delete_dag_asset_queued_event", "taker", await orders(world))
    assert await heard(world) == 0


def stretch(dag: str) -> Any:
    last = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    return airflow.BackfillPostBody(dag_id=dag, from_date=last - timedelta(hours=3), to_date=last, max_active_runs=2)


async def backfilled(world: World, name: str) -> Any:
    await put(world.conn, make_dag(name, {"a": []}, every="0 * * * *"))
    return await world.client("create_backfill", stretch(name))


async def op_create_backfill(world: World) -> None:
    made = await backfilled(world, "filled")
    assert (made.dag_id, made.max_active_runs, made.is_paused, made.reprocess_behavior.value) == (
        "filled",
        2,
        False,
        "none",
    )
    assert await value(world.conn, "select total from backfill where backfill_id = %s", made.id) == 4
    assert await world.client.status_of("create_backfill", stretch("none")) == 404
    swapped = stretch("filled")
    swapped.from_date, swapped.to_date = swapped.to_date, swapped.from_date
    # While one goes on there is no other, and that is said first.
    for wanted in (stretch("filled"), swapped):
        answer = await world.client.raw("create_backfill", wanted)
        assert answer.status == 409 and "another running backfill" in json.loads(answer.data)["detail"]
    await world.client("cancel_backfill", made.id)
    for operation in ("create_backfill", "create_backfill_dry_run"):
        answer = await world.client.raw(operation, swapped)
        assert answer.status == 422 and "swap them" in json.loads(answer.data)["detail"]
    assert (await world.client("create_backfill", stretch("filled"))).id > made.id


async def op_create_backfill_dry_run(world: World) -> None:
    await put(world.conn, make_dag("unfilled", {"a": []}, every="0 * * * *"))
    foreseen = await world.client("create_backfill_dry_run", stretch("unfilled"))
    assert foreseen.total_entries == len(foreseen.backfills) == 4
    assert (await world.client("list_backfills", "unfilled")).backfills == []


async def op_list_backfills(world: World) -> None:
    first = await backfilled(world, "filled_2")
    assert [each.id for each in (await world.client("list_backfills", "filled_2")).backfills] == [first.id]
    await world.client("cancel_backfill", first.id)
    second = await world.client("create_backfill", stretch("filled_2"))
    for order, expected in (("id", [first.id, second.id]), ("-id", [second.id, first.id])):
        found = await world.client("list_backfills", "filled_2", order_by=[order])
        assert [each.id for each in found.backfills] == expected
    page = await world.client("list_backfills", "filled_2", limit=1, offset=1)
    assert ([each.id for each in page.backfills], page.total_entries) == ([second.id], 2)


async def op_get_backfill(world: World) -> None:
    made = await backfilled(world, "filled_3")
    assert (await world.client("get_backfill", made.id)).from_date == made.from_date
    assert await world.client.status_of("get_backfill", made.id + 1000) == 404


async def op_pause_backfill(world: World) -> None:
    made = await backfilled(world, "filled_4")
    assert (await world.client("pause_backfill", made.id)).is_paused
    assert await value(world.conn, "select state from backfill where backfill_id = %s", made.id) == "paused"


async def op_unpause_backfill(world: World) -> None:
    made = await backfilled(world, "filled_5")
    await world.client("pause_backfill", made.id)
    assert not (await world.client("unpause_backfill", made.id)).is_paused


async def op_cancel_backfill(world: World) -> None:
    made = await backfilled(world, "filled_6")
    assert (await world.client("cancel_backfill", made.id)).completed_at is not None


async def op_get_event_log(world: World) -> None:
    name = await fresh(world, "noted")
    await world.start(name, "e1")
    await world.client("patch_dag_run", name, "e1", airflow.DAGRunPatchBody(note="hello"))
    (listed,) = (await world.client("get_event_logs", event="patch_dag_run", run_id="e1")).event_logs
    one = await world.client("get_event_log", listed.event_log_id)
    assert (one.event, one.owner, one.dag_id, one.run_id) == ("patch_dag_run", "root", name, "e1")
    assert await world.client.status_of("get_event_log", 10**9) == 404


async def op_get_health(world: World) -> None:
    health = await world.client("get_health")
    assert (health.metadatabase.status, health.scheduler.status) == ("healthy", "unhealthy")


async def op_get_version(world: World) -> None:
    assert (await world.client("get_version")).version.startswith("3.")


async def op_get_jobs(world: World) -> None:
    assert (await world.client("get_jobs")).jobs == []


async def op_get_plugins(world: World) -> None:
    assert (await world.client("get_plugins")).plugins == []


async def op_import_errors(world: World) -> None:
    assert (await world.client("import_errors")).import_errors == []


async def op_get_providers(world: World) -> None:
    assert (await world.client("get_providers")).providers == []


async def op_get_config(world: World) -> None:
    assert (await world.client("get_config")).sections == []


async def op_get_config_value(world: World) -> None:
    assert await world.client.status_of("get_config_value", "core", "executor") == 404


@pytest.mark.parametrize("operation", sorted(scenarios()))
async def test_an_operation_does_what_it_says(world: World, operation: str, tmp_path: Path) -> None:
    scenario = scenarios()[operation]
    await (scenario(world, tmp_path) if "tmp_path" in signature(scenario).parameters else scenario(world))


@pytest.mark.parametrize("operation", sorted(ABSENT))
async def test_what_is_absent_is_not_found(world: World, operation: str) -> None:
    (known,) = [each for each in operations() if each.name == operation]
    path = known.path.replace("{dag_id}", "etl").replace("{dag_run_id}", "r1").replace("{task_id}", "extract")
    for name in ("{map_index}", "{try_number}", "{asset_id}", "{asset_alias_id}"):
        path = path.replace(name, "1")
    answer = await world.client.request(known.method, path.replace("{key}", "k").replace("{file_token}", "t"))
    assert answer in (404, 405, 422), operation
