"""Waiting tasks with a real scheduler and a real runner whose tick is so long that nothing may wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from psycopg import AsyncConnection

from evertick.db.notify import Channel, notify
from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.engine.waits import Decision, decide_approval, send_event
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from tests.engine import invariants
from tests.engine.world import run_state, states, value
from tests.source_tree import SOURCE
from tests.system.hosting import Said, hosted, quick
from tests.system.work import loaded, publish_work, start_run
from tests.waiting import eventually

# Longer than the test may take: whoever waits for a tick fails it.
SLOW = {"tick_seconds": 60.0, "leader_lease_seconds": 200.0, "lost_after_seconds": 300.0}
WITHIN_SECONDS = 30.0


async def _publish(conn: AsyncConnection, name: str, folder: Path) -> None:
    await invariants.install(conn)
    text = (SOURCE / "examples" / f"{name}.py").read_text()
    await publish_work(conn, await asyncio.to_thread(loaded, text, folder / "dags"))


async def _ended(conn: AsyncConnection, run: int) -> str:
    async def state() -> str | None:
        found = await run_state(conn, run)
        return found if found not in ("queued", "running") else None

    found = await eventually(state, WITHIN_SECONDS)
    assert found is not None
    return found


async def test_the_example_waits_in_every_way_and_for_no_tick(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    await _publish(conn, "waiting", tmp_path)
    said = Said()
    settings = quick(database, tmp_path / "home", **SLOW)
    scheduler = Scheduler(settings, url=database, owner="s0", log=said.log)
    runner = Runner(settings, url=database, log=said.log)
    async with hosted(scheduler), hosted(runner):
        run = await start_run(conn, "waiting")
        await notify(conn, Channel.SCHEDULE)

        async def is_deferred(task: str) -> bool:
            return (await states(conn, run)).get(task) == "deferred"

        await eventually(lambda: is_deferred("go"), WITHIN_SECONDS)
        assert await value(conn, "select count(*) from lease") == 0, "no runner holds anything"
        await send_event(conn, name="go-now", payload={"files": 3}, actor=Actor("me"))
        await notify(conn, Channel.SCHEDULE)
        await eventually(lambda: is_deferred("ask"), WITHIN_SECONDS)
        decision = Decision(is_approved=True, actor=Actor("ann"), fields=lambda form: {"copies": 2})
        await decide_approval(conn, run_id=run, task="ask", decision=decision)
        await notify(conn, Channel.TASKS)
        assert await _ended(conn, run) == "success"
    (told,) = await tasks.by_name(conn, run_id=run, task="tell")
    text = await value(conn, "select value from result where run_id = %s and idx = %s", run, told.idx)
    assert "{'files': 3}, ann wants {'copies': 2}" in str(text)
    assert await invariants.violations(conn) == []


async def test_a_started_dag_and_its_end_are_delivered_without_a_tick(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    await _publish(conn, "pipeline", tmp_path)
    said = Said()
    settings = quick(database, tmp_path / "home", **SLOW)
    scheduler = Scheduler(settings, url=database, owner="s0", log=said.log)
    runner = Runner(settings, url=database, log=said.log)
    async with hosted(scheduler), hosted(runner):
        run = await start_run(conn, "pipeline")
        await notify(conn, Channel.SCHEDULE)
        assert await _ended(conn, run) == "success"
    assert await invariants.violations(conn) == []
