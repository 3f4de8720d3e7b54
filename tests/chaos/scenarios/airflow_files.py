"""N36: DAG files of Airflow while their zygote, their fork server, their runner and the database die."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from evertick.bundles.bundle import pack
from evertick.config import Settings, user_environment
from evertick.db.connect import Purpose, connect
from evertick.domain.encryption import new_key
from evertick.publisher.deployment import load_files
from tests.chaos import effects
from tests.chaos.cluster import Shape
from tests.chaos.dags import Work, publish_specs
from tests.chaos.faults import database, processes
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.runners import effects_of
from tests.chaos.stage import Stage
from tests.source_tree import ROOT
from tests.waiting import eventually

FILE = "skies.py"
DAG = "skies"
TEXT = """
import os, pathlib, time
from effects import noted
from airflow.sdk import DAG, Variable, task

FLAGS = os.environ.get("CHAOS_FLAGS", "")

with DAG("skies", schedule=None, is_paused_upon_creation=False, default_args={"retries": 0}) as dag:

    @task
    def opened(run_id=None):
        with noted():
            return {"run": run_id}

    @task
    def held(given, ti=None):
        with noted():
            Variable.set("skies", given["run"])
            while not pathlib.Path(FLAGS, "go").exists():
                time.sleep(0.02)
            return [given["run"], ti.xcom_pull(task_ids="opened")["run"]]

    @task
    def closed(given, run_id=None):
        with noted():
            assert given == [run_id, run_id], given

    closed(held(opened()))
"""


def airflow_python() -> Path:
    return Path(os.environ.get("EVERTICK_TEST_AIRFLOW_PYTHON") or ROOT / ".airflow" / "bin" / "python")


def lacks_airflow() -> str:
    return "" if airflow_python().exists() else "there is no environment with Airflow: `make test-airflow` makes one"


async def die_with_airflow(stage: Stage) -> None:
    """The attempts that a death takes away run again, at no cost; no run is lost, and each XCom is its own run's."""
    await stage.publish()
    await _publish_file(stage)
    deaths: tuple[Callable[[Stage], Awaitable[object]], ...] = (
        _kill_zygotes,
        _kill_fork_server,
        _kill_runner,
        _restart,
    )
    runs: list[int] = []
    for _ in range(int(stage.scaled(5, 1))):
        for death in deaths:
            before = [await stage.trigger(DAG, DAG) for _ in range(4)]
            await _are_held(stage, before)
            await death(stage)
            # The first of these need processes that the death took away.
            after = [await stage.trigger(DAG, DAG) for _ in range(4)]
            stage.cluster.tell("go")
            await stage.runs_over(before + after)
            stage.cluster.untell("go")
            runs += before + after
    rows = await stage.cluster.watch.must(
        "select r.state::text, k.state::text, k.attempt::int from run_status r join task k using (run_id)"
        " where run_id = any(%s)",
        runs,
    )
    stage.expect({row[0] for row in rows} == {"success"}, f"a run failed: {sorted(set(rows))}")
    stage.expect({row[2] for row in rows} <= {0, 1}, f"a death cost a task its attempt: {sorted(set(rows))}")
    stage.expect(len(rows) == 3 * len(runs), f"{len(rows)} tasks for {len(runs)} runs")


async def _publish_file(stage: Stage) -> None:
    folder = stage.cluster.folder / "airflow-dags"
    folder.mkdir()
    (folder / FILE).write_text(TEXT)
    effects.put_beside(folder)
    settings = Settings(airflow_python=airflow_python(), home=stage.cluster.folder / "load", load_timeout_seconds=120)
    (found,) = await load_files(folder, [FILE], settings, user_environment())
    assert found.error is None and not found.refused, (found.error, found.refused)
    work = Work({each.spec.name: each.spec for each in found.dags}, pack(folder, FILE, found.closure), FILE)
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        await publish_specs(conn, work, list(work.specs.values()))


async def _are_held(stage: Stage, runs: list[int]) -> None:
    def have_begun() -> bool:
        begun = {each.run_id for each in effects_of(stage, "begin", dags=(DAG,)) if each.task == "held"}
        return set(runs) <= begun

    await eventually(have_begun, 90, pause_seconds=0.05)


async def _kill_zygotes(stage: Stage) -> None:
    """Nobody may notice: what they forked goes on, and the next fork server is a fresh interpreter or a new zygote's."""
    for runner in stage.cluster.of_kind("runner"):
        async with stage.nemesis.fault(Fault.KILL, runner.name, part="zygote", disturbs=()):
            killed = runner.kill_zygotes()
        stage.expect(killed, f"{runner.name} had no zygote")


async def _kill_fork_server(stage: Stage) -> None:
    stage.expect(await processes.kill_warm_parent(stage.nemesis) is not None, "no fork server was killed")


async def _kill_runner(stage: Stage) -> None:
    await processes.kill_runner(stage.nemesis)
    for runner in stage.cluster.of_kind("runner"):
        await stage.runner_is_up(runner)


async def _restart(stage: Stage) -> None:
    await database.kill_postmaster(stage.nemesis)


SCENARIOS = (
    Scenario(
        name="N36",
        title="DAG files of Airflow, whose zygote, fork server, runner and database die",
        play=die_with_airflow,
        # The tasks set a variable, which is encrypted.
        shape=lambda is_full: Shape(
            schedulers=1, runners=2, slots=8, settings={"airflow_python": airflow_python(), "secret_keys": (new_key(),)}
        ),
        required=("J4", "J7", "J8"),
        needs=lacks_airflow,
    ),
)
