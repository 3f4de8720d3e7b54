"""Who is limited to tags reads of other DAGs nowhere, also not where an answer about a DAG of theirs would name them by the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.bundles.bundle import pack
from evertick.db.queries import dags
from evertick.domain.access import Actor, Role
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.explain import Reason, dags_named, describe, visible_to
from evertick.domain.schedules.dependencies import Asset, after
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import deliver_dependencies
from evertick.engine.publish import publish
from tests.api.conftest import Client, Signed
from tests.engine.test_after import waiting
from tests.engine.world import Runner, lead, make_dag, put, start

V1, V2 = "/api/v1", "/api/v2"
GATE = {"name": "x", "need": 1, "used": 1, "capacity": 1, "ahead": None, "holders": [], "reserved_for": None}
THEIRS = {"run_id": 7, "dag": "unseen_dag", "task": "hush", "state": "running", "weight": 1, "need": 2, "version": 3}
MINE = {**THEIRS, "run_id": 8, "dag": "etl", "task": "load"}


@pytest.fixture
async def limited(signed: Signed) -> Client:
    return await signed(Role.ADMIN, ["finance"])


@pytest.mark.parametrize(
    "detail",
    [
        {"gate": "pool", "holders": [THEIRS, MINE]},
        {"gate": "mutex", "holders": [THEIRS, MINE]},
        {"gate": "pool", "reserved_for": THEIRS, "holders": [MINE]},
        {"gate": "order", "smaller": [THEIRS, MINE], "ahead": 2},
    ],
)
def test_a_reason_without_names_says_that_there_is_another_dag(detail: dict[str, object]) -> None:
    reason = Reason("gate", {**GATE, **detail})
    assert dags_named([reason]) == {"etl", "unseen_dag"}
    assert visible_to(reason, {"etl", "unseen_dag"}) == reason and "unseen_dag.hush of run 7" in describe(reason)
    hidden = visible_to(reason, {"etl"})
    told = f"{describe(hidden)} {hidden.detail}"
    assert "a task of another DAG" in told and "'task': 'load'" in told
    assert not [word for word in ("unseen_dag", "hush", "7") if word in told]


async def test_why_a_task_waits_names_no_task_of_another_dag(
    limited: Client, admin: Client, conn: AsyncConnection
) -> None:
    await set_pool(conn, name="db", slots=1, actor=Actor("test"))
    for name, tags in (("unseen_dag", ("hr",)), ("etl", ("finance",))):
        pool = (GateSpec(kind=GateKind.POOL, name="db"),)
        await put(conn, make_dag(name, {"t": [], "last": ["t"]}, per_task={"t": {"gates": pool}}, tags=tags))
    await start(conn, "unseen_dag")
    run = await start(conn, "etl", "r1")
    for path in (
        f"{V1}/runs/{run}/tasks/t/why",
        f"{V1}/runs/{run}/tasks/last/why",
        f"{V2}/dags/etl/dagRuns/r1/taskInstances/t/dependencies",
        f"/runs/{run}/tasks/t",
    ):
        assert "unseen_dag" in (await admin.get(path)).text, path
        told = (await limited.get(path)).text
        assert "unseen_dag" not in told and "a task of another DAG" in told, path


async def test_what_a_run_came_after_names_no_other_dag(limited: Client, admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("unseen_dag", {"t": []}, per_task={"t": {"outlets": ("orders",)}}, tags=("hr",)))
    await put(conn, replace(waiting("etl", after(Asset("orders"))), tags=("finance",)))
    epoch, runner = await lead(conn), await Runner.join(conn)
    await start(conn, "unseen_dag", "hushed_run")
    (claim,) = await runner.claim()
    await runner.finish(claim)
    await deliver_dependencies(conn, shard=0, epoch=epoch, limit=10)
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    (run,) = (await limited.ok("GET", f"{V2}/dags/etl/dagRuns"))["dag_runs"]
    path = f"{V2}/dags/etl/dagRuns/{run['dag_run_id']}/upstreamAssetEvents"
    (seen,) = (await admin.ok("GET", path))["asset_events"]
    assert (seen["source_dag_id"], seen["source_run_id"]) == ("unseen_dag", "hushed_run")
    (told,) = (await limited.ok("GET", path))["asset_events"]
    assert told == {**seen, "source_dag_id": None, "source_run_id": None}


async def test_code_that_also_has_other_dags_is_not_shown(
    limited: Client, signed: Signed, admin: Client, conn: AsyncConnection, tmp_path: Path
) -> None:
    for number, text in enumerate(("unseen_dag = 1\n", "unseen_dag = 2\n"), 1):
        await _publish(conn, tmp_path, text, "etl", "finance", description=f"{number}")
    paths = (f"{V2}/dagSources/etl", f"{V1}/dags/etl/diff", "/dags/etl/code", "/dags/etl/versions")
    paths += ("/dags/etl/versions/1/rollback",)
    for path in paths:
        assert "unseen_dag" in (await limited.get(path)).text, "as long as the DAG is alone in its file"
    await _publish(conn, tmp_path, "unseen_dag = 1\n", "other", "hr")
    await _publish(conn, tmp_path, "unseen_dag = 2\n", "other", "hr", description="2")
    both = await signed(Role.ADMIN, ["finance", "hr"])
    for path in paths:
        assert "unseen_dag" not in (await limited.get(path)).text, path
        assert "unseen_dag" in (await admin.get(path)).text and "unseen_dag" in (await both.get(path)).text, path
    assert (await limited.refused("GET", paths[0], 403))["detail"].startswith("This code also defines DAGs")


async def _publish(conn: AsyncConnection, folder: Path, text: str, name: str, tag: str, **options: object) -> None:
    (folder / "f.py").write_text(text)
    code = pack(folder, "f.py", [])
    await dags.put_bundle(conn, bundle_hash=code.hash, file="f.py", archive=code.archive, uses_threads=None)
    spec = make_dag(name, {"t": []}, tags=(tag,), **options)
    await publish(conn, spec=spec, file="f.py", bundle_hash=code.hash, actor=Actor("test"))
