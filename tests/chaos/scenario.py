"""One scenario, played to its end: build, break, heal, drain, judge. What it found is a verdict, never an exception.

Also when a scenario fails, everything that was started is ended.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import psycopg
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.schedules.spec import EARLIEST
from evertick.engine.proofs import positions_since, round_of
from tests.chaos.again import Judged, save
from tests.chaos.audit import refusals
from tests.chaos.checker import check
from tests.chaos.cluster import Cluster, Ground, Shape
from tests.chaos.history import collect
from tests.chaos.nemesis import Nemesis
from tests.chaos.record import Phase
from tests.chaos.stage import READY, SHORT_LIMITS, SHORT_SETTINGS, Size, Stage
from tests.chaos.verdict import INVARIANTS, Limits
from tests.waiting import elapse, eventually

DRAIN_SECONDS = 90.0
# A service that was killed last has to start: half a second, and half a minute where the machine is busy with other things.
HEALTHY_SECONDS = 60.0
QUIET_SECONDS = 1.5
SAMPLE_SECONDS = 4.0
# Where there are several shards to lead.
LEAST_SCHEDULERS = 3
# What violations of the product's own proof begin with, and how a scenario does without it.
PROOF = "proof"


Play = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`prepare` adds to the installation before it is started. `required` are the invariants that it must exercise; all
    others are checked as well, unless `without` them.

    `is_alone`: what it measures needs the machine, so nothing is played beside it. `missing` says why it cannot be played
    yet; `needs` asks the machine and gives the reason why not.
    """

    name: str
    title: str
    play: Play | None = None
    prepare: Play | None = None
    shape: Callable[[bool], Shape] = lambda is_full: Shape()
    is_alone: bool = False
    required: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    missing: str = ""
    needs: Callable[[], str] = lambda: ""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What became of one scenario."""

    name: str
    title: str
    not_run: str = ""
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    alone: dict[str, list[float]] = field(default_factory=dict)
    fires: int = 0
    attempts: int = 0
    stale_refused: int = 0
    stale_accepted: int = 0
    stale_unanswered: int = 0
    checked: str = ""
    folder: Path | None = None

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.not_run

    @property
    def status(self) -> str:
        return "NOT RUN" if self.not_run else "passed" if self.is_good else "FAILED"


async def perform(
    scenario: Scenario,
    ground: Ground,
    folder: Path,
    *,
    seed: str,
    size: Size = Size.SCALED,
    seconds: float = 0.0,
    shards: int | None = None,
    on_stage: Callable[[Stage], None] = lambda stage: None,
) -> Verdict:
    """Play it in an installation of its own, with so many shards if a number is given. `on_stage` may look at it while it is
    played."""
    verdict = Verdict(name=scenario.name, title=scenario.title, folder=folder)
    verdict.not_run = scenario.missing or scenario.needs()
    if verdict.not_run or scenario.play is None:
        return verdict
    began = time.monotonic()
    shape = scenario.shape(size is Size.FULL)
    if shards is not None:
        shape = replace(shape, shards=shards, schedulers=max(shape.schedulers, LEAST_SCHEDULERS))
    if size is Size.SHORT:
        shape = replace(shape, settings={**SHORT_SETTINGS, **shape.settings})
    try:
        async with Cluster(ground, folder, shape) as cluster:
            stage = Stage(
                cluster=cluster,
                nemesis=Nemesis(cluster=cluster, dice=random.Random(f"{seed} {scenario.name} nemesis")),
                dice=random.Random(f"{seed} {scenario.name}"),
                size=size,
                seconds=seconds,
            )
            on_stage(stage)
            try:
                await _act(scenario, stage)
                await _judge(scenario, stage, verdict)
            finally:
                await _keep_results(stage, verdict)
    except Exception as error:  # a scenario that breaks is a failed scenario, and the others still want to be played
        verdict.violations.append(f"{type(error).__name__}: {error}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "traceback.txt").write_text(traceback.format_exc())
    verdict.seconds = time.monotonic() - began
    return verdict


async def _act(scenario: Scenario, stage: Stage) -> None:
    assert scenario.play is not None
    cluster = stage.cluster
    if scenario.prepare is not None:
        await scenario.prepare(stage)
    await cluster.start()
    await _warm_up(stage)
    cluster.record.phase(Phase.LOAD)
    async with _sampled(cluster):
        await scenario.play(stage)
        if stage.load is not None:
            await stage.load.over()
        else:
            cluster.record.phase(Phase.STOPPED)
    cluster.proxy.heal()
    cluster.record.phase(Phase.HEALED)
    await _drain(stage)


@asynccontextmanager
async def _sampled(cluster: Cluster) -> AsyncIterator[None]:
    """What everybody uses, looked at now and then beside the block."""

    async def look() -> None:
        while True:
            await elapse(SAMPLE_SECONDS)
            await cluster.sample()

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()


async def _warm_up(stage: Stage) -> None:
    """Every runner has had work before it is looked at: what it keeps for the next task is no leak."""
    cluster = stage.cluster
    await stage.publish()
    for number in range(len(cluster.of_kind("runner")) * cluster.shape.slots):
        await stage.trigger("ledger", f"warm-up-{number}")
    if stage.pods is not None:
        # The API loads with the first request, and the runner its client.
        await stage.trigger("pod_ledger", "warm-up-pod")
    await stage.runs_over()
    cluster.record.phase(Phase.IDLE)
    await cluster.sample()


async def _drain(stage: Stage) -> None:
    """After the last fault nobody touches anything: the work ends, and everybody is well."""
    cluster = stage.cluster

    async def is_idle() -> bool:
        left = await cluster.watch.open_work()
        return left is not None and not any(left.values())

    began = time.monotonic()
    try:
        await eventually(is_idle, DRAIN_SECONDS, pause_seconds=0.1)
    except AssertionError:
        stage.failed.append(f"not idle {DRAIN_SECONDS:g} s after the last fault: {await cluster.watch.open_work()}")
        return
    stage.note(f"idle {time.monotonic() - began:.1f} s after the last fault")
    await _expect_health(stage)
    cluster.record.phase(Phase.IDLE)
    for _ in range(3):
        await cluster.sample()
        await elapse(0.3)


async def _expect_health(stage: Stage) -> None:
    cluster = stage.cluster
    try:
        await eventually(lambda: _is_well(cluster), HEALTHY_SECONDS, pause_seconds=0.1)
    except AssertionError:
        stage.failed.append(f"not healthy {HEALTHY_SECONDS:g} s after the last fault: {await _illness(cluster)}")
        return
    lives = {name: len(member.lives) for name, member in cluster.members.items()}
    await elapse(QUIET_SECONDS)
    restless = [name for name, member in cluster.members.items() if len(member.lives) != lives[name]]
    stage.expect(not restless, f"still restarting after the last fault: {restless}")
    stage.failed += cluster.unexpected_deaths()


async def _is_well(cluster: Cluster) -> bool:
    return not await _illness(cluster)


async def _illness(cluster: Cluster) -> list[str]:
    """What is not well: nobody leads, a service is down, a runner's heartbeat is not heard."""
    found = [f"{name} is down" for name, member in cluster.members.items() if member.is_kept and member.pid is None]
    if not await cluster.watch.is_led():
        found.append("nobody leads")
    runners = await cluster.watch.rows("select runner_id, silent_seconds from runner where ended_at is null")
    heard = {name for name, silent in runners or [] if silent < cluster.settings["heartbeat_seconds"] * 3}
    found += [
        f"{m.name} is not heard ({m.condition()})"
        for m in cluster.of_kind("runner")
        if m.is_kept and m.name not in heard
    ]
    for name, member in cluster.members.items():
        if member.is_kept and (answer := await member.readiness()) != READY:
            found.append(f"{name} says {answer} at /readyz")
    return found


async def _judge(scenario: Scenario, stage: Stage, verdict: Verdict) -> None:
    cluster = stage.cluster
    cluster.record.phase(Phase.READ)
    limits = Limits(
        **{
            "lost_after_seconds": cluster.settings["lost_after_seconds"],
            "leader_lease_seconds": cluster.lease_seconds,
            "tick_seconds": cluster.settings.get("tick_seconds", 1.0),
            "heartbeat_seconds": cluster.settings["heartbeat_seconds"],
            # A runner keeps a process for each slot, single-use and warm, once it needed it.
            "leaked_children": 2.0 * cluster.shape.slots + 2,
            "leaked_fds": 20.0 + 4.0 * cluster.shape.slots,
            # A scheduler opens some of its connections when it leads for the first time.
            "leaked_connections": 6.0 + 2.0 * len(cluster.of_kind("scheduler")),
            **(SHORT_LIMITS if stage.size is Size.SHORT else {}),
            **stage.limits,
        }
    )
    async with await AsyncConnection.connect(cluster.server.url, autocommit=True) as conn:
        async with await AsyncConnection.connect(cluster.sink_url, autocommit=True) as sink_conn:
            evidence = await collect(
                conn,
                effects=cluster.effects_file,
                nemesis=cluster.nemesis_file,
                client=cluster.client_file,
                sink_conn=sink_conn,
            )
    only = tuple(name for name in INVARIANTS if name not in scenario.without)
    save(Judged(evidence=evidence, limits=limits, only=only, required=scenario.required), cluster.folder)
    report = check(evidence, limits, only=only)
    verdict.checked = report.text()
    (cluster.folder / "report.txt").write_text(verdict.checked)
    verdict.violations += [f"{name} {each.kind}: {each.text}" for name, each in report.violations]
    verdict.violations += [f"{name} had nothing to check" for name in report.not_exercised(scenario.required)]
    if PROOF not in scenario.without:
        verdict.violations += await _prove(cluster)


async def _prove(cluster: Cluster) -> list[str]:
    """A second judge, which shares nothing with the first: the product's own proof, of everything that has happened."""
    async with await connect(cluster.server.url, purpose=Purpose.READ) as conn:
        begin = await positions_since(conn, EARLIEST)
        slices = [each async for each in round_of(conn, begin, settled=timedelta(0))]
    return [f"{PROOF} {each.check}: {each.subject} {each.detail}" for one in slices for each in one.found]


async def _keep_results(stage: Stage, verdict: Verdict) -> None:
    """What is known also when the scenario broke halfway."""
    verdict.violations += stage.failed + stage.nemesis.trouble
    verdict.notes += stage.notes
    verdict.faults, verdict.recoveries, verdict.alone = (
        stage.nemesis.done,
        stage.nemesis.recoveries,
        stage.nemesis.alone,
    )
    watch = stage.cluster.watch
    verdict.fires = await watch.value("select count(*) from run where fire_at is not null") or 0
    verdict.attempts = await watch.value("select coalesce(sum(epoch), 0) from task") or 0
    verdict.stale_refused, verdict.stale_accepted, verdict.stale_unanswered = (
        stage.stale_refused.total(),
        stage.stale_accepted.total(),
        stage.stale_unanswered.total(),
    )
    try:
        async with await AsyncConnection.connect(stage.cluster.server.url, autocommit=True) as conn:
            verdict.notes.append(f"refused inside the database: {dict(await refusals(conn))}")
    except psycopg.Error as error:
        verdict.notes.append(f"refusals cannot be read: {error}")
    if verdict.violations:
        (stage.cluster.folder / "diagnosis.txt").write_text(await stage.cluster.diagnosis())
