"""N07 to N11: runners that die, freeze or are cut off with work in hand, and bodies that misbehave."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial

from tests.chaos.cluster import Shape
from tests.chaos.effects import Effect, read
from tests.chaos.faults import network, processes
from tests.chaos.machine import lacks_memory_group, lacks_pid_spaces, memory_group, own_pid_space
from tests.chaos.members import Member, is_running
from tests.chaos.record import Fault, boot_ns
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.chaos.usage import descendants
from tests.waiting import eventually

RERUN_SECONDS = 3.0
KILLED_AFTER_WAKING_SECONDS = 2.0
HOLDING = ("holding", "obedient")
# The clock of the evidence counts in hundredths of a second.
CLOCK_STEP_NS = 10_000_000


async def begin_tasks(stage: Stage, dag: str, count: int) -> list[int]:
    """Trigger so many runs and wait until the body of each is at work."""
    await stage.publish()
    runs = [await stage.trigger(dag, f"{dag}-{number}") for number in range(count)]
    await eventually(lambda: runs_begun(stage, runs), 30, pause_seconds=0.05)
    return runs


def runs_begun(stage: Stage, runs: list[int]) -> bool:
    return set(runs) <= {effect.run_id for effect in effects_of(stage, "begin")}


def effects_of(stage: Stage, *what: str, dags: tuple[str, ...] = ()) -> list[Effect]:
    """What bodies wrote, of all DAGs or of these."""
    found = read(stage.cluster.effects_file)
    return [effect for effect in found if effect.what in what and (not dags or effect.dag in dags)]


async def kill_runners(stage: Stage) -> None:
    """N07: what a dead runner held runs again elsewhere; at once where its death can be proven, by silence elsewhere."""
    took: list[float | None] = []
    noticed: list[float | None] = []
    for number in range(int(stage.scaled(20, 3))):
        # It runs again elsewhere, so there must be an elsewhere: who was killed before takes its time to come back.
        for each in stage.cluster.of_kind("runner"):
            await stage.runner_is_up(each)
        await begin_tasks(stage, "holding", 6)
        runner = _busiest(stage)
        killed_ns = boot_ns()
        took.append(await processes.kill_runner(stage.nemesis, runner))
        given_up = await stage.cluster.watch.value(
            "select min(at_ns) from chaos_audit.runner_move where what = 'gone' and at_ns >= %s",
            killed_ns - CLOCK_STEP_NS,
        )
        noticed.append(None if given_up is None else (given_up - killed_ns) / 1e9)
        stage.cluster.tell("go")
        await stage.runs_over()
        stage.cluster.untell("go")
        stage.note(f"kill {number}: {runner.name}")
    # What is left of the promised time is for the claim and the start.
    stage.expect_within(noticed, RERUN_SECONDS - 1, "death certified")
    stage.expect_within(took, RERUN_SECONDS, "rerun after kill -9 of a runner")


async def add_hidden_runner(stage: Stage) -> None:
    """A runner in a PID name-space of its own: to the others it might be on another machine."""
    hidden = await stage.cluster.add("runner", "runner-hidden", wrapper=own_pid_space())
    hidden.own_pid = 1


async def kill_hidden_runner(stage: Stage) -> None:
    """N07, where nobody can prove the death: never before the threshold, and soon after it."""
    hidden, other = stage.cluster.members["runner-hidden"], stage.cluster.members["runner-1"]
    await other.stop()
    await begin_tasks(stage, "holding", 3)
    other.start()
    hidden.is_kept = False
    took = await processes.kill_runner(stage.nemesis, hidden, part="hidden runner")
    lost_after = float(stage.cluster.settings["lost_after_seconds"])
    stage.cluster.tell("go")
    # Its last heartbeat may be one beat older than its death.
    heartbeat = float(stage.cluster.settings["heartbeat_seconds"])
    stage.expect(took is None or took >= lost_after - 2 * heartbeat, f"given up after {took} s, too early")
    stage.expect_within([took], lost_after + 6, "rerun by silence")


async def kill_fork_servers(stage: Stage) -> None:
    """N07c: what was forked from a killed process runs again, in whatever kind of process, and costs no task an attempt."""
    runs = await begin_tasks(stage, "holding", 4)
    for _ in range(int(stage.scaled(3, 1))):
        before = len(effects_of(stage, "begin", dags=HOLDING))
        stage.expect(await processes.kill_warm_parent(stage.nemesis) is not None, "no fork server was killed")
        await eventually(partial(_has_more, stage, before), 30, pause_seconds=0.05)
    stage.cluster.tell("go")
    await stage.runs_over(runs)
    rows = await stage.cluster.watch.must(
        "select r.state::text, k.attempt::int, k.epoch > 1 from run_status r join task k using (run_id) where run_id = any(%s)",
        runs,
    )
    stage.expect({row[:2] for row in rows} == {("success", 1)}, f"a killed fork server cost a task its attempt: {rows}")
    stage.expect(any(again for _, _, again in rows), "nothing ran again")


def _has_more(stage: Stage, before: int) -> bool:
    return len(effects_of(stage, "begin", dags=HOLDING)) > before


async def wake_frozen(stage: Stage) -> None:
    """N08: the stale end is refused, what still runs is killed soon after the wake-up, and the sink has one row."""
    runs = await begin_tasks(stage, "holding", 4)
    runner = _busiest(stage)
    assert runner.pid is not None
    mine = [e for e in effects_of(stage, "begin", dags=HOLDING) if e.service == runner.name]
    # (a) one body goes on and ends while its runner is frozen; (b) one is frozen with it; the others just go on.
    finished, frozen = mine[0], mine[-1]
    seconds = float(stage.cluster.settings["lost_after_seconds"]) + 4
    async with stage.nemesis.fault(Fault.FREEZE, runner.name, part="runner", seconds=seconds) as struck:
        runner.send(signal.SIGSTOP)
        _signal(frozen.pid, signal.SIGSTOP)
        stage.cluster.tell(f"go-run-{finished.run_id}-epoch-{finished.epoch}")
        wanted = {e.run_id for e in mine}
        try:
            await eventually(
                lambda: wanted <= {e.run_id for e in effects_of(stage, "begin") if e.epoch > 1},
                seconds + 15,
                pause_seconds=0.1,
            )
        except AssertionError:
            stage.expect(False, "what the frozen runner held was not run again elsewhere")
        _signal(frozen.pid, signal.SIGCONT)
        runner.send(signal.SIGCONT)
    woken_ns = boot_ns()
    left = [e.pid for e in mine if e is not finished]
    with suppress(AssertionError):
        await eventually(lambda: not any(map(is_running, left)), 15, pause_seconds=0.02)
    took = (boot_ns() - woken_ns) / 1e9
    stage.expect_within([took], KILLED_AFTER_WAKING_SECONDS, "stale bodies killed after the wake-up")
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    stage.cluster.tell("go")
    await stage.runs_over()
    states = await stage.cluster.watch.must("select state::text from run_status where run_id = any(%s)", runs)
    stage.expect(all(state == "success" for (state,) in states), f"not all succeeded: {states}")


async def cut_runners(stage: Stage) -> None:
    """N09: a short cut loses nothing; a long one passes the work on, and `stop` bodies end before it does."""
    lost_after = float(stage.cluster.settings["lost_after_seconds"])
    await begin_tasks(stage, "holding", 3)
    await network.cut_runner(stage.nemesis, stage.scaled(5, 4))
    reaped = await stage.cluster.watch.value("select count(*) from runner where ended_at is not null")
    stage.expect(reaped == 0, f"a cut below the threshold cost {reaped} runners")
    await begin_tasks(stage, "obedient", 3)
    runner = _busiest(stage, "obedient")
    before = {e.run_id: e for e in effects_of(stage, "begin", dags=HOLDING) if e.service == runner.name}
    obedient = {r: e for r, e in before.items() if e.dag == "obedient"}
    cut_ns = boot_ns()
    ended: dict[int, float] = {}

    async def look() -> None:
        for run_id, effect in obedient.items():
            if run_id not in ended and not is_running(effect.pid):
                ended[run_id] = (boot_ns() - cut_ns) / 1e9

    async with stage.nemesis.fault(Fault.CUT, runner.name, part="runner long", seconds=lost_after + 6):
        stage.cluster.proxy.set(runner.name, network.CUTS["blackhole"][1])
        try:

            async def is_passed_on() -> bool:
                await look()
                return set(before) <= {e.run_id for e in effects_of(stage, "begin") if e.epoch > 1}

            with suppress(AssertionError):
                await eventually(is_passed_on, lost_after + 20, pause_seconds=0.05)
            again = {e.run_id: e for e in effects_of(stage, "begin") if e.epoch > 1}
            stage.expect(set(before) <= set(again), "a runner that was cut off for long kept its work")
        finally:
            stage.cluster.proxy.heal(runner.name)
    for run_id in obedient:
        passed_on = (again[run_id].at_ns - cut_ns) / 1e9 if run_id in again else None
        stage.expect(
            run_id in ended and (passed_on is None or ended[run_id] <= passed_on),
            f"on_lost_contact=stop: run {run_id}'s body ended after {ended.get(run_id)} s, passed on after {passed_on} s",
        )
    stage.cluster.tell("go")
    await stage.runs_over()


async def out_of_memory(stage: Stage) -> None:
    """N10: a body over its limit fails with that reason and nobody else notices; then the runner itself."""
    await stage.begin_load(seconds=stage.scaled(40, 8), quick=4)
    runs = [await stage.trigger("hungry", f"hungry-{number}") for number in range(int(stage.scaled(5, 1)))]
    await eventually(lambda: runs_begun(stage, runs), 30, pause_seconds=0.02)
    with memory_group(48 * 1024 * 1024) as group:
        greedy = [e for e in effects_of(stage, "begin") if e.run_id in runs]
        async with stage.nemesis.fault(Fault.OUT_OF_MEMORY, greedy[0].service, part="body", disturbs=()):
            for effect in greedy:
                with suppress(OSError):
                    (group / "cgroup.procs").write_text(str(effect.pid))
            await stage.runs_over(runs)
    reasons = await stage.cluster.watch.must("select reason from all_tasks where run_id = any(%s)", runs)
    stage.expect(all("out of memory" in (r or "") for (r,) in reasons), f"reasons: {reasons}")
    held = await begin_tasks(stage, "holding", 4)
    runner = _busiest(stage, "holding")
    assert runner.pid is not None
    with memory_group(4 * 1024 * 1024) as group:
        async with stage.nemesis.fault(Fault.OUT_OF_MEMORY, runner.name, part="runner") as struck:
            life = runner.lives[-1]
            life.cause = "out of memory"
            (group / "cgroup.procs").write_text(str(runner.pid))
            # It is touched the next time that it needs a page; new work makes it need some.
            for number in range(20):
                await stage.trigger("pulse", f"nudge-{number}")
            try:
                await eventually(lambda: life.ended_ns is not None, 20, pause_seconds=0.05)
            except AssertionError:
                runner.send(signal.SIGKILL)
                stage.note("the kernel did not end the runner; we did")
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    stage.cluster.tell("go")
    await stage.runs_over(held)


async def bad_bodies(stage: Stage) -> None:
    """N11: each ends with all its processes by its timeout and the grace, while its runner goes on."""
    await stage.begin_load(seconds=stage.scaled(30, 8), quick=4)
    runs = {dag: await stage.trigger(dag, dag) for dag in ("obstinate", "standstill")}
    async with stage.nemesis.fault(Fault.BODY, "runner-1", part="misbehaves"):
        await eventually(lambda: runs_begun(stage, list(runs.values())), 30, pause_seconds=0.02)
        pids = {e.pid for e in effects_of(stage, "begin", "hidden") if e.run_id in runs.values()}
        await stage.runs_over(list(runs.values()), within_seconds=20)
    stage.expect(len(pids) >= 3, f"not all bodies were seen: {pids}")
    left = [pid for pid in pids if is_running(pid)]
    stage.expect(not left, f"processes survived their timeout: {left}")
    rows = await stage.cluster.watch.must(
        "select t.dag, s.state::text, t.reason from all_tasks t join run_status s using (run_id) where run_id = any(%s)",
        list(runs.values()),
    )
    stage.expect(
        all(state == "failed" and "timeout" in (reason or "") for _, state, reason in rows), f"outcomes: {rows}"
    )


def _busiest(stage: Stage, *dags: str) -> Member:
    """The runner with most bodies (of those DAGs) at work."""
    begun = effects_of(stage, "begin", dags=dags or HOLDING)
    ended = {(e.run_id, e.epoch) for e in effects_of(stage, "end", "fail")}
    count = {m.name: 0 for m in stage.cluster.of_kind("runner")}
    for effect in begun:
        # A body that was killed with its runner wrote no end.
        count[effect.service] += (effect.run_id, effect.epoch) not in ended and is_running(effect.pid)
    return stage.cluster.members[max(count, key=lambda name: count[name])]


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        for child in descendants(pid):
            os.kill(child, number)


SCENARIOS = (
    Scenario(
        name="N07",
        title="kill -9 a runner in mid-task",
        play=kill_runners,
        shape=lambda is_full: Shape(schedulers=1, runners=3 if is_full else 2, slots=8),
        required=("J4", "J7", "J8"),
    ),
    Scenario(
        name="N07b",
        title="kill -9 a runner whose death nobody can prove",
        play=kill_hidden_runner,
        prepare=add_hidden_runner,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J4", "J7", "J8"),
        needs=lacks_pid_spaces,
    ),
    Scenario(
        name="N07c",
        title="kill -9 the fork servers of a runner in mid-task",
        play=kill_fork_servers,
        shape=lambda is_full: Shape(schedulers=1, runners=1, slots=8),
        required=("J4", "J7", "J8"),
    ),
    Scenario(
        name="N08",
        title="freeze a runner past its lease, with and without its bodies, and wake it",
        play=wake_frozen,
        shape=lambda is_full: Shape(schedulers=1, runners=2),
        required=("J5", "J12"),
    ),
    Scenario(
        name="N09",
        title="cut a runner off for a short and for a long time",
        play=cut_runners,
        shape=lambda is_full: Shape(schedulers=1, runners=2, slots=8),
        required=("J7", "J12"),
    ),
    Scenario(
        name="N10",
        title="a body, and then a runner, over its memory limit",
        play=out_of_memory,
        shape=lambda is_full: Shape(schedulers=1, runners=2),
        required=("J8",),
        needs=lacks_memory_group,
    ),
    Scenario(
        name="N11",
        title="bodies that ignore SIGTERM, hide processes or stand still",
        play=bad_bodies,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J8",),
    ),
)
