"""N31 and N32: schedules that are edited while they fire, runs that must not overlap, and runs that nobody closes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from datetime import timedelta

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import Conflict
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.dags import pause, unpause
from evertick.engine.schedules import put_schedule
from tests.chaos.cluster import Shape
from tests.chaos.faults import network, planning, processes
from tests.chaos.record import Answer, Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.waiting import elapse, eventually

DAG = "pulse"


@dataclass(slots=True)
class Editor:
    """Changes schedules by compare-and-set, as fast as asked; a stale one is told so."""

    stage: Stage
    number: int
    dice: random.Random
    changed: int = 0
    conflicts: int = 0
    asked: int = field(default=0)

    async def edit(self, seconds: float, per_second: float) -> None:
        async with await connect(self.stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            deadline = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < deadline:
                known = await schedules.of_dag(conn, dag=DAG)
                chosen = self.dice.choice(known)
                await elapse(self.dice.uniform(0, 2 / per_second))
                await self._put(conn, chosen.name, chosen.version)

    async def _put(self, conn: object, name: str, version: int) -> None:
        self.asked += 1
        request = f"edit-{self.number}-{self.asked}"
        pace = timedelta(seconds=self.dice.choice((1, 1.5, 2, 3)))
        end_at = self.stage.load.end_at if self.stage.load else None
        clients = self.stage.cluster.clients
        clients.asked("put_schedule", request=request, schedule=name, expected=version)
        schedule = NamedSchedule(name=name, spec=parse_schedule(pace, end_at=end_at), params={"schedule": name})
        try:
            await put_schedule(
                conn,  # type: ignore[arg-type]
                dag=DAG,
                schedule=schedule,
                actor=Actor(f"editor-{self.number}"),
                expected_version=version,
                request=request,
            )
        except Conflict:
            self.conflicts += 1
            clients.answered(request, Answer.ERROR)
        else:
            self.changed += 1
            clients.answered(request, Answer.OK)


async def edit_storm(stage: Stage) -> None:
    """N31: many editors at once; the loser of each race is told, and what fired follows the version in force."""
    await stage.begin_load(seconds=stage.scaled(60, 12), quick=10)
    editors = [Editor(stage, number, random.Random(number)) for number in range(4)]
    seconds = stage.scaled(50, 8)
    async with stage.nemesis.fault(Fault.EDITS, "all"):
        await asyncio.gather(
            *(editor.edit(seconds, 50 / len(editors)) for editor in editors), _pause_now_and_then(stage, seconds)
        )
    changed, conflicts = sum(e.changed for e in editors), sum(e.conflicts for e in editors)
    stage.note(f"{changed} changes, {conflicts} conflicts")
    stage.expect(changed and conflicts, "no two editors met")


async def _pause_now_and_then(stage: Stage, seconds: float) -> None:
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        for number in range(int(seconds / 2)):
            for verb, name in ((pause, "pause"), (unpause, "unpause")):
                request = f"{name}-{number}"
                stage.cluster.clients.asked(name, request=request, dag=DAG)
                await verb(conn, dag=DAG, actor=Actor(request))
                stage.cluster.clients.answered(request, Answer.OK)
                await elapse(0.8)


async def one_at_a_time(stage: Stage) -> None:
    """N31b: schedules whose runs must not overlap, each policy, while leaders and runners die and leaders overlap."""
    await stage.begin_load(seconds=stage.scaled(120, 16), lingering=2, quick=2)
    deeds = (processes.kill_leader, planning.overlap, processes.kill_runner, network.drop_reply)
    for _ in range(int(stage.scaled(6, 1))):
        for deed in deeds:
            await deed(stage.nemesis)
            await elapse(stage.dice.uniform(0.5, 1.5))

    async def have_met() -> dict[str, int] | None:
        """What met an open run, as soon as each policy has something to show."""
        met = dict(await stage.cluster.watch.must("select reason, sum(count)::int from skip_record group by 1"))
        met["canceled"] = await stage.cluster.watch.value("select count(*) from run_status where state = 'canceled'")
        return met if met["canceled"] and {"overlap_skip", "overlap_queue_one"} <= set(met) else None

    found = await eventually(have_met, within_seconds=stage.scaled(120, 16), pause_seconds=0.2)
    stage.note(f"met an open run: {found}")


async def orphans(stage: Stage) -> None:
    """N32: a run whose tasks have all ended and that nobody closed is closed; one with a live task is left alone."""
    held = await stage.hold_tasks(1)
    ended = [await stage.trigger("pulse", f"orphan-{number}") for number in range(3)]
    await stage.runs_over(ended)
    async with stage.nemesis.fault(Fault.POISON, "all", part="unclosed run"):
        # Past the audit: this never happened by any verb.
        async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            await conn.execute("set session_replication_role = replica")
            await conn.execute(
                "update run_status set state = 'running', open_tasks = 1, finished_at = null where run_id = any(%s)",
                [ended],
            )
        await stage.runs_over(ended, within_seconds=stage.scaled(330, 30))
    states = await stage.cluster.watch.must("select state::text from run_status where run_id = any(%s)", ended)
    stage.expect(all(state == "success" for (state,) in states), f"closed as {states}")
    decoy = await stage.cluster.watch.value("select state::text from run_status where run_id = any(%s)", held)
    stage.expect(decoy == "running", f"a run with a live task was closed as {decoy}")
    stage.cluster.tell("go")
    await stage.runs_over(held)


SCENARIOS = (
    Scenario(
        name="N31",
        title="schedules are edited and paused while they fire",
        play=edit_storm,
        shape=lambda is_full: Shape(schedulers=2, runners=1),
        required=("J1", "J2", "J10"),
    ),
    Scenario(
        name="N31b",
        title="runs that must not overlap, while leaders and runners die",
        play=one_at_a_time,
        shape=lambda is_full: Shape(schedulers=2, runners=2, slots=8),
        required=("J1", "J2", "J16"),
    ),
    Scenario(
        name="N32",
        title="runs that nobody closed, and a decoy",
        play=orphans,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J8",),
        without=("J6",),
    ),
)
