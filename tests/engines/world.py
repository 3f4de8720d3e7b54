"""An installation whose tasks run on an engine: API and scheduler in this process, agents wherever the engine starts them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from evertick.api.service import Api
from evertick.config import Settings, environment_for
from evertick.db.queries import logs
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.engine.runs import trigger
from evertick.runner.remote.session import make_remote_runner
from evertick.scheduler.scheduler import Scheduler
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.engines.place import Place
from tests.system.hosting import Said, hosted, quick
from tests.system.work import loaded, publish_work
from tests.waiting import eventually

DAGS = """
import os, pathlib, time
from evertick import current_context, dag, task

PLACE = pathlib.Path("%(place)s")
FAR = {"queue": "far"}

def hold():
    (PLACE / f"begun-{current_context().run_id}-{current_context().epoch}").touch()
    while not (PLACE / f"go-{current_context().run_id}").exists():
        time.sleep(0.01)
    return "held"

@dag(task_defaults=FAR)
def chain():
    @task
    def one():
        print("a line from far away")
        return [1, os.environ.get("REGION")]
    @task(executor_options={"%(engine)s": {"env": {"REGION": "us"}}})
    def two(before):
        return [*before, os.environ.get("REGION")]
    two(one())

@dag(task_defaults=FAR)
def holding():
    task(hold)()

@dag(task_defaults=FAR)
def eating():
    @task(executor_options={"%(engine)s": {"memory": "192Mi"}})
    def eat():
        return len(bytearray(900_000_000))
    eat()

@dag(task_defaults=FAR)
def refused():
    @task(executor_options={"%(engine)s": {%(refused)s}})
    def never():
        pass
    never()
"""
START_SECONDS = 60.0


class World:
    def __init__(self, conn: AsyncConnection, settings: Settings, place: Place, api: Api) -> None:
        self.conn, self.settings, self.place, self.api = conn, settings, place, api
        self.said = Said()

    async def run(self, dag: str) -> int:
        return (await trigger(self.conn, dag=dag, params={}, actor=Actor("test"))).run_id

    async def ended(self, run_id: int) -> str:
        async def state() -> str | None:
            found = await run_state(self.conn, run_id)
            return None if found in ("queued", "running") else found

        return str(await eventually(state, START_SECONDS, pause_seconds=0.02))

    async def begun(self, run_id: int, epoch: int = 1) -> str:
        """The name of the attempt, once its body has begun."""
        began = self.place.folder / f"begun-{run_id}-{epoch}"
        await eventually(began.exists, START_SECONDS, pause_seconds=0.02)
        text = "select runner_id from runner where session = (select session from task where run_id = %s)"
        return str(await value(self.conn, text, run_id))

    def go(self, run_id: int) -> None:
        (self.place.folder / f"go-{run_id}").touch()

    async def nothing_is_left(self) -> None:
        async def is_so() -> bool:
            names = {name for name in await self.place.names() if name.startswith("et-")}
            return await value(self.conn, "select count(*) from dispatch") == 0 and not names

        await eventually(is_so, START_SECONDS, pause_seconds=0.05)

    async def results(self, run_id: int) -> object:
        return await value(
            self.conn, "select array_agg(r.value order by r.idx) from result r where run_id = %s", run_id
        )

    async def reason(self, run_id: int, epoch: int = 1) -> str:
        """Of an earlier attempt, or of the last one."""
        text = "select coalesce(a.reason, t.reason) from task t left join attempt a using (run_id, idx, map_index)"
        return str(
            await value(self.conn, f"{text} where run_id = %s and coalesce(a.epoch, %s) = %s", run_id, epoch, epoch)
        )

    async def log(self, run_id: int) -> str:
        return "".join(each.content for each in await logs.read(self.conn, TaskKey(run_id, 0, -1)))

    @asynccontextmanager
    async def runner(self, **changes: Any) -> AsyncIterator[None]:
        settings = replace(self.settings, **changes)
        async with hosted(make_remote_runner(settings, url=str(settings.database_url), log=self.said.log)):
            yield

    @asynccontextmanager
    async def runner_process(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A real one, which is killed at the end of the block."""
        variables = environment_for(self.settings, dict(os.environ))
        program = Path(sys.executable).with_name("evertick")
        process = await asyncio.create_subprocess_exec(program, "runner", env=variables)
        try:
            yield process
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def installation(
    conn: AsyncConnection, database: str, folder: Path, place: Place, command: str = "evertick agent"
) -> AsyncIterator[World]:
    settings = quick(
        database,
        folder / "home",
        **place.settings(
            agent_key=("k" * 43,),
            api_port=0,
            health=False,
            runner_id=None,
            runner_queues=("far",),
            heartbeat_seconds=0.3,
            lost_after_seconds=60.0,
            agent_lost_after_seconds=60.0,
            agent_report_seconds=2.0,
            stop_grace_seconds=2.0,
            agent_command=command,
        ),
    )
    # Runs of another test had the same numbers.
    for left in (*place.folder.glob("begun-*"), *place.folder.glob("go-*")):
        left.unlink()
    wrong = ", ".join(f"{name!r}: {value!r}" for name, value in place.refused[0][0].items())
    (folder / "dags").mkdir()
    text = DAGS % {"place": place.folder, "engine": place.engine, "refused": wrong}
    await invariants.install(conn)
    await publish_work(conn, await asyncio.to_thread(loaded, text, folder / "dags"))
    said = Said()
    async with AsyncExitStack() as stack:
        api = Api(settings, url=database, log=said.log, application="evertick.ui.app")
        await stack.enter_async_context(hosted(api))  # type: ignore[arg-type]
        url = (await said.saw("api_listening"))["url"]
        scheduler = Scheduler(settings, url=database, owner="s", log=Said().log)
        await stack.enter_async_context(hosted(scheduler))
        yield World(conn, replace(settings, agent_api_url=url), place, api)
    assert await invariants.violations(conn) == []
