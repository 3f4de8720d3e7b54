"""What `airflow_probe.py` finds on a real Airflow, each in a world of known times: one test for each difference that there was."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import airflow_client.client as airflow
import httpx
import pytest
import pytest_asyncio

from evertick.api.airflow.values import MOST_DEPTH
from evertick.domain.access import Actor
from evertick.domain.dags.params import MAX_PARAMS, Param, declare_params
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.schedules.dependencies import Asset, after, finished
from evertick.domain.schedules.spec import parse_schedule
from evertick.domain.stored_values import read_connection
from evertick.engine.backfills import advance
from evertick.engine.dags import pause
from evertick.operations.paging import encode_cursor
from tests.api.airflow_world import World, people, served
from tests.api.test_airflow_operations import CONNECTION, ended, fresh
from tests.databases import Cluster
from tests.engine.test_after import waiting
from tests.engine.test_mapping import THREE
from tests.engine.world import T0, lead, make_dag, put, set_clock, value

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANY_CONF = {"n": 5, "any": {"thing": [1, None]}, "With spaces & more": "x"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(cluster: Cluster, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    name = cluster.create(template)
    async with served(cluster.database_url(name), tmp_path_factory.mktemp("keys") / "secret.key") as made:
        await people(made)
        yield made
    cluster.drop(name)


async def plain(world: World, method: str, path: str, **options: Any) -> httpx.Response:
    """A request without the client, with its token."""
    configuration = world.client.client.configuration
    headers = {"Authorization": f"Bearer {configuration.access_token}", **options.pop("headers", {})}
    async with httpx.AsyncClient(base_url=configuration.host, headers=headers, timeout=60) as client:
        return await client.request(method, path, **options)


# Conf ---------------------------------------------------------------------------------------------------------------


async def test_a_conf_may_have_keys_that_the_dag_does_not_declare_and_its_tasks_receive_them(world: World) -> None:
    name = await fresh(world, "open_conf")
    body = airflow.TriggerDAGRunPostBody(dag_run_id="open", logical_date=None, conf=ANY_CONF)
    assert (await world.client("trigger_dag_run", name, body)).conf == ANY_CONF
    assert (await world.client("get_dag_run", name, "open")).conf == ANY_CONF
    (claim,) = await world.runner.claim(1, queues=(name,))
    assert json.loads(claim.params) == ANY_CONF
    await world.runner.finish(claim)


async def test_the_native_api_refuses_unknown_params(world: World) -> None:
    name = await fresh(world, "closed_params")
    answer = await plain(world, "POST", f"/api/v1/dags/{name}/runs", json={"params": {"n": 1}})
    assert answer.status_code in (400, 422) and "unknown param 'n'" in answer.text


async def test_declared_params_of_a_conf_are_checked_and_have_their_defaults(world: World) -> None:
    name = await fresh(world, "typed", params=declare_params({"rows": Param(1, minimum=1)}))
    for rows in ("many", 0):
        wrong = airflow.TriggerDAGRunPostBody(logical_date=None, conf={"rows": rows, "other": 1})
        assert await world.client.status_of("trigger_dag_run", name, wrong) == 400
    right = airflow.TriggerDAGRunPostBody(logical_date=None, conf={"other": 1})
    assert (await world.client("trigger_dag_run", name, right)).conf == {"rows": 1, "other": 1}


@pytest.mark.parametrize(
    "conf",
    [
        {"nul": "a\0b"},
        {"nul\0": 1},
        {"x" * 300: 1},
        {f"k{place}": 1 for place in range(MAX_PARAMS + 1)},
        {"large": "x" * 300_000},
    ],
    ids=["nul", "nul in a name", "long name", "many", "large"],
)
async def test_a_conf_that_cannot_be_stored_is_refused(world: World, conf: dict[str, Any]) -> None:
    name = await fresh(world, "refusing")
    path = f"/api/v2/dags/{name}/dagRuns"
    answer = await plain(world, "POST", path, json={"logical_date": None, "conf": conf})
    assert answer.status_code == 400, answer.text
    assert (await world.client("get_dag_runs", name)).total_entries == 0


async def test_materializing_an_asset_and_a_backfill_take_any_conf(world: World) -> None:
    asset = next(each.id for each in (await world.client("get_assets")).assets if each.name == "orders")
    body = airflow.MaterializeAssetBody(dag_run_id="any", conf=ANY_CONF)
    assert (await world.client("materialize_asset", asset, body)).conf == {"rows": 1, **ANY_CONF}
    await world.client("patch_dag_run", "etl", "any", airflow.DAGRunPatchBody(state="failed"))
    await put(world.conn, make_dag("open_backfill", {"a": []}, every="0 * * * *"))
    made = await world.client("create_backfill", stretch("open_backfill", dag_run_conf=ANY_CONF))
    assert made.dag_run_conf == ANY_CONF
    await world.client("cancel_backfill", made.id)


# DAGs and their schedules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "summary", "is_periodic"),
    [
        ("0 0 * * *", "0 0 * * *", True),
        ("@daily", "0 0 * * *", True),
        ("@every 90m", "1:30:00", True),
        ("@once 2031-01-01T09:00:00Z", "@once", False),
        (None, None, False),
    ],
)
async def test_a_schedule_is_written_as_airflow_writes_it(
    world: World, every: str | None, summary: str | None, is_periodic: bool
) -> None:
    await put(world.conn, make_dag("timed", {"a": []}, **({"every": every} if every else {})))
    dag = await world.client("get_dag", "timed")
    assert (dag.timetable_summary, dag.timetable_periodic, dag.is_backfillable) == (summary, is_periodic, is_periodic)
    assert dag.timetable_description


async def test_a_dag_after_assets_says_so(world: World) -> None:
    await put(world.conn, waiting("after_asset", after(Asset("never_made"))))
    await put(world.conn, waiting("after_dag", after(finished("etl"))))
    asset, dag = [await world.client("get_dag", name) for name in ("after_asset", "after_dag")]
    assert (asset.timetable_summary, asset.timetable_periodic, asset.is_backfillable) == ("Asset", False, False)
    assert "etl" in dag.timetable_summary


async def test_the_start_date_is_that_of_the_schedule(world: World) -> None:
    begins = datetime(2024, 1, 1, tzinfo=UTC)
    schedule = NamedSchedule(name="main", spec=parse_schedule("0 0 * * *", start_at=begins))
    await put(world.conn, make_dag("begun", {"a": []}, schedules=(schedule,)))
    assert (await world.client("get_dag_details", "begun")).start_date == begins
    assert (await world.client("get_dag_details", "other")).start_date is None


# Runs ---------------------------------------------------------------------------------------------------------------


async def test_the_client_reads_what_waiting_for_a_run_answers(world: World) -> None:
    over = await world.client("wait_dag_run_until_finished", "etl", "r2", interval=0.2, result=["extract"])
    assert over == {"state": "success", "results": {"extract": 4}}
    answer = await plain(world, "GET", "/api/v2/dags/etl/dagRuns/r2/wait?interval=1")
    assert "content-type" not in answer.headers, "two lines are no JSON, and the client knows no other type"


async def test_runs_of_the_same_time_are_paged_by_cursor_without_gaps(world: World) -> None:
    name = await fresh(world, "crowded")
    keys = [f"c{place}" for place in range(7)]
    for place, key in enumerate(keys):
        await set_clock(world.conn, T0 + timedelta(hours=10 + place // 3))
        await world.start(name, key)

    async def page(cursor: str, order: str, limit: int = 2) -> tuple[list[str], str | None]:
        answer = await world.client("get_dag_runs", name, cursor=cursor, order_by=[order], limit=limit)
        return [run.dag_run_id for run in answer.dag_runs], answer.next_cursor

    for order, expected in (("run_after", keys), ("-run_after", ["c6", "c3", "c4", "c5", "c0", "c1", "c2"])):
        for limit in (1, 2, 3, 7):
            found, cursor = await page("", order, limit)
            while cursor is not None:
                part, cursor = await page(cursor, order, limit)
                found += part
            assert found == expected, (order, limit)
    first, cursor = await page("", "run_after", 6)
    assert cursor is not None
    await world.start(name, "late")
    assert (first, await page(cursor, "run_after", 6)) == (keys[:6], (["c6", "late"], None))
    await world.clock(12)


@pytest.mark.parametrize(
    "cursor",
    [
        "nonsense",
        encode_cursor("x", 0),
        encode_cursor("9999-12-31T23:59:59-23:00", 0),
        encode_cursor(1),
        encode_cursor("", 1),
    ],
)
async def test_a_cursor_of_another_list_is_refused(world: World, cursor: str) -> None:
    assert await world.client.status_of("get_dag_runs", "~", cursor=cursor, order_by=["run_after"]) == 400


async def test_a_cursor_stays_within_the_filter(world: World) -> None:
    early = encode_cursor((T0 - timedelta(days=400)).isoformat(), 0)
    options = {"order_by": ["run_after"], "run_after_gte": T0}
    assert await world.client.status_of("get_dag_runs", "~", cursor=early, **options) == 400
    inside = encode_cursor((T0 + timedelta(minutes=1)).isoformat(), 10**17)
    assert (await world.client("get_dag_runs", "~", cursor=inside, **options)).dag_runs == []


async def test_a_missing_instance_is_named_with_its_map_index(world: World) -> None:
    await put(world.conn, make_dag("few", {"t": []}, task_queue="few", per_task={"t": {"mapping": THREE}}))
    await world.start("few", "f1")
    answer = await world.client.raw("get_mapped_task_instance", "few", "f1", "t", 77)
    assert answer.status == 404 and "map_index: `77`" in json.loads(answer.data)["detail"]
    patch = airflow.PatchTaskInstanceBody(new_state="failed")
    answer = await world.client.raw("patch_task_instance_by_map_index", "few", "f1", "t", 78, patch)
    assert answer.status == 404 and "map_index: `78`" in json.loads(answer.data)["detail"]


async def test_a_task_instance_says_as_whom_it_runs(world: World) -> None:
    assert (await world.client("get_task_instance", "etl", "r1", "extract")).unixname


# Connections --------------------------------------------------------------------------------------------------------

EXTRA = {
    "a": "shown",
    "api_key": "canary-1",
    "nested": {"token": "canary-2", "list": [{"password": "canary-3"}]},
    "n": 5,
}
SHOWN = {"a": "shown", "api_key": "***", "nested": {"token": "***", "list": [{"password": "***"}]}, "n": 5}


async def test_extra_values_are_hidden_by_their_names_and_keep_their_types(world: World) -> None:
    body = airflow.ConnectionBody(connection_id="by_name", extra=json.dumps(EXTRA), **CONNECTION)
    made = await world.client("post_connection", body)
    listed = (await world.client("get_connections", connection_id_pattern="by_name")).connections[0]
    for found in (made, listed, await world.client("get_connection", "by_name")):
        assert json.loads(found.extra) == SHOWN
    answer = await plain(world, "GET", "/api/v1/connections/by_name")
    assert answer.status_code == 200 and "shown" not in answer.text, "the native API shows no value of extra"


async def test_masked_values_of_extra_that_come_back_stay(world: World) -> None:
    body = airflow.ConnectionBody(connection_id="back", extra=json.dumps(EXTRA), **CONNECTION)
    await world.client("post_connection", body)
    changed = {**SHOWN, "a": "other", "new_token": "canary-4"}
    body = airflow.ConnectionBody(connection_id="back", extra=json.dumps(changed), **CONNECTION)
    done = await world.client("patch_connection", "back", body)
    assert json.loads(done.extra) == {**SHOWN, "a": "other", "new_token": "***"}
    only = airflow.ConnectionBody(connection_id="back", conn_type="http", extra="{}")
    kept = await world.client("patch_connection", "back", only, update_mask=["conn_type"])
    assert json.loads(kept.extra) == {**SHOWN, "a": "other", "new_token": "***"}


async def test_extra_that_is_nested_too_deeply_is_refused(world: World) -> None:
    for depth, status in ((MOST_DEPTH, 201), (MOST_DEPTH + 1, 400), (20_000, 400)):
        extra = '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
        body = {"connection_id": f"deep_{depth}", "conn_type": "x", "extra": extra}
        assert (await plain(world, "POST", "/api/v2/connections", json=body)).status_code == status, depth


async def test_tasks_receive_all_values_of_extra_as_text() -> None:
    connection = read_connection('{"type": "http", "extra": {"n": 5, "nested": {"b": 1}, "a": "x"}}')
    assert connection.extra == {"n": "5", "nested": '{"b": 1}', "a": "x"}


# Pools --------------------------------------------------------------------------------------------------------------


async def test_the_default_pool_has_the_tasks_without_a_pool(world: World) -> None:
    before = await world.client("get_pool", "default_pool")
    name = await fresh(world, "poolless")
    for key in ("p1", "p2"):
        await world.start(name, key)
    (claim,) = await world.runner.claim(1, queues=(name,))
    pool = await world.client("get_pool", "default_pool")
    assert (pool.slots, pool.description) == (128, "Default pool")
    assert pool.running_slots == before.running_slots + 1 and pool.queued_slots == before.queued_slots + 1
    assert pool.open_slots == 128 - pool.occupied_slots == 128 - pool.running_slots - pool.queued_slots
    assert "default_pool" in [each.name for each in (await world.client("get_pools")).pools]
    await world.runner.finish(claim)
    used = await world.client("get_pool", "db")
    assert used.occupied_slots == 0


async def test_the_default_pool_stays_as_it_is(world: World) -> None:
    answer = await world.client.raw("delete_pool", "default_pool")
    assert answer.status == 400 and "can't be deleted" in json.loads(answer.data)["detail"]
    patch = airflow.PoolPatchBody(pool="default_pool", slots=5, include_deferred=False)
    assert await world.client.status_of("patch_pool", "default_pool", patch) == 400
    assert await world.client.status_of("post_pool", airflow.PoolBody(name="default_pool", slots=1)) == 409
    entities = [{"name": "default_pool", "slots": 1}]
    actions = [{"action": "create", "action_on_existence": "overwrite", "entities": entities}]
    done = await world.client("bulk_pools", airflow.BulkBodyPoolBody.from_dict({"actions": actions}))
    assert [error["status_code"] for error in done.create.errors] == [400]
    assert await value(world.conn, "select count(*) from gate where name = 'default_pool'") == 0


async def test_an_unknown_pool_is_reported_before_a_body_that_is_not_allowed(world: World) -> None:
    patch = airflow.PoolPatchBody(pool="nowhere", slots=1, include_deferred=True)
    assert await world.client.status_of("patch_pool", "nowhere", patch) == 404


# Backfills ----------------------------------------------------------------------------------------------------------


def stretch(dag: str, **fields: Any) -> Any:
    last = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    return airflow.BackfillPostBody(dag_id=dag, from_date=last - timedelta(hours=2), to_date=last, **fields)


async def test_a_backfill_of_a_paused_dag_has_queued_runs_with_airflows_ids(world: World) -> None:
    await put(world.conn, make_dag("idle", {"a": []}, every="0 * * * *"))
    await pause(world.conn, dag="idle", actor=Actor("test"))
    body = stretch("idle", max_active_runs=3)
    made = await world.client("create_backfill", body)
    epoch = await lead(world.conn)
    await advance(world.conn, shard=0, epoch=epoch, backfill_id=made.id)
    await world.conn.execute("update shard set lease_until = null")
    runs = (await world.client("get_dag_runs", "idle", order_by=["logical_date"])).dag_runs
    hours = [body.from_date + timedelta(hours=place) for place in range(3)]
    assert [run.dag_run_id for run in runs] == [f"backfill__{hour.isoformat()}" for hour in hours]
    assert {run.state.value for run in runs} == {"queued"} and [run.logical_date for run in runs] == hours
    assert (await world.client("get_dag_run", "idle", runs[0].dag_run_id)).run_type.value == "backfill"
    await world.client("cancel_backfill", made.id)


# The audit log ------------------------------------------------------------------------------------------------------


async def test_events_have_the_names_of_airflows_operations_and_of_users(world: World) -> None:
    name = await fresh(world, "logged_events")
    call = world.client
    await ended(world, name, "e1")
    await call("trigger_dag_run", name, airflow.TriggerDAGRunPostBody(dag_run_id="e2", logical_date=None))
    await call("patch_dag_run", name, "e1", airflow.DAGRunPatchBody(note="n"))
    await call("patch_task_instance", name, "e1", "a", airflow.PatchTaskInstanceBody(new_state="failed"))
    await call("patch_task_instance", name, "e1", "b", airflow.PatchTaskInstanceBody(new_state="failed"))
    await call.raw("clear_dag_run", name, "e1", airflow.DAGRunClearBody(dry_run=False))
    await call("patch_dag", name, airflow.DAGPatchBody(is_paused=True))
    found = (await call("get_event_logs", dag_id=name, owner="root")).event_logs
    assert [(each.event, each.run_id) for each in found] == [
        ("trigger_dag_run", "e2"),
        ("patch_dag_run", "e1"),
        ("patch_task_instance", "e1"),
        ("patch_task_instance", "e1"),
        ("post_clear_task_instances", "e1"),
        ("patch_dag", None),
    ]
    kept = (await call("get_event_logs", dag_id=name, included_events=["patch_dag_run", "patch_dag"])).event_logs
    assert [each.event for each in kept] == ["patch_dag_run", "patch_dag"]


async def test_events_of_values_say_what_was_done_to_what(world: World) -> None:
    call = world.client
    for text in ("old", "new"):
        body = airflow.VariableBody(key="seen", value=text)
        await (call("post_variable", body) if text == "old" else call("patch_variable", "seen", body))
    await call("delete_variable", "seen")
    await plain(world, "PUT", "/api/v1/secrets/hidden", json={"value": "canary"})
    for slots in (1, 2):
        await plain(world, "PUT", "/api/v1/pools/seen", json={"slots": slots})
    await call("delete_pool", "seen")
    found = (await call("get_event_logs", owner="root", order_by=["-id"], limit=7)).event_logs
    assert [each.event for each in found][::-1] == [
        *("post_variable", "patch_variable", "delete_variable", "put_value"),
        *("post_pool", "patch_pool", "delete_pool"),
    ]


async def test_events_of_outputs_say_what_was_done(world: World) -> None:
    name = await fresh(world, "events_of_outputs")
    await ended(world, name, "o1")
    place = (name, "a", "o1")
    await world.client("create_xcom_entry", *place, airflow.XComCreateBody(key="k", value=1))
    await world.client("update_xcom_entry", *place, "k", airflow.XComUpdateBody(value=2))
    await world.client("delete_xcom_entry", *place, "k")
    found = (await world.client("get_event_logs", dag_id=name, event_pattern="xcom")).event_logs
    assert [each.event for each in found] == ["create_xcom_entry", "update_xcom_entry", "delete_xcom_entry"]


# Outside /api/v2 ----------------------------------------------------------------------------------------------------


async def test_the_document_is_also_where_airflow_has_it(world: World) -> None:
    async with httpx.AsyncClient(base_url=world.client.client.configuration.host, timeout=60) as stranger:
        packed = await stranger.get("/openapi.json")
        unpacked = await stranger.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in unpacked.headers
    assert packed.json() == unpacked.json()
    inner = (await plain(world, "GET", "/api/v2/openapi.json")).json()
    assert set(packed.json()["paths"]) == {f"/api/v2{path}" for path in inner["paths"]}
