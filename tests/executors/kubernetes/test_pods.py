"""The whole way: a DAG, a runner that makes pods, agents in them as real processes, the API, and the end in the database."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.api.service import Api
from evertick.config import Settings, environment_for
from evertick.domain.access import Actor
from evertick.engine.runs import cancel, trigger
from evertick.executors.kubernetes.manifest import KEPT_LABEL
from evertick.processes.tree import find_by_token
from evertick.runner.remote.session import make_remote_runner
from evertick.scheduler.scheduler import Scheduler
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.executors.kubernetes.kubelet import Kubelet
from tests.executors.kubernetes.server import ApiServer, Fault, internal
from tests.system.hosting import Said, hosted, quick
from tests.system.work import Published, loaded, publish_work
from tests.waiting import eventually

WORK = """
import os, pathlib, time
from evertick import current_context, dag, task

PLACE = pathlib.Path(os.environ.get("PLACE", "."))
PODS = {"queue": "pods"}

def hold():
    (PLACE / f"begun-{current_context().epoch}").touch()
    while not (PLACE / "go").exists():
        time.sleep(0.01)
    return "held"

@dag(task_defaults=PODS)
def chain():
    @task
    def one():
        print("said in a pod by", os.environ["HOSTNAME"])
        return [1, os.environ["REGION"]]
    @task(executor_options={"kubernetes": {"env": {"REGION": "us"}}})
    def two(before):
        return [*before, os.environ["REGION"]]
    two(one())

@dag(task_defaults=PODS)
def holding():
    task(hold)()

@dag(task_defaults=PODS, executor_options={"kubernetes": {"image": "absent:1"}})
def nowhere():
    task(hold)()
"""
ELSEWHERE = """
create function elsewhere() returns trigger language plpgsql as $$ begin new.host := 'pod'; return new; end $$;
create trigger elsewhere before insert on runner for each row when (new.runner_id like 'et-%') execute function elsewhere();
"""
# A pod starts a whole interpreter: on a busy machine that takes its time.
START_SECONDS = 120.0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(WORK, tmp_path_factory.mktemp("dags"))


def write_template(file: Path, variables: dict[str, str]) -> Path:
    env = [{"name": name, "value": text} for name, text in variables.items()]
    file.write_text(json.dumps({"spec": {"containers": [{"name": "task", "env": env}]}}))
    return file


class World:
    """An installation whose tasks are pods."""

    def __init__(self, conn: AsyncConnection, settings: Settings, place: Path, node: Kubelet, api: Api) -> None:
        self.conn, self.settings, self.place, self.node, self.api = conn, settings, place, node, api
        self.said = Said()

    @property
    def pod(self) -> str:
        """Of the attempt that runs now."""
        (only,) = self.node.objects.all_of("pods", "default")
        return str(only["metadata"]["name"])

    async def run(self, dag: str) -> int:
        return (await trigger(self.conn, dag=dag, params={}, actor=Actor("test"))).run_id

    async def ended(self, run_id: int) -> str:
        async def state() -> str | None:
            found = await run_state(self.conn, run_id)
            return None if found in ("queued", "running") else found

        return str(await eventually(state, START_SECONDS, pause_seconds=0.02))

    async def begun(self, epoch: int = 1) -> None:
        await eventually(lambda: (self.place / f"begun-{epoch}").exists(), START_SECONDS, pause_seconds=0.02)

    def go(self) -> None:
        (self.place / "go").touch()

    async def nothing_is_left(self) -> None:
        async def is_so() -> bool:
            listed = await value(self.conn, "select count(*) from dispatch")
            objects = self.node.objects
            return listed == 0 and not objects.all_of("pods", "default") and not objects.all_of("secrets", "default")

        await eventually(is_so, START_SECONDS, pause_seconds=0.02)

    async def kept(self) -> list[str]:
        """The phases of pods that are kept for people, when nobody looks after any."""

        async def is_so() -> bool:
            return await value(self.conn, "select count(*) from dispatch") == 0

        await eventually(is_so, START_SECONDS, pause_seconds=0.02)
        pods = self.node.objects.all_of("pods", "default")
        return [pod["status"]["phase"] for pod in pods if KEPT_LABEL in pod["metadata"]["labels"]]

    @asynccontextmanager
    async def runner(self, **changes: Any) -> AsyncIterator[None]:
        """In this process, which has everything imported already."""
        settings = replace(self.settings, **changes)
        async with hosted(make_remote_runner(settings, url=str(settings.database_url), log=self.said.log)):
            yield

    @asynccontextmanager
    async def runner_process(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A real one, that can be killed, and is at the end of the block."""
        variables = environment_for(self.settings, dict(os.environ))
        program = Path(sys.executable).with_name("evertick")
        process = await asyncio.create_subprocess_exec(program, "runner", "--executor", "kubernetes", env=variables)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def world(
    conn: AsyncConnection, database: str, tmp_path: Path, server: ApiServer, node: Kubelet, work: Published
) -> AsyncIterator[World]:
    place = tmp_path / "place"
    place.mkdir()
    variables = {"PLACE": str(place), "REGION": "eu"}
    template = write_template(tmp_path / "pod.yaml", variables)
    write_template(place / "impatient.yaml", {**variables, "EVERTICK_AGENT_REPORT_SECONDS": "0.5"})
    settings = quick(
        database,
        tmp_path / "home",
        agent_key=("k" * 43,),
        api_port=0,
        health=False,
        executor="kubernetes",
        runner_id=None,
        runner_queues=("pods",),
        kubeconfig=server.write_kubeconfig(tmp_path / "kubeconfig"),
        pod_template=template,
        pod_image="evertick:test",
        heartbeat_seconds=0.3,
        lost_after_seconds=60.0,
        agent_lost_after_seconds=60.0,
        agent_report_seconds=30.0,
        stop_grace_seconds=1.0,
    )
    await invariants.install(conn)
    # A pod has PID namespaces of its own: nobody here can see that its processes are gone.
    await conn.execute(ELSEWHERE)
    await publish_work(conn, work)
    said = Said()
    async with AsyncExitStack() as stack:
        api = Api(settings, url=database, log=said.log, application="evertick.ui.app")
        await stack.enter_async_context(hosted(api))  # type: ignore[arg-type]
        url = (await said.saw("api_listening"))["url"]
        scheduler = Scheduler(settings, url=database, owner="s", log=Said().log)
        await stack.enter_async_context(hosted(scheduler))
        yield World(conn, replace(settings, agent_api_url=url), place, node, api)
    assert await invariants.violations(conn) == []


async def test_a_dag_runs_in_pods_and_nothing_of_them_is_left(world: World, server: ApiServer) -> None:
    # A real kubelet takes its time, here for longer than two looks.
    world.node.remove_after(2.0)
    async with world.runner():
        run_id = await world.run("chain")
        assert await world.ended(run_id) == "success"
        await world.nothing_is_left()
    assert world.said.events("orphan_removed") == []
    results = await value(
        world.conn, "select array_agg(r.value order by r.idx) from result r where run_id = %s", run_id
    )
    assert results == [[1, "eu"], [1, "eu", "us"]]
    created = [body for verb, kind, body in server.bodies if (verb, kind) == ("create", "pods")]
    assert "eva_" not in json.dumps(created), "no token in a pod's manifest"


async def test_a_canceled_run_ends_its_pod_and_its_processes(world: World) -> None:
    async with world.runner():
        run_id = await world.run("holding")
        await world.begun()
        mark = world.node.container_of(world.pod).mark
        await cancel(world.conn, run_id=run_id, actor=Actor("test"))
        assert await world.ended(run_id) == "canceled"
        await world.nothing_is_left()
    assert find_by_token(mark) == []


@pytest.mark.requirement("A16", "A11")
async def test_a_killed_runner_s_pods_go_on_and_the_next_one_adopts_them(world: World) -> None:
    async with world.runner_process():
        run_id = await world.run("holding")
        await world.begun()
    async with world.runner(dispatch_lost_seconds=2):
        await world.said.saw("dispatch_adopted", within_seconds=START_SECONDS)
        world.go()
        assert await world.ended(run_id) == "success"
        await world.nothing_is_left()
    assert await value(world.conn, "select max(epoch) from task") == 1
    assert len(world.node.started) == 1, "one pod for one attempt"


@pytest.mark.requirement("B10")
async def test_a_pod_that_was_killed_for_its_memory_says_so_and_runs_again(world: World) -> None:
    """And both pods are kept as they ended, if that is wanted."""
    async with world.runner(pod_cleanup="never"):
        run_id = await world.run("holding")
        await world.begun(1)
        world.node.kill(world.pod)
        await world.begun(2)
        world.go()
        assert await world.ended(run_id) == "success"
        assert sorted(await world.kept()) == ["Failed", "Succeeded"]
    reason = await value(world.conn, "select reason from attempt where run_id = %s and epoch = 1", run_id)
    assert reason == "agent_lost: its agent ended without reporting an outcome (OOMKilled, exit status 137)"


async def test_a_pod_without_an_image_is_given_up_with_the_cluster_s_words(world: World) -> None:
    async with world.runner(pod_start_timeout_seconds=0.2, infra_retries=0):
        run_id = await world.run("nowhere")
        assert await world.ended(run_id) == "failed"
        await world.nothing_is_left()
    reason = await value(world.conn, "select reason from task where run_id = %s", run_id)
    assert reason == "dispatch_lost: it ended before it started (ImagePullBackOff: Back-off pulling image absent:1)"
    assert world.node.started == []


async def test_what_an_agent_could_not_report_is_read_from_its_pod(world: World, server: ApiServer) -> None:
    """The API goes away while the task runs, and does not come back."""
    async with world.runner(pod_template=world.place / "impatient.yaml"):
        run_id = await world.run("holding")
        await world.begun()
        world.api.stop.set()
        world.api.wake.set()
        # And so does the cluster's, for a while: what is there is looked at again.
        server.faults = [Fault(times=5, failure=internal())]
        world.go()
        assert await world.ended(run_id) == "success"
        await world.nothing_is_left()
    assert await value(world.conn, "select value from result where run_id = %s", run_id) == "held"
    assert await value(world.conn, "select max(epoch) from task") == 1
