"""N37: runners over HTTPS that are killed, cut off and lose answers, and whose API is away and restarts."""

from __future__ import annotations

from contextlib import suppress

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.engine import runner_tokens
from tests.chaos.cluster import Shape
from tests.chaos.effects import Effect
from tests.chaos.faults import processes, remote
from tests.chaos.members import Member, is_running
from tests.chaos.pods import AGENT_KEY, API
from tests.chaos.proxy import Mode, Proxy
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.runners import begin_tasks, effects_of
from tests.chaos.stage import Stage
from tests.ports import own_port
from tests.waiting import elapse, eventually

RUNNERS = ("runner-https-1", "runner-https-2")
AGAIN_SECONDS = 40.0


class _Ways:
    """What is between each runner and the API."""

    def __init__(self) -> None:
        self.port = own_port()
        self.proxy: Proxy
        self.ports: dict[str, int | str]

    def pids(self) -> list[int]:
        return [self.proxy.pid]

    def condition(self) -> str:
        return f"ways: {self.proxy.status()}"

    async def __aenter__(self) -> _Ways:
        self.proxy = Proxy.start(f"127.0.0.1:{self.port}")
        self.ports = {name: self.proxy.listen(name, speaks="bytes") for name in RUNNERS}
        return self

    async def __aexit__(self, *_: object) -> None:
        self.proxy.stop()


async def prepare(stage: Stage) -> None:
    """An API, and runners that reach it by a way of their own and have no database; the local runner takes no part."""
    cluster = stage.cluster
    ways = await cluster.beside(_Ways())
    await cluster.add("api", API, api_port=ways.port, agent_key=(AGENT_KEY,), api_rate_limit=0)
    async with await connect(cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        _, secret = await runner_tokens.create(conn, name="chaos", queues=["default"], days=1, actor=Actor("chaos"))
    for name in RUNNERS:
        member = await cluster.add(
            "runner", name, runner_server=f"http://127.0.0.1:{ways.ports[name]}", runner_token=secret, runner_slots=8
        )
        member.environment = {key: text for key, text in member.environment.items() if key != "EVERTICK_DATABASE_URL"}


async def play(stage: Stage) -> None:
    ways, nemesis, api = stage.cluster.outside, stage.nemesis, stage.cluster.members[API]
    assert isinstance(ways, _Ways)
    await stage.cluster.members["runner-1"].stop()
    for _ in range(int(stage.scaled(5, 1))):
        held = await begin_tasks(stage, "holding", 6)
        await _lose_answers(stage, ways)
        await _away(stage, api, held)
        await _cut_off(stage, ways)
        for _ in range(int(stage.scaled(5, 2))):
            await remote.kill_api(nemesis, api)
            await elapse(stage.dice.uniform(0.5, 1.5))
        victim = _busiest(stage)
        took = await processes.kill_runner(nemesis, victim)
        stage.note(f"rerun {took} s after kill -9 of {victim.name}")
        stage.cluster.tell("go")
        await stage.runs_over(within_seconds=120)
        stage.cluster.untell("go")


async def _lose_answers(stage: Stage, ways: _Ways) -> None:
    """Connections break while requests are under way: some were carried out, and no answer came."""
    runs = [await stage.trigger("pulse", f"lost-{number}") for number in range(int(stage.scaled(40, 8)))]
    async with stage.nemesis.fault(Fault.RESET, RUNNERS[0], part="https"):
        for _ in range(int(stage.scaled(30, 6))):
            for name in RUNNERS:
                ways.proxy.reset(name)
            await elapse(stage.dice.uniform(0.05, 0.3))
    await stage.runs_over(runs, within_seconds=60)


async def _away(stage: Stage, api: Member, held: list[int]) -> None:
    """For longer than a runner may be silent: nobody can hear it, so nobody is declared dead, and all bodies go on."""
    mine = _latest(stage, held)
    async with remote.api_away(stage.nemesis, api):
        await elapse(1.5 * float(stage.cluster.settings["lost_after_seconds"]))
        stage.expect(all(is_running(each.pid) for each in mine), "a body ended because the API was away")
    gone = "select count(*) from runner where end_reason is not null and end_reason <> 'stopped'"
    stage.expect(await stage.cluster.watch.value(gone) == 0, "a runner was declared dead while no API was there")


async def _cut_off(stage: Stage, ways: _Ways) -> None:
    """One runner alone is cut off for longer than it may be silent. What it held runs elsewhere, and when it is heard again
    its bodies are gone soon, and what it reports changes nothing."""
    victim = _busiest(stage)
    theirs = [each for each in _running(stage) if each.service == victim.name]
    async with stage.nemesis.fault(Fault.CUT, victim.name, part="https"):
        ways.proxy.set(victim.name, Mode.blackhole())
        runs = {each.run_id for each in theirs}
        silence = float(stage.cluster.settings["lost_after_seconds"])
        with suppress(AssertionError):
            await eventually(
                lambda: runs <= {e.run_id for e in _running(stage) if e.service != victim.name},
                silence + AGAIN_SECONDS,
                pause_seconds=0.1,
            )
        ways.proxy.heal(victim.name)
    with suppress(AssertionError):
        await eventually(lambda: not any(is_running(each.pid) for each in theirs), 20, pause_seconds=0.05)
    stage.expect(not any(is_running(each.pid) for each in theirs), "a stale body survived the return of its runner")


def _running(stage: Stage) -> list[Effect]:
    return [each for each in effects_of(stage, "begin", dags=("holding",)) if is_running(each.pid)]


def _latest(stage: Stage, runs: list[int]) -> list[Effect]:
    return [each for each in _running(stage) if each.run_id in runs]


def _busiest(stage: Stage) -> Member:
    count = {name: sum(each.service == name for each in _running(stage)) for name in RUNNERS}
    return stage.cluster.members[max(count, key=lambda name: count[name])]


SCENARIOS = (
    Scenario(
        name="N37",
        title="runners over HTTPS: killed, cut off, with lost answers and without their API",
        play=play,
        prepare=prepare,
        shape=lambda is_full: Shape(schedulers=1, runners=1, slots=2),
        required=("J4", "J5", "J7", "J12"),
    ),
)
