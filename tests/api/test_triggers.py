"""Deferred tasks of Airflow in its own API: their state, their trigger without its arguments, and the runner that runs it."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.triggers import exchange_triggers
from tests.api.conftest import Client
from tests.engine.world import Runner, make_dag, put, start


async def test_a_deferred_task_shows_its_trigger_and_no_argument(admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"wait": [], "work": []}))
    run = await start(conn, "d", key="one")
    runner = await Runner.join(conn)
    wait, work = await runner.claim()
    given = {"classpath": "mod.Trigger", "kwargs": {"token": "s3cret"}, "next_method": "done", "next_kwargs": {}}
    await runner.finish(wait, "deferred", result={"trigger": given})
    path = "/api/v2/dags/d/dagRuns/one/taskInstances"
    shown = await admin.ok("GET", f"{path}/wait")
    assert (shown["state"], shown["trigger"]["classpath"], shown["triggerer_job"]) == ("deferred", "mod.Trigger", None)
    (row,) = (
        await exchange_triggers(conn, session=runner.session, reports=[], held=[], queues=["default"], free=9)
    ).started
    listed = {each["task_id"]: each for each in (await admin.ok("GET", path))["task_instances"]}
    assert listed["wait"]["triggerer_job"]["hostname"] == "h" and listed["wait"]["trigger"]["queue"] == "default"
    assert (listed["work"]["state"], listed["work"]["trigger"]) == ("running", None)
    assert "s3cret" not in str(listed)
    assert (row.run_id, work.run_id) == (run, run)
