"""The size of a fleet: what its file says, and how it follows a day of load."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from evertick.domain.errors import InvalidSettings
from evertick.domain.fleets import Fleet, Pilot, PilotState, Scaler, read_fleets

FLEET = Fleet(name="f", queues=("f",), engine="process", most=8, slots=4, idle_seconds=300.0)


def pilots(**states: str) -> list[Pilot]:
    """By name; `running:3` has three tasks."""
    found = []
    for name, text in states.items():
        state, _, busy = text.partition(":")
        found.append(Pilot(name=name, state=PilotState(state), busy=int(busy or 0)))
    return found


def test_it_grows_at_once_within_its_bounds() -> None:
    scaler = Scaler(FLEET, 0.0)
    assert scaler.plan([], queued=0, running=0, now=1).start == 0
    assert scaler.plan([], queued=9, running=0, now=2).start == 3
    assert scaler.plan(pilots(a="starting", b="running:4"), queued=9, running=4, now=3).start == 2
    plan = scaler.plan(pilots(a="draining:1", b="running:4"), queued=500, running=4, now=4)
    assert (plan.desired, plan.start, plan.drain) == (8, 6, ())


def test_it_shrinks_after_a_whole_idle_time_and_spares_those_that_work() -> None:
    scaler, here = Scaler(FLEET, 0.0), pilots(a="running:1", b="running", c="starting", d="running:2")
    assert scaler.plan(here, queued=12, running=3, now=10).drain == ()
    for now in (11, 200, 309):
        assert scaler.plan(here, queued=0, running=3, now=now).drain == ()
    assert scaler.plan(here, queued=0, running=3, now=311).drain == ("c", "b", "a")


def test_a_new_leader_drains_nothing_before_it_has_observed_an_idle_time() -> None:
    scaler = Scaler(FLEET, 1000.0)
    assert scaler.plan(pilots(a="running"), queued=0, running=0, now=1299).drain == ()
    assert scaler.plan(pilots(a="running"), queued=0, running=0, now=1300).drain == ("a",)


@dataclass
class Day:
    """A fleet in front of a queue, second by second: a runner starts after some seconds, and works off tasks."""

    fleet: Fleet
    queued: int = 0
    # Of each runner: when it joins, the seconds that are left of its tasks, and whether it drains.
    runners: list[tuple[float, list[float], bool]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def play(self, load: list[tuple[int, int]], *, start_seconds: float, task_seconds: float, until: int) -> None:
        scaler, chance, arriving = Scaler(self.fleet, 0.0), random.Random(7), dict(load)
        for now in range(until):
            self.queued += arriving.get(now, 0)
            self._work(now, chance, task_seconds)
            here = [self._pilot(n, now) for n in range(len(self.runners))]
            busy = sum(each.busy for each in here if each.state is PilotState.RUNNING)
            plan = scaler.plan(here, queued=self.queued, running=busy, now=now)
            assert len(self.runners) + plan.start <= self.fleet.most and not (plan.start and plan.drain)
            leaving = {int(name) for name in plan.drain}
            self.runners = [(at, tasks, drains or n in leaving) for n, (at, tasks, drains) in enumerate(self.runners)]
            self.runners = [each for each in self.runners if not each[2] or each[1]]
            self.runners += [(now + start_seconds, [], False)] * plan.start
            self.runners = [(at, list(tasks), drains) for at, tasks, drains in self.runners]
            self.sizes.append(sum(not drains for _, _, drains in self.runners))

    def _work(self, now: float, chance: random.Random, task_seconds: float) -> None:
        for at, tasks, drains in self.runners:
            tasks[:] = [left - 1 for left in tasks if left > 1]
            while at <= now and not drains and self.queued and len(tasks) < self.fleet.slots:
                self.queued -= 1
                tasks.append(chance.uniform(0.5, 1.5) * task_seconds)

    def _pilot(self, n: int, now: float) -> Pilot:
        at, tasks, drains = self.runners[n]
        state = PilotState.DRAINING if drains else PilotState.RUNNING if at <= now else PilotState.STARTING
        return Pilot(name=f"{n:03}", state=state, busy=len(tasks))

    def reversals(self) -> int:
        """How often growth follows shrinkage, or the other way."""
        steps = [b - a for a, b in pairwise(self.sizes) if a != b]
        return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


@pytest.mark.parametrize(("start_seconds", "task_seconds"), [(1, 2), (60, 30), (5, 120)])
def test_a_day_of_bursts_is_followed_without_thrash(start_seconds: float, task_seconds: float) -> None:
    """A backlog every two hours, a wave of tasks with gaps after it, and nothing in between."""
    chance, load = random.Random(3), []
    bursts = range(600, 86_400 - 7200, 7200)
    for begin in bursts:
        load.append((begin, 500))
        load += [(begin + 20 * n + 1, chance.randrange(4, 30)) for n in range(1, 60)]
    day = Day(FLEET)
    day.play(load, start_seconds=start_seconds, task_seconds=task_seconds, until=86_400)
    assert day.queued == 0 and day.sizes[-1] == 0 and max(day.sizes) == FLEET.most
    assert all(day.sizes[begin] == FLEET.most for begin in bursts), "each starts all runners at once"
    assert day.reversals() <= 2 * len(bursts)


def test_a_steady_load_keeps_its_runners() -> None:
    day = Day(FLEET)
    day.play([(n, 1) for n in range(10, 40_000, 2)], start_seconds=5, task_seconds=10, until=40_000)
    assert day.reversals() == 0 and set(day.sizes[1000:]) <= {2, 3}


# The file


def test_a_file_describes_fleets() -> None:
    (gpu, small) = read_fleets(
        '[gpu]\nengine = "slurm"\nmax = 4\nqueues = ["gpu", "big"]\nslots = 2\nidle = "90s"\n'
        'options = {partition = "gpu", time = "02:00:00"}\n[small]\nengine = "docker"\nmin = 1\nmax = 2\n'
    )
    assert (gpu.queues, gpu.slots, gpu.idle_seconds, gpu.least) == (("gpu", "big"), 2, 90.0, 0)
    assert gpu.lifetime_seconds == 6480.0, "a tenth of the time limit is left for its tasks"
    assert (small.queues, small.least, small.lifetime_seconds) == (("small",), 1, 86_400.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "1 to 100 tables"),
        ("x", "not valid TOML"),
        ("a = 1", "write \\[a\\]"),
        ("[A]", "no name of a fleet"),
        ('[a]\nengine = "nomad"', "use docker, slurm, ray, process, kubernetes"),
        ('[a]\nengine = "docker"', "it needs max"),
        ('[a]\nengine = "docker"\nmax = 1\nmin = 2', "min must be at most max"),
        ('[a]\nengine = "docker"\nmax = 1\nslot = 2', "it has no 'slot'; .*slots"),
        ('[a]\nengine = "docker"\nmax = 1\nidle = "soon"', "idle is 'soon'"),
        ('[a]\nengine = "docker"\nmax = 1\noptions = {imag = "x"}', "docker has no option 'imag'"),
        ('[a]\nengine = "kubernetes"\nmax = 1\noptions = {imag = "x"}', "a pod has no option 'imag'"),
        ('[a]\nengine = "process"\nmax = 1\noptions = {x = 1}', "process has no options"),
        ('[a]\nengine = "slurm"\nmax = 1\nlifetime = "2h"\noptions = {time = 60}', "below the time limit"),
        ('[a]\nengine = "docker"\nmax = 1\nqueues = ["b"]\n[b]\nengine = "docker"\nmax = 1', "both serve queue 'b'"),
    ],
)
def test_what_is_wrong_in_it_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidSettings, match=says):
        read_fleets(text)
