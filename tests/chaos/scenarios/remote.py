"""N27 and N28: tasks are pods, and the cluster's API is slow, wrong or away."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from tests.chaos.faults.remote import Spell, cast, cluster_away
from tests.chaos.pods import IMAGE
from tests.chaos.record import Fault, boot_ns
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.in_pods import (
    BEGIN_SECONDS,
    DISPATCH_LOST_SECONDS,
    FIRST,
    RUN_SECONDS,
    all_submitted,
    begin_pods,
    expect_nothing_left,
    expect_once,
    pods_of,
    prepare_one,
    shape,
)
from tests.chaos.stage import Size, Stage
from tests.executors.kubernetes.server import Fault as KubeFault
from tests.executors.kubernetes.server import internal, quota_conflict, too_many
from tests.waiting import elapse, eventually

# A fifth of a second over the tick: what planning may take with whatever is wrong elsewhere.
TICK_SECONDS = 1.2


async def expect_ticks(stage: Stage, since_ns: int) -> None:
    """Planning goes on as ever beside an executor that does not."""
    rows = await stage.cluster.watch.must(
        "select at_ns from chaos_audit.leader_commit where kind = 'planning' and at_ns >= %s order by place", since_ns
    )
    at = [row[0] for row in rows]
    gaps = sorted((later - earlier) / 1e9 for earlier, later in pairwise(at))
    stage.expect(gaps, "nobody planned")
    if gaps:
        p99 = gaps[int(len(gaps) * 0.99)]
        stage.note(f"gap between ticks: p99 {p99:.2f} s, worst {gaps[-1]:.2f} s of {len(gaps)}")
        if stage.is_full:
            stage.expect(p99 <= TICK_SECONDS, f"ticks came {p99:.2f} s apart (p99), promised {TICK_SECONDS:g} s")


def spells(stage: Stage) -> list[Spell]:
    """In an order of the seed's. Each has its request: what is created, looked at, and taken away in the end."""
    slow = stage.scaled(30, 1.5)
    hang: dict[str, Any] = {"after": True, "times": 1}
    found = [
        Spell(
            kind=Fault.DROP_REPLY, part="create, then broken", fault=KubeFault("create", "pods", breaks=True, **hang)
        ),
        Spell(kind=Fault.ERRORS, part="429", fault=KubeFault("create", "pods", times=1, failure=too_many(1))),
    ]
    if stage.size is not Size.SHORT:
        found += [
            Spell(kind=Fault.DROP_REPLY, part="create, then silence", fault=KubeFault("create", "pods", **hang)),
            Spell(kind=Fault.ERRORS, part="500", fault=KubeFault("create", "pods", times=2, failure=internal())),
            Spell(kind=Fault.ERRORS, part="409", fault=KubeFault("create", "pods", times=1, failure=quota_conflict())),
            Spell(kind=Fault.DROP_REPLY, part="secret", fault=KubeFault("create", "secrets", breaks=True, **hang)),
            Spell(
                kind=Fault.ERRORS, part="500 of a list", fault=KubeFault("list", "pods", times=2, failure=internal())
            ),
            Spell(kind=Fault.ERRORS, part="500 of a delete", fault=KubeFault("delete", times=2, failure=internal())),
            Spell(kind=Fault.DROP_REPLY, part="delete", fault=KubeFault("delete", breaks=True, **hang)),
        ]
        for _ in range(int(stage.scaled(20, 3))):
            latency = stage.dice.uniform(0.1, slow)
            found.append(Spell(kind=Fault.DELAY, part="any", fault=KubeFault(times=3, latency_seconds=latency)))
    stage.dice.shuffle(found)
    return found


async def bad_weather(stage: Stage) -> None:
    """N27: planning feels nothing, a pod that is there already is success, and each attempt has one."""
    pods = pods_of(stage)
    began_ns = boot_ns()
    await stage.begin_load(seconds=stage.scaled(120, 12, 3), quick=2)
    runs = []
    for spell in spells(stage):
        runs.append(await stage.trigger("pod_ledger", "pod"))
        await cast(stage.nemesis, pods, spell)
        pods.server.expire_lists()
    pods.server.objects.compact()
    pods.server.end_watches()
    await stage.runs_over(runs, within_seconds=stage.scaled(3600, RUN_SECONDS))
    await expect_once(stage, runs)
    await expect_ticks(stage, began_ns)
    there_already = pods.server.refused["create pods 409 AlreadyExists"]
    stage.expect(there_already, "no pod was ever found to be there already")
    stage.note(f"{len(pods.node.started)} pods, {there_already} times there already")
    strays = [each for each in stage.cluster.members[FIRST].events("orphan_removed") if each.get("phase") == "ended"]
    stage.expect(not strays, f"pods that had ended and were being deleted were taken for strays: {strays}")
    await expect_nothing_left(stage)


async def executor_away(stage: Stage) -> None:
    """N28: nothing is given up while the cluster's API is away; what runs there goes on, and ends."""
    pods = pods_of(stage)
    held = await begin_pods(stage, int(stage.scaled(10, 2, 1)))
    # These are accepted, but nobody has seen them since, and they cannot begin yet: what could be taken for lost.
    blind = KubeFault("list", failure=internal())
    pods.server.faults.append(blind)
    pods.node.images.discard(IMAGE)
    accepted = [await stage.trigger("pod_ledger", "accepted") for _ in range(int(stage.scaled(10, 2, 1)))]
    await eventually(lambda: all_submitted(stage, accepted), BEGIN_SECONDS, pause_seconds=0.05)
    until = time.monotonic() + stage.scaled(600, 2 * DISPATCH_LOST_SECONDS)
    async with cluster_away(stage.nemesis, pods):
        pods.server.faults.remove(blind)
        waiting = [await stage.trigger("pod_ledger", "waiting") for _ in range(int(stage.scaled(20, 2, 1)))]
        stage.cluster.tell("go")
        await stage.runs_over(held, within_seconds=RUN_SECONDS)
        await elapse(max(0.0, until - time.monotonic()))
        # The node needs no API to begin them, nor do their agents.
        pods.node.images.add(IMAGE)
        await stage.runs_over(accepted, within_seconds=RUN_SECONDS)
    await stage.runs_over(waiting, within_seconds=RUN_SECONDS)
    await expect_once(stage, held + accepted + waiting)
    said = stage.cluster.members[FIRST].events("executor_unavailable")
    stage.expect(said, "the runner never said that the executor is away")
    lost = await stage.cluster.watch.value("select count(*) from attempt where reason like 'dispatch_lost%%'")
    stage.expect(lost == 0, f"{lost} attempts were given up while their executor was away")
    await expect_nothing_left(stage)


SCENARIOS = (
    Scenario(
        name="N27",
        title="a slow and failing Kubernetes API",
        play=bad_weather,
        prepare=prepare_one,
        shape=shape,
        required=("J1", "J2", "J3", "J4", "J12", "J13"),
    ),
    Scenario(
        name="N28",
        title="the Kubernetes API is away with work in line",
        play=executor_away,
        prepare=prepare_one,
        shape=shape,
        required=("J4", "J7", "J8", "J12"),
    ),
)
