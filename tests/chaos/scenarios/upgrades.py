"""N33: an upgrade under load: the schema moves on, services are replaced one by one, some die meanwhile, some go back."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from importlib.metadata import version

from evertick.db.connect import Purpose, connect
from evertick.db.notify import Channel, notify
from evertick.domain.access import Actor
from evertick.engine import runners as verb
from tests.chaos.audit import wrap_functions
from tests.chaos.cluster import Shape
from tests.chaos.downtime import CLAIMS, LEADING, longest_pause
from tests.chaos.members import Member
from tests.chaos.next_release import NextRelease, make_next_release
from tests.chaos.record import Fault, boot_ns
from tests.chaos.scenario import Scenario
from tests.chaos.stage import READY, Size, Stage
from tests.chaos.watch import Watcher
from tests.ports import own_port
from tests.waiting import elapse, eventually

DOWNTIME_SECONDS = 6.0
MIGRATE_SECONDS = 60.0
GAVE_WAY = "waits for a table"
# The load ends when the play does; this is only how long it may be.
LONGEST_SECONDS = 1800.0
FIRST_FIRES_SECONDS = 3.0
# Each lease that was gained since then, by the release of its runner.
_CLAIMS_BY_RELEASE = """
select r.version, count(*) from chaos_audit.lease_move m join runner r on r.session = m.session
 where m.is_gained and m.at_ns > %s group by 1
"""
SCHEDULERS, RUNNERS, API = ("scheduler-1", "scheduler-2"), ("runner-1", "runner-2"), "api-1"


class Way(StrEnum):
    """How a service ends before it comes back as another release."""

    STOP = "stop"
    DRAIN = "drain"
    KILL = "kill"


@dataclass(slots=True, kw_only=True)
class Upgrade:
    """`newer` are the names of those that are started as the next release; `lives` is what each life of each service was."""

    stage: Stage
    release: NextRelease
    newer: set[str] = field(default_factory=set)
    lives: dict[tuple[str, int], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for member in self.stage.cluster.members.values():
            member.next_environment = partial(self._environment, member)

    def _environment(self, member: Member, life: int) -> Mapping[str, str]:
        is_newer = self.lives[member.name, life] = member.name in self.newer
        return self.release.environment(member.environment) if is_newer else {}

    async def migrate(self) -> None:
        """As people do, with the next release, while somebody has read a hot table for longer than anybody may be held up."""
        stage, folder = self.stage, self.stage.cluster.folder
        reader, said = Watcher(stage.cluster.server.url), folder / "migrate.log"
        async with stage.nemesis.fault(Fault.UPGRADE, "postgres", part="schema", until=stage.nemesis.works_again()):
            try:
                await reader.must("begin")
                await reader.must("select count(*) from task")
                with said.open("wb") as log:
                    migrating = await asyncio.create_subprocess_exec(
                        *self.release.command("db", "migrate"),
                        cwd=folder,
                        env=self.release.environment(stage.cluster.members[SCHEDULERS[0]].environment),
                        stdout=log,
                        stderr=log,
                    )
                await elapse(stage.scaled(30, DOWNTIME_SECONDS + 2, 0))
                # However long it took to start: it has met the reader, and given way.
                await eventually(lambda: GAVE_WAY in said.read_text() or migrating.returncode is not None, 60)
                await reader.must("rollback")
                await _ended(migrating)
            finally:
                await reader.close()
        told = said.read_text()
        stage.note(f"tries given up because of a reader: {told.count(GAVE_WAY)}")
        stage.expect(migrating.returncode == 0, f"migrate ended with {migrating.returncode}: {told}")
        stage.expect(GAVE_WAY in told, "the migration did not meet the reader")
        labels = [*self.release.migrations, self.release.functions.label]
        stage.expect(all(name in told for name in labels), f"migrate did: {told}")
        async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            await wrap_functions(conn, self.release.functions)

    async def go_on(self) -> None:
        """Everybody is as before, and runs that must be retried come to their end: planned and claimed by the old release."""
        runs = [await self.stage.trigger("flaky", "after-the-migration") for _ in range(3)]
        await self.stage.runs_over(runs, within_seconds=20)

    async def replace(self, name: str, way: Way, *, is_newer: bool) -> None:
        """One service, as the other release from now on; the others work meanwhile."""
        stage, member = self.stage, self.stage.cluster.members[name]
        if name in SCHEDULERS:
            await stage.has_standby()
        (self.newer.add if is_newer else self.newer.discard)(name)
        kind = Fault.KILL if way is Way.KILL else Fault.UPGRADE
        part = f"{member.kind} {'up' if is_newer else 'back'}"
        async with stage.nemesis.fault(kind, name, part=part, until=stage.nemesis.works_again()):
            if way is Way.DRAIN:
                await self._drain(member)
            if way is Way.KILL:
                await member.kill()
            else:
                await member.stop()
                member.start()
        await self.is_back(member)
        await elapse(stage.dice.uniform(0.2, 0.6))

    async def _drain(self, runner: Member) -> None:
        async with await connect(self.stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            sessions = [each.session for each in await verb.find_runners(conn, [runner.name])]
            await verb.drain(conn, sessions=sessions, actor=Actor("chaos"))
            await notify(conn, Channel.STOP)

        async def has_nothing() -> bool:
            return not await self.stage.nemesis.held_by(runner)

        await eventually(has_nothing, 30, pause_seconds=0.05)

    async def is_back(self, member: Member) -> None:
        """The process that is there now has begun its work."""
        if member.kind == "runner":
            await eventually(lambda: member.pid, 30)
            await self.stage.runner_is_up(member)
            return

        async def is_ready() -> bool:
            return await member.readiness() == READY

        await eventually(is_ready, 60, pause_seconds=0.05)

    async def both_worked(self, since_ns: int) -> None:
        """Old and new have led and have claimed on the new schema; otherwise nothing was proven."""
        watch, stage = self.stage.cluster.watch, self.stage
        # By the release that each runner says it is; and by what only the functions of the new one count.
        claims = dict(await watch.must(_CLAIMS_BY_RELEASE, since_ns))
        (counted,) = await watch.must("select coalesce(sum(claims), 0)::bigint from claimed_by")
        stage.note(f"claims by release: {claims}, counted by the new functions: {counted[0]}")
        both = {version("evertick"), self.release.version}
        stage.expect(both <= claims.keys(), f"not both releases have claimed: {claims}")
        stage.expect(counted[0], "the new functions were not called")
        owners = await watch.must(
            "select distinct owner from chaos_audit.shard_move where at_ns > %s and owner is not null", since_ns
        )
        led = {self._is_newer(owner) for (owner,) in owners}
        stage.expect(led == {True, False}, f"not both releases have led: {owners}")

    def _is_newer(self, owner: str) -> bool | None:
        """By the pid with which a scheduler signs."""
        for member in self.stage.cluster.of_kind("scheduler"):
            for number, life in enumerate(member.lives):
                if str(life.pid) in owner.replace(":", "-").split("-"):
                    return self.lives.get((member.name, number), False)
        return None


async def _ended(process: Process) -> None:
    """Whoever has not ended by then is killed, and told by that."""
    try:
        await asyncio.wait_for(process.wait(), MIGRATE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


async def add_api(stage: Stage) -> None:
    if stage.size is not Size.SHORT:
        await stage.cluster.add("api", API, api_port=own_port())


async def upgrade(stage: Stage) -> None:
    """Schedulers before runners the first time, as the documentation has it, and in the other order after some went back."""
    release = await asyncio.to_thread(make_next_release, stage.cluster.folder / "next")
    going = Upgrade(stage=stage, release=release)
    load = await stage.begin_load(
        seconds=LONGEST_SECONDS,
        quick=int(stage.scaled(8, 8, 4)),
        steady=int(stage.scaled(8, 8, 3)),
        per_second=stage.scaled(2, 2, 1),
        paces=(2, 3, 5),
    )
    await elapse(FIRST_FIRES_SECONDS)
    began_ns = boot_ns()
    await going.migrate()
    migrated_ns = boot_ns()
    await going.go_on()
    for _ in range(int(stage.scaled(8, 1))):
        await _forward(going, stage)
        if stage.size is not Size.SHORT:
            await _back(going, stage)
    # Something is due several times per second, so a time without a claim is one in which work waits.
    for what, pause in (("without a claim", CLAIMS), ("without a leader's word", LEADING)):
        stage.expect_within(
            [await longest_pause(stage.cluster.watch, pause, began_ns, boot_ns())], DOWNTIME_SECONDS, what
        )
    await load.cut_short()
    await going.both_worked(migrated_ns)
    for member in stage.cluster.members.values():
        for event in member.events("loop_failed")[:1]:
            stage.expect(False, f"{member.name} met what it did not expect: {event}")


async def _forward(going: Upgrade, stage: Stage) -> None:
    """One of each kind dies as the old release first, and comes back as that: hosts restart when they like."""
    ways = stage.dice.sample((Way.STOP, Way.KILL), 2)
    for name, way in zip(stage.dice.sample(SCHEDULERS, 2), ways, strict=True):
        await going.replace(name, way, is_newer=True)
    first, second = stage.dice.sample(RUNNERS, 2)
    await going.replace(first, Way.KILL, is_newer=False)
    await going.replace(first, Way.DRAIN, is_newer=True)
    await going.replace(second, Way.STOP, is_newer=True)
    if API in stage.cluster.members:
        await going.replace(API, Way.STOP, is_newer=True)


async def _back(going: Upgrade, stage: Stage) -> None:
    """Some are put back to the old release; then all go forward again, runners first."""
    scheduler, runner = stage.dice.choice(SCHEDULERS), stage.dice.choice(RUNNERS)
    await going.replace(scheduler, Way.KILL, is_newer=False)
    await going.replace(API, Way.KILL, is_newer=False)
    await going.replace(runner, stage.dice.choice(tuple(Way)), is_newer=False)
    for name in (runner, scheduler, API):
        await going.replace(name, Way.STOP, is_newer=True)


SCENARIOS = (
    Scenario(
        name="N33",
        title="rolling upgrade: migrate under load, replace all one by one, put some back",
        play=upgrade,
        prepare=add_api,
        shape=lambda is_full: Shape(schedulers=2, runners=2),
        required=("J1", "J2", "J3", "J4", "J5", "J6", "J7", "J8", "J9"),
    ),
)
