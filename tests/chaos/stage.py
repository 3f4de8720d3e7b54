"""What a scenario has to work with: the installation, its nemesis, its load, and where to note what it demands."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from evertick.db.connect import Purpose, connect
from evertick.db.notify import Channel, notify
from evertick.domain.access import Actor
from evertick.engine.runs import trigger
from tests.chaos import effects
from tests.chaos.cluster import Cluster
from tests.chaos.dags import publish_specs
from tests.chaos.load import Load, LoadPlan
from tests.chaos.members import Member
from tests.chaos.nemesis import Nemesis
from tests.chaos.pods import Pods
from tests.chaos.record import Answer
from tests.chaos.zombie import Zombie
from tests.waiting import eventually

READY = 200


class Size(StrEnum):
    """As in the table of FAULTS; scaled to seconds, for the default run; or shorter still, for every test run."""

    FULL = "full"
    SCALED = "scaled"
    SHORT = "short"


# In the short form a runner is given up sooner, so that a scenario about that takes seconds.
SHORT_SETTINGS: dict[str, object] = {"lost_after_seconds": 5.0}
# It is played beside all other tests, so it asks whether things happen and not how soon.
SHORT_LIMITS: dict[str, float] = {
    "fire_tolerance_seconds": 15.0,
    "start_tolerance_seconds": 60.0,
    "recovery_seconds": 20.0,
    "tick_gap_seconds": 20.0,
    "run_seconds": 300.0,
    "stop_seconds": 20.0,
}
SHORT_PATIENCE = 8.0


@dataclass(slots=True, kw_only=True)
class Stage:
    """Where a scenario is played. `seconds` is how long it should take, where it can be told. `expect` notes what this
    scenario alone demands, beside what the checker proves."""

    cluster: Cluster
    nemesis: Nemesis
    dice: random.Random
    size: Size
    seconds: float = 0.0
    limits: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale_refused: Counter[str] = field(default_factory=Counter)
    stale_accepted: Counter[str] = field(default_factory=Counter)
    stale_unanswered: Counter[str] = field(default_factory=Counter)
    marks: dict[str, int] = field(default_factory=dict)
    load: Load | None = None
    pods: Pods | None = None
    is_published: bool = False
    triggered: int = 0

    def expect(self, is_so: object, message: str) -> None:
        if not is_so:
            self.failed.append(message)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def is_full(self) -> bool:
        return self.size is Size.FULL

    def scaled(self, full: float, small: float, short: float | None = None) -> float:
        """How much of something by the size of the play; what has no short form is as large as the scaled one."""
        match self.size:
            case Size.FULL:
                return full
            case Size.SCALED:
                return small
            case Size.SHORT:
                return small if short is None else short

    async def begin_load(self, **plan: object) -> Load:
        """Schedules and clients from now on; their end is waited for when the scenario's own part is over."""
        self.load = Load(cluster=self.cluster, plan=LoadPlan(**plan), dice=self.dice)  # type: ignore[arg-type]
        await self.load.begin()
        self.is_published = True
        return self.load

    async def publish(self) -> None:
        """Every DAG without schedules, for scenarios that have no load."""
        if not self.is_published:
            async with await connect(self.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
                await publish_specs(conn, self.cluster.ground.work, list(self.cluster.ground.work.specs.values()))
            self.is_published = True

    async def trigger(self, dag: str, key: str) -> int:
        """One run, noted as a client's request; the key is made unique."""
        self.triggered += 1
        key = f"{key}-{self.triggered}"
        clients = self.cluster.clients
        clients.asked("trigger", request=key, dag=dag)
        async with await connect(self.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            run_id = (await trigger(conn, dag=dag, params={}, actor=Actor("chaos"), key=key)).run_id
            await notify(conn, Channel.TASKS)
        clients.answered(key, Answer.OK, run_id=run_id)
        return run_id

    async def hold_tasks(self, count: int) -> list[int]:
        """Runs whose bodies are at work until they are told to `go`."""
        await self.publish()
        runs = [await self.trigger("holding", f"holding-{number}") for number in range(count)]

        def have_begun() -> bool:
            return set(runs) <= {e.run_id for e in effects.read(self.cluster.effects_file) if e.what == "begin"}

        await eventually(have_begun, 30, pause_seconds=0.05)
        return runs

    async def has_standby(self) -> None:
        """Wait until somebody leads and another one could: without that nobody can take over. A process that was killed takes
        its time to start where the machine is busy."""
        schedulers = self.cluster.of_kind("scheduler")

        async def is_so() -> bool:
            ready = [each.name for each in schedulers if each.pid is not None and await each.readiness() == READY]
            return len(ready) > 1 and await self.nemesis.pick_leader() is not None

        await eventually(is_so, 60, pause_seconds=0.05)

    async def runner_is_up(self, runner: Member) -> None:
        """It has joined: the process that is there now, not one before it."""
        known = "select 1 from runner where runner_id = %s and pid = %s and ended_at is null"
        await eventually(
            lambda: self.cluster.watch.value(known, runner.name, runner.own_pid or runner.pid), 60, pause_seconds=0.05
        )

    async def runs_over(self, runs: list[int] | None = None, within_seconds: float = 60.0) -> None:
        """Wait until these runs, or all of them, have ended."""
        left = (
            "select count(*) from run_status where finished_at is null and (%s::bigint[] is null or run_id = any(%s))"
        )

        async def is_so() -> bool:
            rows = await self.cluster.watch.rows(left, runs, runs)
            return rows is not None and rows[0][0] == 0

        try:
            await eventually(is_so, within_seconds, pause_seconds=0.02)
        except AssertionError:
            self.expect(False, f"runs {runs or ''} have not ended within {within_seconds:g} s")

    def expect_within(self, took: list[float | None], seconds: float, what: str) -> None:
        """The slowest of `took` within so many seconds; one that was never done is a failure as well."""
        seconds *= SHORT_PATIENCE if self.size is Size.SHORT else 1
        known = [each for each in took if each is not None]
        self.expect(len(known) == len(took) and known, f"{what}: measured {len(known)} of {len(took)}")
        if known:
            self.note(f"{what}: worst {max(known):.2f} s of {len(known)}")
            self.expect(max(known) <= seconds, f"{what}: {max(known):.2f} s, promised {seconds:g} s")

    def counted(self, zombie: Zombie) -> None:
        self.stale_refused += zombie.refused
        self.stale_accepted += zombie.accepted
        self.stale_unanswered += zombie.unanswered
        if zombie.unanswered:
            self.note(f"stale writes that nobody answered: {dict(zombie.unanswered)}")
        for op, count in zombie.accepted.items():
            self.expect(count == 0, f"{op} was accepted {count} times")
