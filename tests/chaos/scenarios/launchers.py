"""N40: two launchers and the runners that they start, as processes: all of them are killed, the leader freezes past its lease,
and the API is away."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.chaos.cluster import Cluster, Shape
from tests.chaos.faults import remote
from tests.chaos.members import Member, is_running
from tests.chaos.pods import AGENT_KEY, API
from tests.chaos.record import Fault, boot_ns
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.runners import runs_begun
from tests.chaos.stage import Stage
from tests.ports import own_port
from tests.waiting import elapse, eventually

LAUNCHERS = ("launcher-1", "launcher-2")
LEASE_SECONDS = 4.0
MOST, SLOTS = 3, 4
FLEET = f'[far]\nengine = "process"\nqueues = ["default"]\nmax = {MOST}\nslots = {SLOTS}\nidle = "5s"\n'
START_SECONDS = 60.0
HEARD = "select max(silent_seconds) < 3 from runner where ended_at is null and token_id is not null"
# A certain end is noticed with the next listing, and a new process starts an interpreter.
RERUN_SECONDS = 30.0


class _Launched:
    """The runners that launchers started: none of them belongs to a service. Both launchers find them in one place."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.home, self.port = cluster, cluster.folder / "fleets", own_port()
        self.noted: dict[str, int] = {}
        self.killed: set[str] = set()
        self._works: list[asyncio.Task[None]] = []

    @property
    def objects(self) -> Path:
        return self.home / "fleets" / "far" / "agents" / "attempts"

    def of(self) -> dict[str, int]:
        """By name: the process, if it is there."""
        found = {}
        for file in self.objects.glob("er-*/pid"):
            with suppress(OSError, ValueError, IndexError):
                pid = int(file.read_text().split()[0])
                if is_running(pid):
                    found[file.parent.name] = pid
        return found

    def pids(self) -> list[int]:
        return list(self.of().values())

    def condition(self) -> str:
        return f"launched: {self.of()}"

    async def __aenter__(self) -> _Launched:
        self.home.mkdir()
        (self.home / "fleets.toml").write_text(FLEET)
        self._works = [asyncio.create_task(self._take_notes()), asyncio.create_task(self._load_api())]
        return self

    async def _take_notes(self) -> None:
        """When each process began and ended, as of every service."""
        while True:
            now = {name: pid for name, pid in self.of().items() if name not in self.killed}
            for name in now.keys() - self.noted.keys():
                self.cluster.record.started(name, now[name])
            for name in self.noted.keys() - now.keys():
                self.cluster.record.exited(name, self.noted[name], None)
            self.noted = now
            await elapse(0.05)

    async def _load_api(self) -> None:
        """It imports its framework with the first request; until then it uses less memory than at rest."""
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
                await writer.drain()
                writer.close()
                return
            await elapse(0.1)

    def kill(self, name: str) -> None:
        """Noted before a launcher can know of it."""
        self.killed.add(name)
        pid = self.noted.pop(name)
        at_ns = boot_ns()
        os.kill(pid, signal.SIGKILL)
        self.cluster.record.exited(name, pid, -signal.SIGKILL, at_ns=at_ns)

    async def __aexit__(self, *_: object) -> None:
        for work in self._works:
            work.cancel()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def prepare(stage: Stage) -> None:
    """An API, and two launchers; the only other runner takes no part."""
    cluster = stage.cluster
    launched = await cluster.beside(_Launched(cluster))
    await cluster.add("api", API, api_port=launched.port, agent_key=(AGENT_KEY,), api_rate_limit=0)
    for name in LAUNCHERS:
        member = await cluster.add(
            "launcher",
            name,
            agent_key=(AGENT_KEY,),
            agent_api_url=f"http://127.0.0.1:{launched.port}",
            fleets_file=launched.home / "fleets.toml",
            fleet_lease_seconds=LEASE_SECONDS,
        )
        member.environment = {**member.environment, "EVERTICK_HOME": str(launched.home)}


async def play(stage: Stage) -> None:
    launched, api = stage.cluster.outside, stage.cluster.members[API]
    assert isinstance(launched, _Launched)
    await stage.cluster.members["runner-1"].stop()
    for _ in range(int(stage.scaled(5, 1))):
        await stage.publish()
        runs = [await stage.trigger("holding", f"holding-{number}") for number in range(2 * SLOTS)]
        await eventually(lambda runs=runs: runs_begun(stage, runs), START_SECONDS, pause_seconds=0.05)  # type: ignore[misc]
        stage.expect(len(launched.of()) == 2, f"{len(launched.of())} runners for {2 * SLOTS} tasks of {SLOTS} slots")
        await _kill_launchers(stage, launched)
        await _freeze_leader(stage, launched)
        before = launched.of()
        async with remote.api_away(stage.nemesis, api):
            await elapse(1.5 * float(stage.cluster.settings["lost_after_seconds"]))
            stage.expect(launched.of() == before, "a runner ended, or one was started, while the API was away")
        # No runner can join before; a busy machine takes its time to start the API.
        await eventually(lambda: stage.cluster.watch.value(HEARD), START_SECONDS, pause_seconds=0.05)
        for _ in range(int(stage.scaled(5, 2))):
            await _kill_runner(stage, launched)
        stage.cluster.tell("go")
        await stage.runs_over(within_seconds=120)
        await _nothing_is_left(stage, launched)
        stage.cluster.untell("go")
    most = await stage.cluster.watch.value("select max(most) from fleet")
    stage.expect(most == MOST, f"the fleet's limit is {most}")


async def _kill_launchers(stage: Stage, launched: _Launched) -> None:
    """One after the other: their runners go on, and none is started twice."""
    before = launched.of()
    for name in LAUNCHERS:
        epoch = await _epoch(stage)
        member = stage.cluster.members[name]
        is_leader = await _leader(stage) is member
        async with stage.nemesis.fault(Fault.KILL, name, part="launcher"):
            await member.kill()
        if is_leader:
            await eventually(lambda epoch=epoch: _is_later(stage, epoch), START_SECONDS, pause_seconds=0.05)  # type: ignore[misc]
    stage.expect(launched.of() == before, "a runner ended or was doubled with its launcher")


async def _freeze_leader(stage: Stage, launched: _Launched) -> None:
    """Past its lease, with tasks that need another runner: its successor starts one, and it starts none when it goes on."""
    leader, epoch = await _leader(stage), await _epoch(stage)
    if leader is None:
        return stage.expect(False, "no launcher led")
    async with stage.nemesis.fault(Fault.FREEZE, leader.name, part="launcher", seconds=2 * LEASE_SECONDS):
        leader.send(signal.SIGSTOP)
        more = [await stage.trigger("holding", "more") for _ in range(2)]
        try:
            await eventually(lambda: _is_later(stage, epoch), START_SECONDS, pause_seconds=0.05)
            await eventually(lambda: len(launched.of()) == MOST, START_SECONDS, pause_seconds=0.05)
        finally:
            leader.send(signal.SIGCONT)
    await elapse(2.0)
    stage.note(f"{len(launched.of())} runners after the former leader went on, {len(more)} tasks more")
    stage.expect(len(launched.of()) == MOST, "the former leader doubled the fleet")


async def _kill_runner(stage: Stage, launched: _Launched) -> None:
    """What it held runs again elsewhere soon: its end is certain."""
    held: dict[str, list[tuple[int, int, int, int]]] = {}
    for name in launched.of():
        # As a member of that name would be asked.
        held[name] = await stage.nemesis.held_by(replace(stage.cluster.members[API], name=name))
    victim = max(held, key=lambda name: len(held[name]))
    until = stage.nemesis.reran(held[victim])
    async with stage.nemesis.fault(
        Fault.KILL, victim, part="launched runner", disturbs=("runner",), until=until
    ) as hit:
        launched.kill(victim)
    stage.expect_within([hit.recovered_seconds], RERUN_SECONDS, "rerun after kill -9 of a launched runner")


async def _nothing_is_left(stage: Stage, launched: _Launched) -> None:
    async def is_so() -> bool:
        return not launched.of() and await stage.cluster.watch.value("select count(*) from pilot") == 0

    try:
        await eventually(is_so, START_SECONDS, pause_seconds=0.05)
    except AssertionError:
        stage.expect(False, f"idle runners have not left: {launched.of()}")


async def _epoch(stage: Stage) -> int:
    return int(await stage.cluster.watch.value("select epoch from fleet") or 0)


async def _is_later(stage: Stage, epoch: int) -> bool:
    return await _epoch(stage) > epoch


async def _leader(stage: Stage) -> Member | None:
    owner = str(await stage.cluster.watch.value("select leader from fleet where lease_until > now()") or "")
    parts = owner.replace(":", "-").split("-")
    return next((each for each in map(stage.cluster.members.get, LAUNCHERS) if each and str(each.pid) in parts), None)


SCENARIOS = (
    Scenario(
        name="N40",
        title="launchers and the runners that they start: killed, frozen past their lease, without the API",
        play=play,
        prepare=prepare,
        shape=lambda is_full: Shape(schedulers=1, runners=1, slots=2),
        required=("J4", "J5", "J7", "J12"),
    ),
)
