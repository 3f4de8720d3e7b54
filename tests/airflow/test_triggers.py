"""Deferrable operators of Airflow wait in a trigger process: without a slot, and whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.bundles.bundle import pack
from evertick.config import Settings
from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.stored_values import ValueKind
from evertick.engine.runs import trigger
from evertick.engine.secrets import put_value
from evertick.engine.tasks import mark
from evertick.publisher.deployment import LoadedFolder, deploy, load_files
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from evertick.secrets.keyring import load_keyring, make_key
from tests.airflow.test_files import DAGS, outcomes, outputs
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

pytestmark = [pytest.mark.long]
ACTOR = Actor("test")
WAITING = "select count(*) from task_trigger w join task_spec s using (idx) join task k using (run_id, idx, map_index)"
WAITING += " where s.version_id = k.version_id and k.state = 'deferred' and w.session is not null"


async def publish(conn: AsyncConnection, settings: Settings, environment: dict[str, str], file: str) -> None:
    loaded = await load_files(DAGS, [file], settings, environment)
    assert [each.error for each in loaded] == [None]
    assert [each.code for found in loaded for each in found.findings] == []
    bundles = {each.file: pack(DAGS, each.file, each.closure) for each in loaded}
    change = DeploymentChange(name="test", kind=DeploymentKind.UPLOAD, is_whole=True)
    await deploy(conn, LoadedFolder(files=loaded, bundles=bundles), change, settings=settings, actor=ACTOR)


async def log_of(conn: AsyncConnection, run: int, task: str) -> str:
    found = await value(
        conn,
        "select string_agg(content, '' order by epoch, seq) from log_chunk l join run_status r using (run_id)"
        " join task_spec s on s.version_id = r.version_id and s.idx = l.idx where l.run_id = %s and s.name = %s",
        run,
        task,
    )
    return str(found)


async def test_triggers_wait_in_one_process_and_each_resumes_its_task_once(
    conn: AsyncConnection, database: str, tmp_path: Path, airflow_python: Path
) -> None:
    await invariants.install(conn)
    home, folder = tmp_path / "airflow", tmp_path / "files"
    folder.mkdir()
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "AIRFLOW_HOME": str(home)}
    settings = quick(
        database, tmp_path / "home", airflow_python=airflow_python, load_timeout_seconds=120, runner_slots=2
    )
    make_key(settings)
    ring = load_keyring(settings)
    for kind, name, text in ((ValueKind.VARIABLE, "color", "green"), (ValueKind.CONNECTION, "shop", "http://shop")):
        await put_value(conn, ring, kind=kind, name=name, value=text, actor=ACTOR)
    await publish(conn, settings, environment, "triggers.py")
    run = (await trigger(conn, dag="triggers", params={"folder": str(folder)}, actor=ACTOR)).run_id
    said = Said()
    scheduler = Scheduler(settings, url=database, owner="s0", log=said.log)
    runner = Runner(settings, url=database, log=said.log, environment=environment)
    names = ["twice1", "asks1", "ends1", "blocks1", "marked1", "start"]

    async def pids(*wanted: str) -> set[str] | None:
        files = [folder / f"{name}.pid" for name in wanted]
        found = {file.read_text() for file in files if file.exists()}
        return found if all(file.exists() for file in files) and "" not in found else None

    async def said_so_far() -> Any:
        return await outcomes(conn, run), said.all[-15:]

    async with hosted(scheduler), hosted(runner):
        try:
            await eventually(lambda: pids(*names), 120)
            first = await pids(*names)
            assert first is not None and len(first) == 1
            # None of them has a slot.
            await eventually(lambda: value(conn, "select count(*) = 0 from lease"), 30)
            # A killed trigger process loses nothing.
            for name in names:
                (folder / f"{name}.pid").unlink()
            killed_at = time.monotonic()
            os.kill(int(first.pop()), signal.SIGKILL)
            await eventually(lambda: pids(*names), 20)
            seconds = time.monotonic() - killed_at
            key = await value(
                conn,
                "select idx from task_spec s join run_status r using (version_id) where run_id = %s and name = 'marked'",
                run,
            )
            await mark(conn, TaskKey(run, int(str(key)), -1), state="success", actor=ACTOR)  # type: ignore[arg-type]
            for name in ("asks1", "ends1", "blocks1", "start", "twice1"):
                (folder / name).touch()
            await eventually(lambda: pids("twice2"), 30)
            (folder / "twice2").touch()

            async def ended() -> bool:
                return await run_state(conn, run) == "failed"

            await eventually(ended, 60)
        except AssertionError as error:
            raise AssertionError(await said_so_far()) from error
        assert await outcomes(conn, run) == {
            **dict.fromkeys(("twice", "asks", "ends", "blocks", "marked", "from_trigger"), "success"),
            **dict.fromkeys(("fails", "late", "gone"), "failed"),
        }
        await eventually(
            lambda: _true((folder / "marked1.killed").exists() and (folder / "marked1.cleaned").exists()), 10
        )
    results = await outputs(conn, run)
    twice = results["twice"]
    assert twice["value"] == [2, {"came": "twice2"}, 1] and twice["named"] == {"before": 2}
    assert results["asks"]["value"][1] == {"came": "asks1", "now": "green", "thread": "green", "login": "shop"}
    assert results["ends"]["value"] == "ended" and results["from_trigger"] == "start"
    assert not (folder / "twice1.killed").exists() and (folder / "twice1.cleaned").exists()
    reasons = {row.task: row.reason or "" for row in await tasks.list_of_run(conn, run_id=run)}
    assert "Trigger timeout" in reasons["late"] and "Trigger failure" in reasons["fails"]
    assert "ValueError: no such thing" in await log_of(conn, run, "fails")
    assert "No module named 'no_such_module'" in await log_of(conn, run, "gone")
    everything = str(await value(conn, "select string_agg(content, '') from log_chunk"))
    assert "s3cret-word" not in everything and "s3cret-word" not in str(said.all)
    assert "waits for asks1 of asks" in await log_of(conn, run, "asks")
    assert "other triggers of this process" in await log_of(conn, run, "blocks")
    assert "time.sleep(1.5)" in await log_of(conn, run, "blocks")
    assert await invariants.violations(conn) == []
    assert seconds < 3.0


async def _true(held: bool) -> bool:
    return held
