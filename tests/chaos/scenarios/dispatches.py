"""N29: whoever hands tasks over dies or stands still with a full queue in memory, and pods vanish before they begin."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.chaos.faults import processes
from tests.chaos.members import Member
from tests.chaos.nemesis import Condition
from tests.chaos.pods import IMAGE, KUBERNETES, SPACE
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.in_pods import (
    BEGIN_SECONDS,
    DISPATCH_LOST_SECONDS,
    FIRST,
    RUN_SECONDS,
    all_submitted,
    begin_pods,
    counts,
    expect_nothing_left,
    expect_once,
    far_shape,
    pods_of,
    prepare_pods,
)
from tests.chaos.stage import Stage
from tests.executors.kubernetes.server import Fault as KubeFault
from tests.waiting import eventually

SECOND = "runner-pods-2"
# After what makes it lost: at most two looks, one tick of the runner, and what a busy machine takes for them.
NOTICED_SECONDS = DISPATCH_LOST_SECONDS + 6.0
# A third of the silence that gives a runner up, and the ticks of those who count it and act on it.
ADOPTED_SECONDS = 7.0

Strike = Callable[[Stage, Member], Awaitable[float | None]]


async def prepare_two(stage: Stage) -> None:
    """One worker each: what is not in its hands is in memory."""
    pods = await prepare_pods(stage, dispatch_workers=1)
    await pods.add_runner(SECOND, dispatch_workers=1, dispatch_lost_seconds=DISPATCH_LOST_SECONDS)


async def lost_dispatches(stage: Stage) -> None:
    """N29: a queue in memory dies with its runner, and the leader with it, or stands still with it; another runner goes on with all
    of it, and with what runs already. What the cluster itself lost is noticed, and runs again."""
    held = await begin_pods(stage, 2)
    adopted: list[float | None] = []
    runs: list[int] = []
    for number in range(int(stage.scaled(10, 2, 1))):
        strike = _kill_holder if number % 2 == 0 else _freeze_holder
        runs += await _strike_with_full_queue(stage, strike, adopted)
    stage.expect_within(adopted, ADOPTED_SECONDS, "what a lost runner had is looked after by another")
    await _lose_pods(stage, int(stage.scaled(20, 2, 1)))
    stage.cluster.tell("go")
    await stage.runs_over(held + runs, within_seconds=stage.scaled(1200, RUN_SECONDS))
    await expect_once(stage, held + runs)
    await expect_nothing_left(stage)


async def _strike_with_full_queue(stage: Stage, strike: Strike, adopted: list[float | None]) -> list[int]:
    """Whoever of the two runners has most in memory only is hit."""
    pods = pods_of(stage)
    for name in (FIRST, SECOND):
        await stage.runner_is_up(stage.cluster.members[name])
    # Short enough that what is in hand arrives, late, while its successor is about to hand it over, too.
    slow = KubeFault("create", "pods", latency_seconds=0.6)
    pods.server.faults.append(slow)
    runs = [await stage.trigger("pod_ledger", "queued") for _ in range(int(stage.scaled(20, 6, 3)))]
    queued = "select count(*) from task where run_id = any(%s) and state <> 'available'"
    await eventually(lambda: counts(stage, queued, len(runs), runs), 30, pause_seconds=0.02)
    owners = await stage.cluster.watch.must(
        "select r.runner_id, count(*), count(*) filter (where d.tries = 0) from dispatch d join runner r on r.session = d.owner"
        " group by 1 order by 3 desc, 2 desc"
    )
    victim = stage.cluster.members[owners[0][0]]
    stage.note(f"{victim.name} had {owners[0][1]} elsewhere, {owners[0][2]} of them in memory only")
    adopted.append(await strike(stage, victim))
    pods.server.faults.remove(slow)
    return runs


async def _kill_holder(stage: Stage, victim: Member) -> float | None:
    """kill -9 of the runner and of the leader. It comes back when the other has all."""
    nemesis, until = stage.nemesis, _has_nothing(stage, victim)
    victim.is_kept = False
    async with nemesis.fault(Fault.KILL, victim.name, part="runner of an executor", until=until) as struck:
        await asyncio.gather(victim.kill(), processes.kill_leader(nemesis))
    victim.start()
    return struck.recovered_seconds


async def _freeze_holder(stage: Stage, victim: Member) -> float | None:
    """The runner stands still until the other has all, and then goes on with what it remembers."""
    until = _has_nothing(stage, victim)
    async with stage.nemesis.fault(Fault.FREEZE, victim.name, part="runner of an executor", until=until) as struck:
        victim.send(signal.SIGSTOP)
        try:
            with suppress(AssertionError):
                await eventually(until, 30, pause_seconds=0.05)
        finally:
            victim.send(signal.SIGCONT)
    return struck.recovered_seconds


def _has_nothing(stage: Stage, victim: Member) -> Condition:
    """Every attempt that it had elsewhere has another runner, which is there."""
    theirs = (
        "select count(*) from dispatch d left join runner r on r.session = d.owner and r.ended_at is null"
        " where r.session is null or r.runner_id = %s"
    )

    async def is_so() -> bool:
        found = await stage.cluster.watch.rows(theirs, victim.name)
        return found is not None and found[0][0] == 0

    return is_so


async def _lose_pods(stage: Stage, count: int) -> None:
    """Pods that were accepted and are taken off the cluster's books before they began."""
    pods = pods_of(stage)
    pods.node.images.discard(IMAGE)
    runs = [await stage.trigger("pod_ledger", "removed") for _ in range(count)]
    await eventually(lambda: all_submitted(stage, runs), BEGIN_SECONDS, pause_seconds=0.05)
    mine = [name for name in pods.names() if int(name.split("-")[1]) in runs]
    async with stage.nemesis.fault(Fault.REMOVED, KUBERNETES, part="pod") as struck:
        for name in mine:
            pods.server.objects.delete("pods", SPACE, name, {"gracePeriodSeconds": 0})
    given_up = "select count(*) from attempt where run_id = any(%s) and reason like 'dispatch_lost%%'"

    async def are_given_up() -> bool:
        return await counts(stage, given_up, count, runs)

    took = await stage.nemesis.recovery(struck, are_given_up)
    stage.expect_within([took], NOTICED_SECONDS, "what the cluster lost is noticed")
    pods.node.images.add(IMAGE)
    await stage.runs_over(runs, within_seconds=RUN_SECONDS)
    rows = await stage.cluster.watch.must(
        "select r.state::text, k.epoch from run_status r join task k using (run_id) where run_id = any(%s)", runs
    )
    stage.expect(
        set(rows) == {("success", 2)}, f"what the cluster lost did not end well with the second attempt: {rows}"
    )


SCENARIOS = (
    Scenario(
        name="N29",
        title="a runner dies or freezes with a full queue of dispatches",
        play=lost_dispatches,
        prepare=prepare_two,
        shape=lambda is_full: far_shape(schedulers=2),
        required=("J4", "J7", "J8", "J11", "J12"),
    ),
)
