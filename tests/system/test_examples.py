"""The examples of mapping, branches and other DAGs, by a real scheduler and a real runner with real children."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.engine.gates import set_pool
from evertick.engine.runs import cancel, trigger
from evertick.runner.runner import Runner
from evertick.scheduler import maintenance_jobs
from evertick.scheduler.scheduler import Scheduler
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.source_tree import SOURCE
from tests.system.hosting import Said, hosted, quick
from tests.system.work import loaded, publish_work, start_run
from tests.waiting import eventually

EXPECTED = {
    "mapping": {"report": "success", "send[1]": "success", "forecast[5]": "skipped"},
    "branches": {"book": "success", "review.ask": "skipped", "report": "success", "close_ledger": "success"},
    "groups": {"export.open_export": "success", "export.compare": "success", "book": "success"},
    "failures": {"throttled": "success", "unsteady": "success", "hopeless": "failed", "take_over": "success"},
    "limits": {"read[2]": "success", "write": "success", "mails.tell": "success"},
    "pools": {"read[2]": "success", "merge": "success"},
    "pipeline": {"orders": "success", "customers": "success", "note": "success"},
}


@pytest.mark.parametrize("name", EXPECTED)
async def test_an_example_ends_as_it_says(conn: AsyncConnection, database: str, tmp_path: Path, name: str) -> None:
    await invariants.install(conn)
    text = (SOURCE / "examples" / f"{name}.py").read_text()
    if name == "pools":
        await set_pool(conn, name="warehouse", slots=2, actor=Actor("test"))
    await publish_work(conn, await asyncio.to_thread(loaded, text, tmp_path / "dags"))
    run, said = await start_run(conn, name), Said()
    settings = quick(database, tmp_path / "home")
    scheduler = Scheduler(settings, url=database, owner="s0", log=said.log)
    runner = Runner(settings, url=database, log=said.log)
    async with hosted(scheduler), hosted(runner):

        async def state() -> str | None:
            found = await run_state(conn, run)
            return found if found not in ("queued", "running") else None

        assert await eventually(state, 60) == "success"
    rows = await tasks.list_of_run(conn, run_id=run)
    found = {row.task if row.map_index < 0 else f"{row.task}[{row.map_index}]": row.state for row in rows}
    assert {task: found.get(task) for task in EXPECTED[name]} == EXPECTED[name]
    if name == "groups":
        assert await value(conn, "select count(*) from attempt where outcome = 'failed'") == 1
    if name == "pipeline":
        assert await value(conn, "select count(*) from child_run") == 2
    assert await invariants.violations(conn) == []


async def test_the_example_of_notifications_tells_of_its_retry_and_its_failure(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    text = (SOURCE / "examples" / "notifications.py").read_text()
    await publish_work(conn, await asyncio.to_thread(loaded, text, tmp_path / "dags"))
    await start_run(conn, "notifications")
    said, settings = Said(), quick(database, tmp_path / "home")
    scheduler = Scheduler(settings, url=database, owner="s0", log=said.log)
    told = (
        "select array_agg(v.value #>> '{}' order by v.run_id) from result v join run r using (run_id)"
        " join dag d using (dag_id) where d.name = 'notifications.callback.tell' having count(*) = 2"
    )
    async with hosted(scheduler), hosted(Runner(settings, url=database, log=said.log)):
        found = await eventually(lambda: value(conn, told), 60)
    assert found == ["notifications, run 1: fetch: retry", "notifications, run 1: the run: failure"]


async def test_the_example_of_deadlines_tells_while_its_task_is_late(
    conn: AsyncConnection, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance_jobs, "ALERT_SECONDS", 0.1)
    text = (SOURCE / "examples" / "deadlines.py").read_text().replace('finish_within="5s"', 'finish_within="100ms"')
    await publish_work(conn, await asyncio.to_thread(loaded, text, tmp_path / "dags"))
    run = (await trigger(conn, dag="deadlines", params={"seconds": 60}, actor=Actor("test"))).run_id
    said, settings = Said(), quick(database, tmp_path / "home")
    scheduler = Scheduler(settings, url=database, owner="s0", log=said.log)
    told = (
        "select v.value #>> '{}' from result v join run r using (run_id)"
        " join dag d using (dag_id) where d.name = 'deadlines.callback.tell'"
    )
    async with hosted(scheduler), hosted(Runner(settings, url=database, log=said.log)):
        found = await eventually(lambda: value(conn, told), 60)
        assert await run_state(conn, run) == "running", "nobody stops it"
        await cancel(conn, run_id=run, actor=Actor("test"), reason="seen enough")
    assert found == f"deadlines, run {run}: fetch is late: not_finished"
    assert said.events("alert_raised", kind="not_finished", task="fetch", run=run)
