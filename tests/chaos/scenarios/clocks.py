"""N21: the wall clock of a scheduler and of a runner jumps, and then that of the database itself."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.cluster import Shape
from tests.chaos.machine import false_clock, lacks_false_clock
from tests.chaos.members import Member
from tests.chaos.nemesis import Nemesis
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.waiting import elapse, eventually

JUMPS_SECONDS = (300, -300, 3600, -3600, 86_400, -86_400)


def set_clock(file: Path, seconds: float) -> None:
    """By renaming: a process that looks meanwhile sees the old text or the new."""
    draft = file.with_suffix(".new")
    draft.write_text(f"{seconds:+.0f}\n")
    draft.rename(file)


async def add_skewed(stage: Stage, kind: str) -> Member:
    """A service whose clock can be set."""
    name = f"{kind}-skewed"
    set_clock(clock_of(stage.nemesis, name), 0)
    return await stage.cluster.add(kind, name, extra=false_clock(clock_of(stage.nemesis, name)))


def clock_of(nemesis: Nemesis, name: str) -> Path:
    return nemesis.cluster.folder / f"{name}.clock"


async def skew(nemesis: Nemesis, name: str, seconds: float, jump: float) -> float | None:
    """Its clock is off by `jump` for so many seconds, and right again from one moment to the next."""
    if not nemesis.is_free(name):
        return None
    async with nemesis.fault(Fault.CLOCK, name, part=name.split("-")[0], jump=jump) as struck:
        set_clock(clock_of(nemesis, name), jump)
        try:
            await elapse(seconds)
        finally:
            set_clock(clock_of(nemesis, name), 0)
    return await nemesis.recovery(struck, nemesis.works_again())


async def add_skewed_services(stage: Stage) -> None:
    for kind in ("scheduler", "runner"):
        await add_skewed(stage, kind)


async def skewed_services(stage: Stage) -> None:
    """Database time and the process's own steady clock decide, so nobody notices."""
    scheduler, runner = stage.cluster.members["scheduler-skewed"], stage.cluster.members["runner-skewed"]
    for other in stage.cluster.of_kind("scheduler"):
        if other is not scheduler:
            await other.stop()

    async def leads() -> bool:
        return [member for member, _ in await stage.cluster.leaders()] == [scheduler]

    await eventually(leads, 30, pause_seconds=0.05)
    await stage.begin_load(seconds=stage.scaled(120, 14), quick=6, steady=4, paces=(2, 3), per_second=1)
    for jump in JUMPS_SECONDS:
        for name in (scheduler.name, runner.name):
            await skew(stage.nemesis, name, stage.scaled(8, 0.8), jump)
    lost = await stage.cluster.watch.value("select count(*) from runner where end_reason like 'agent_lost%%'")
    stage.expect(lost == 0, f"{lost} runners were given up because of a clock")


async def skewed_database(stage: Stage) -> None:
    """What falls due by the jump fires once, and not again when the clock goes back; nobody is reaped."""
    held = await stage.hold_tasks(3)
    # No retries here: one that is put off while the clock is an hour ahead waits for that hour.
    await stage.begin_load(
        seconds=stage.scaled(60, 16), quick=3, steady=4, paces=(2, 3), steady_dags=("chain",), trigger_dags=("chain",)
    )
    await elapse(2)
    for jump in (3600, -3600):
        async with stage.nemesis.fault(Fault.CLOCK, "postgres", part="postgres", jump=jump) as struck:
            set_clock(stage.cluster.folder / "postgres.clock", jump)
            await elapse(stage.scaled(20, 3))
            set_clock(stage.cluster.folder / "postgres.clock", 0)
        await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    lost = await stage.cluster.watch.value("select count(*) from runner where end_reason like 'agent_lost%%'")
    stage.expect(lost == 0, f"{lost} runners were given up because of the database's clock")
    stage.cluster.tell("go")
    await stage.runs_over(held)


SCENARIOS = (
    Scenario(
        name="N21",
        title="the clocks of a leading scheduler and a runner jump by minutes, hours and days",
        play=skewed_services,
        prepare=add_skewed_services,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J1", "J2", "J3"),
        needs=lacks_false_clock,
    ),
    Scenario(
        name="N21b",
        title="the database's clock jumps an hour ahead and back",
        play=skewed_database,
        shape=lambda is_full: Shape(schedulers=2, runners=1, has_false_clock=True),
        required=("J1", "J2"),
        # By that clock everything is early or late.
        without=("J3", "J11", "J13"),
        needs=lacks_false_clock,
    ),
)
