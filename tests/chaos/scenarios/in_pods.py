"""What scenarios with tasks in pods share: the installation, bodies in pods, and what must have become of them in the end."""

from __future__ import annotations

from typing import Any

from tests.chaos.cluster import Shape
from tests.chaos.effects import Effect
from tests.chaos.pods import Pods
from tests.chaos.scenarios.runners import effects_of
from tests.chaos.stage import Stage
from tests.waiting import eventually

FIRST = "runner-pods-1"
# A pod starts a whole interpreter, and many do so at once.
BEGIN_SECONDS = 90.0
RUN_SECONDS = 120.0
DISPATCH_LOST_SECONDS = 3.0


def pods_of(stage: Stage) -> Pods:
    assert stage.pods is not None, "the scenario is not prepared for pods"
    return stage.pods


async def prepare_pods(stage: Stage, **settings: object) -> Pods:
    """A cluster beside the installation, an API for its agents, and a runner that makes pods."""
    stage.pods = pods = await stage.cluster.beside(Pods(stage.cluster))
    await pods.add_api()
    # In full the cluster's API is given the time that users give it.
    settings = {"dispatch_lost_seconds": DISPATCH_LOST_SECONDS, **settings}
    await pods.add_runner(FIRST, **({"kube_timeout_seconds": 30.0} if stage.is_full else {}), **settings)
    return pods


async def prepare_one(stage: Stage) -> None:
    await prepare_pods(stage)


async def begin_pods(stage: Stage, count: int) -> list[int]:
    """Runs whose bodies are at work in pods until they are told to go."""
    await stage.publish()
    runs = [await stage.trigger("pod_holding", "pod") for _ in range(count)]
    await eventually(lambda: len(begun(stage, runs)) == count, BEGIN_SECONDS, pause_seconds=0.05)
    return runs


def begun(stage: Stage, runs: list[int], epoch: int = 1) -> dict[int, Effect]:
    """The begin of that epoch's body, by run. Its service is the name of its pod."""
    return {e.run_id: e for e in effects_of(stage, "begin") if e.run_id in runs and e.epoch == epoch}


async def expect_once(stage: Stage, runs: list[int]) -> None:
    """All of them succeeded, each with its first attempt: what went wrong cost nobody anything."""
    rows = await stage.cluster.watch.must(
        "select r.run_id, r.state::text, k.epoch, k.reason from run_status r join task k using (run_id) where run_id = any(%s)",
        runs,
    )
    stage.expect({row[0] for row in rows} == set(runs), "not every run has a task")
    wrong = [row for row in rows if row[1] != "success" or row[2] != 1]
    stage.expect(not wrong, f"did not succeed with their first attempt: {wrong}")


async def expect_nothing_left(stage: Stage) -> None:
    pods = pods_of(stage)
    try:
        await eventually(pods.are_gone, 30, pause_seconds=0.1)
    except AssertionError:
        stage.expect(False, f"left in the cluster: {pods.names()}")


async def counts(stage: Stage, query: str, least: int, runs: list[int]) -> bool:
    return (await stage.cluster.watch.value(query, runs) or 0) >= least


async def all_submitted(stage: Stage, runs: list[int]) -> bool:
    submitted = "select count(*) from dispatch where run_id = any(%s) and submitted_at is not null"
    return await counts(stage, submitted, len(runs), runs)


def shape(is_full: bool) -> Shape:
    return far_shape()


def far_shape(schedulers: int = 1, **settings: object) -> Shape:
    """A local runner stands beside those that make pods: what is wrong there must not be felt here. Where no agent shall be given
    up, a machine that is busy with other things must not bring that about, either."""
    chosen: dict[str, Any] = {"agent_lost_after_seconds": 60.0, **settings}
    chosen["agent_report_seconds"] = chosen["agent_lost_after_seconds"] / 2
    return Shape(schedulers=schedulers, runners=1, slots=2, settings=chosen)
