"""Assets and state of Airflow's DAGs: aliases, events, `@asset`, and the state stores, in real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.bundles.bundle import pack
from evertick.config import Settings
from evertick.domain.access import Actor
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.engine.runs import trigger
from evertick.publisher.deployment import LoadedFolder, deploy, load_files
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from tests.airflow.test_files import outputs
from tests.engine import invariants
from tests.engine.world import value
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

FOLDER = Path(__file__).parent / "stores"
pytestmark = [pytest.mark.long]


async def test_assets_and_state_work_as_under_airflow(
    conn: AsyncConnection, database: str, tmp_path: Path, airflow_python: Path
) -> None:
    await invariants.install(conn)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "AIRFLOW_HOME": str(tmp_path)}
    ours = quick(database, tmp_path / "home", airflow_python=airflow_python)
    loading = Settings(airflow_python=airflow_python, home=tmp_path / "home", load_timeout_seconds=120)
    (loaded,) = await load_files(FOLDER, ["stores.py"], loading, environment)
    assert (loaded.error, loaded.findings) == (None, ())
    bundle = await asyncio.to_thread(pack, FOLDER, loaded.file, loaded.closure)
    change = DeploymentChange(name="test", kind=DeploymentKind.UPLOAD, is_whole=True)
    folder = LoadedFolder(files=[loaded], bundles={loaded.file: bundle})
    await deploy(conn, folder, change, settings=ours, actor=Actor("test"))
    run = (await trigger(conn, dag="makes", params={}, actor=Actor("test"))).run_id
    said = Said()

    async def are_over() -> bool:
        return await value(conn, "select count(*) from run_status where finished_at is not null") == 4

    scheduler = Scheduler(ours, url=database, owner="s0", log=said.log)
    async with hosted(scheduler), hosted(Runner(ours, url=database, log=said.log, environment=environment)):
        await eventually(are_over, 120)
    found = await outputs(conn, run)
    assert found["looks"] == [1, {"rows": 7}, "make", ["day-1"]]
    assert found["keeps"] == ["job-1", "seen", None]
    others = {
        name: await outputs(conn, number)
        for name, number in await (
            await conn.execute("select d.name, r.run_id from run r join dag d using (dag_id) where d.name <> 'makes'")
        ).fetchall()
    }
    assert others == {
        "follows": {"consumed": {"orders": [{"rows": 7}]}},
        "follows_alias": {"consumed": {"day-1": [{"n": 1}], "daily": [{"n": 1}]}},
        "report": {"report": ["s3://shop/report", "s3://shop/orders", {"owner": "sales"}]},
    }
    log = await value(
        conn,
        "select string_agg(c.content, '') from log_chunk c join task k using (run_id, idx, map_index)"
        " join task_spec s on s.version_id = k.version_id and s.idx = k.idx where s.name = 'hides'",
    )
    assert isinstance(log, str) and "it is ***" in log and "raw ***" in log and "hush" not in log
    assert await value(conn, "select count(*) from task where strpos(reason, 'hush') > 0") == 0
    stored = await value(conn, "select jsonb_object_agg(name, array[uri, asset_group]) from asset")
    assert stored == {
        "day-1": ["s3://shop/day-1", "asset"],
        "orders": ["s3://shop/orders", "shop"],
        "report": ["s3://shop/report", "asset"],
    }
    assert (
        await value(
            conn, "select count(*) from asset_update where extra->>'rows' = 'never' and occurred_at is not null"
        )
        == 0
    )
    assert await invariants.violations(conn) == []
