"""N27b to N29b: agents in pods, whose answers are lost, whose API is away, and who are killed, frozen and woken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from evertick.domain.attempt import TaskKey
from tests.chaos.cluster import Shape
from tests.chaos.effects import Effect
from tests.chaos.faults import remote
from tests.chaos.machine import false_clock, lacks_false_clock
from tests.chaos.members import is_running
from tests.chaos.pods import API, Pods
from tests.chaos.proxy import Mode
from tests.chaos.record import Fault, boot_ns
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.clocks import clock_of, set_clock
from tests.chaos.scenarios.in_pods import (
    BEGIN_SECONDS,
    RUN_SECONDS,
    begin_pods,
    begun,
    expect_nothing_left,
    expect_once,
    far_shape,
    pods_of,
    prepare_one,
    shape,
)
from tests.chaos.stage import Stage
from tests.waiting import elapse, eventually

# What is asked of the API in an attempt's life; the lines of its log go out while it runs.
ASKED = ("/start", "/bundles", "/logs", "/heartbeat", "/finish")
KILLED_AFTER_WAKING_SECONDS = 2.0
NOTICED_SECONDS = 3.0
# Longer than any token of an attempt lasts, and shorter than a start token does.
HOUR = 3600.0


async def lost_answers(stage: Stage) -> None:
    """N27b: what is asked again is answered alike; a second agent of an attempt that has one is refused, and runs nothing."""
    pods = pods_of(stage)
    held = await begin_pods(stage, 2)
    runs = []
    for _ in range(int(stage.scaled(20, 1))):
        for match in stage.dice.sample(ASKED, len(ASKED)):
            runs.append(await stage.trigger("pod_chatter" if match == "/logs" else "pod_ledger", "pod"))
            stage.expect(await remote.lose_answer(stage.nemesis, pods, match), f"nobody asked for {match}")
    for part, mode in (("blackhole", Mode.blackhole()), ("deaf", Mode.one_way("up")), ("mute", Mode.one_way("down"))):
        await remote.cut_agents(stage.nemesis, pods, stage.scaled(5, 1.5), mode, part)
    await _be_false(stage, pods, held)
    await stage.runs_over(runs, within_seconds=RUN_SECONDS)
    stage.cluster.tell("go")
    await stage.runs_over(held, within_seconds=RUN_SECONDS)
    await expect_once(stage, runs + held)
    await expect_nothing_left(stage)


async def _be_false(stage: Stage, pods: Pods, held: list[int]) -> None:
    """Somebody else has the tokens of attempts that are being run, and makes up others."""
    false = remote.FalseAgent(stage, pods)
    for effect in begun(stage, held).values():
        key, session = TaskKey(effect.run_id, 0, -1), _session_of(effect)
        for _ in range(int(stage.scaled(50, 5))):
            await false.start(effect.service)
            await false.finish(key, effect.epoch + 1, session)
            await false.finish(key, effect.epoch, session + 1)
            await false.heartbeat(key, effect.epoch, session + 1)
    first = next(iter(begun(stage, held).values()))
    await false.start_process(first.service)


def _session_of(effect: Effect) -> int:
    """The session of an attempt stands at the end of its pod's name."""
    return int(effect.service.rpartition("-")[2], 16)


async def prepare_clocks(stage: Stage) -> None:
    """An API whose clock can be set, where the machine can do that."""
    await prepare_one(stage)
    if not lacks_false_clock():
        file = clock_of(stage.nemesis, API)
        set_clock(file, 0)
        api = stage.cluster.members[API]
        api.environment = {**api.environment, **false_clock(file)}


async def api_away(stage: Stage) -> None:
    """N28b: what runs goes on and what ends is recorded, although the API is away for longer than an agent may be silent, with
    tokens that have expired, and with an API that restarts again and again."""
    api, nemesis = stage.cluster.members[API], stage.nemesis
    held = await begin_pods(stage, 3)
    (ends_meanwhile, *others) = (begun(stage, held)[run] for run in held)
    async with AsyncExitStack() as stack:
        async with remote.api_away(nemesis, api):
            late = [await stage.trigger("pod_ledger", "late") for _ in range(2)]
            stage.cluster.tell(f"go-run-{ends_meanwhile.run_id}-epoch-1")
            # Its runner needs no API to read what its agent left.
            await stage.runs_over([ends_meanwhile.run_id], within_seconds=RUN_SECONDS)
            await elapse(1.5 * float(stage.cluster.settings["agent_lost_after_seconds"]))
            stage.expect(_alive(others), "a body ended because the API was away")
            await stack.enter_async_context(_hour_ahead(stage))
        await stage.runs_over([ends_meanwhile.run_id, *late], within_seconds=RUN_SECONDS)
    for _ in range(int(stage.scaled(30, 3))):
        await remote.kill_api(nemesis, api)
        await elapse(stage.dice.uniform(0.3, 1.5))
    stage.expect(_alive(others), "a body ended because the API restarted")
    stage.cluster.tell("go")
    await stage.runs_over(held, within_seconds=RUN_SECONDS)
    await expect_once(stage, held + late)
    lost = await stage.cluster.watch.value("select count(*) from runner where end_reason like 'agent_lost%%'")
    stage.expect(lost == 0, f"{lost} agents were given up although they lived")
    await expect_nothing_left(stage)


@asynccontextmanager
async def _hour_ahead(stage: Stage) -> AsyncIterator[None]:
    """By the API's clock every token of an attempt that was made before has expired. A heartbeat that is being answered brings
    a new one, so this begins while nobody answers."""
    if reason := lacks_false_clock():
        stage.note(f"no token expired: {reason}")
        yield
        return
    file = clock_of(stage.nemesis, API)
    async with stage.nemesis.fault(Fault.CLOCK, API, part="api", jump=HOUR):
        set_clock(file, HOUR)
        try:
            yield
        finally:
            set_clock(file, 0)
    refused = "select count(*) from audit_log where action = 'refuse' and detail->>'needs' = 'agent' and detail->>'why' = 'refused'"
    stage.expect(await stage.cluster.watch.value(refused), "no token was refused, so none had to be renewed")


def _alive(begins: list[Effect]) -> bool:
    return all(is_running(effect.pid) for effect in begins)


async def dying_agents(stage: Stage) -> None:
    """N29b: whoever is dead is noticed at once with the cluster's reason; whoever is frozen is given up by silence, refused when it
    wakes, and its body killed."""
    for _ in range(int(stage.scaled(10, 1))):
        await _kill_and_freeze(stage)
        stage.cluster.untell("go")
    await expect_nothing_left(stage)


async def _kill_and_freeze(stage: Stage) -> None:
    pods, nemesis = pods_of(stage), stage.nemesis
    held = await begin_pods(stage, 4)
    killed, starved, deaf, frozen = (begun(stage, held)[run] for run in held)
    noticed: list[float | None] = []
    for effect, is_out_of_memory in ((killed, False), (starved, True)):
        killed_ns = boot_ns()
        await remote.kill_agent(nemesis, pods, effect.service, is_out_of_memory=is_out_of_memory)
        noticed.append(await _noticed(stage, effect, killed_ns))
    stage.expect_within(noticed, NOTICED_SECONDS, "a dead agent is noticed")
    silence = float(stage.cluster.settings["agent_lost_after_seconds"]) + 30
    # The body of one goes on and ends while its agent is frozen; the other is frozen with its agent.
    async with (
        remote.frozen_agent(nemesis, pods, deaf.service),
        remote.frozen_agent(nemesis, pods, frozen.service, frozen.pid),
    ):
        stage.cluster.tell(f"go-run-{deaf.run_id}-epoch-1")
        again = [deaf.run_id, frozen.run_id]
        try:
            await eventually(lambda: len(begun(stage, again, 2)) == 2, silence + BEGIN_SECONDS, pause_seconds=0.1)
        except AssertionError:
            stage.expect(False, "what frozen agents held was not run again")
        stage.expect(is_running(frozen.pid), "a frozen agent's pod was gone before it woke: nothing was shown")
    woken_ns = boot_ns()
    with suppress(AssertionError):
        await eventually(lambda: not is_running(frozen.pid), 20, pause_seconds=0.02)
    stage.expect_within(
        [(boot_ns() - woken_ns) / 1e9], KILLED_AFTER_WAKING_SECONDS, "a stale body is killed after its agent woke"
    )
    await eventually(lambda: len(begun(stage, held, 2)) == 4, BEGIN_SECONDS, pause_seconds=0.05)
    stage.cluster.tell("go")
    await stage.runs_over(held, within_seconds=RUN_SECONDS)
    await _expect_reasons(
        stage, {killed.run_id: "exit code 137", starved.run_id: "OOMKilled"}, [deaf.run_id, frozen.run_id]
    )


async def _noticed(stage: Stage, effect: Effect, since_ns: int) -> float | None:
    """How long it took until somebody recorded that it is gone."""
    gone = "select at_ns from chaos_audit.runner_move where what = 'gone' and session = %s"
    with suppress(AssertionError):
        at_ns = await eventually(lambda: stage.cluster.watch.value(gone, _session_of(effect)), 30, pause_seconds=0.05)
        return max(0.0, (at_ns - since_ns) / 1e9)
    return None


async def _expect_reasons(stage: Stage, words: dict[int, str], silent: list[int]) -> None:
    """Each was lost once, says why, and succeeded with its second attempt."""
    rows = await stage.cluster.watch.must(
        "select a.run_id, a.reason, r.state::text, k.epoch from attempt a join task k using (run_id, idx, map_index)"
        " join run_status r using (run_id) where a.epoch = 1 and run_id = any(%s)",
        [*words, *silent],
    )
    stage.expect(len(rows) == len(words) + len(silent), f"not each of them was lost once: {rows}")
    for run_id, reason, state, epoch in rows:
        stage.expect((state, epoch) == ("success", 2), f"run {run_id} is {state} in epoch {epoch}")
        stage.expect(reason.startswith("agent_lost") and words.get(run_id, "") in reason, f"run {run_id}: {reason}")


def patient(is_full: bool) -> Shape:
    """Runners are not what this is about."""
    return far_shape(lost_after_seconds=60.0, agent_lost_after_seconds=60.0 if is_full else 12.0)


def unhurried(is_full: bool) -> Shape:
    """The pod of an agent that was given up is deleted with a grace, in which it wakes."""
    return far_shape(agent_lost_after_seconds=9.0, stop_grace_seconds=120.0)


SCENARIOS = (
    Scenario(
        name="N27b",
        title="agents lose answers, and others use their tokens",
        play=lost_answers,
        prepare=prepare_one,
        shape=shape,
        required=("J4", "J5", "J12"),
    ),
    Scenario(
        name="N28b",
        title="agents without their API, with expired tokens, and with one that restarts",
        play=api_away,
        prepare=prepare_clocks,
        shape=patient,
        required=("J4", "J7", "J8", "J12"),
    ),
    Scenario(
        name="N29b",
        title="agents that die, and agents that freeze and wake",
        play=dying_agents,
        prepare=prepare_one,
        shape=unhurried,
        required=("J4", "J5", "J7", "J8", "J11", "J12"),
    ),
)
