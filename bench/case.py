"""The context of every benchmark: the server, the sizes, the raw loop of the same round and progress reports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.figures import Figure, Goal, median
from bench.figures import Settings as Facts
from bench.house import House, Launcher, Server, as_installed
from bench.raw import BATCHES, RawLoop
from bench.work import rows_per_task

from evertick.config import Settings

ISOLATIONS = ("process", "warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of one benchmark run. Rounds are interleaved: each round measures all variants."""

    rounds: int = 5
    raw_seconds: float = 0.7
    chains: int = 5
    singles: Mapping[str, int]
    triggers: int = 500
    schedules: int = 10_000
    notice_seconds: float = 3.0
    big: int = 10_000
    fires: int = 200
    submits: int = 200
    commands: int = 5
    idle_seconds: float = 60.0
    settle_seconds: float = 5.0
    first_round_seconds: float = 65.0
    runners: tuple[int, ...] = (1, 2, 4, 8)
    history: int = 2_000_000
    soak_minutes: float = 60.0
    rows: int = 10_000_000
    spike: int = 50_000
    idle_schedules: int = 1_000_000
    keyed: tuple[int, int] = (20, 1000)
    held: int = 100
    waiting: int = 50
    ticks: int = 1_000
    fleet: int = 2_000
    fleet_https: int = 1_000
    https_tasks: int = 4_000
    agents: int = 2_000
    submit_seconds: float = 5.0
    fleet_seconds: float = 30.0
    fleet_tasks: int = 15_000
    polled: int = 20_000
    poll_turns: int = 30
    poll_turn_seconds: float = 0.5
    crowd_seconds: float = 60.0
    ui_dags: int = 5_000
    ui_runs: int = 200_000
    ui_log_bytes: int = 100_000_000


FULL = Size(singles={"process": 5_000, "warm": 5_000})
QUICK = Size(
    rounds=1,
    raw_seconds=0.05,
    chains=1,
    singles={"process": 40, "warm": 100},
    triggers=10,
    schedules=50,
    notice_seconds=1.5,
    big=60,
    fires=4,
    submits=4,
    commands=1,
    idle_seconds=1.0,
    settle_seconds=0.2,
    first_round_seconds=0.2,
    runners=(2,),
    history=2_000,
    soak_minutes=0.02,
    rows=2_000,
    spike=100,
    idle_schedules=2_000,
    keyed=(2, 10),
    held=1,
    waiting=1,
    ticks=20,
    fleet=20,
    fleet_https=10,
    https_tasks=64,
    agents=10,
    submit_seconds=0.5,
    fleet_seconds=1.5,
    fleet_tasks=40,
    polled=1_500,
    poll_turns=1,
    poll_turn_seconds=0.02,
    crowd_seconds=1.2,
    ui_dags=50,
    ui_runs=200,
    ui_log_bytes=200_000,
)

Raw = dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One benchmark run. `slots` None measures the product's default."""

    server: Server
    folder: Path
    size: Size
    slots: int | None
    raw: RawLoop
    say: Callable[[str], None]

    def rounds(self) -> Iterator[int]:
        for number in range(1, self.size.rounds + 1):
            self.say(f"round {number} of {self.size.rounds}")
            yield number

    def raw_now(self) -> Raw:
        return {batch: self.raw.cycles_per_second(batch, self.size.raw_seconds) for batch in BATCHES}

    def house(
        self,
        name: str,
        *,
        runners: int = 1,
        launcher: Launcher = as_installed,
        settings: Mapping[str, str] | None = None,
    ) -> House:
        """An installation on an existing database. `settings` override the defaults."""
        url, folder = self.server.url_of(name), self.folder / name
        return House(
            url=url, folder=folder, slots=self.slots, runners=runners, launcher=launcher, settings=settings or {}
        )

    async def facts(self, house: House, isolation: str, run_ids: Sequence[int]) -> Facts:
        """The settings stored with figures of these runs."""
        return {
            "isolation": isolation,
            "slots": self.slots or Settings().runner_slots,
            "rows_per_task": await rows_per_task(house, run_ids),
            "rounds": self.size.rounds,
        }


def throughput(
    name: str, about: str, samples: Sequence[float], raw: Sequence[Raw], *, goal: Goal | None, facts: Facts
) -> Figure:
    """Tasks per second, with the ratio to the raw loop in the same round."""
    ratios = {
        f"batch {batch}": statistics.median(mine / bare[batch] for mine, bare in zip(samples, raw, strict=True))
        for batch in BATCHES
    }
    return replace(median(name, about, "tasks/s", samples, goal, facts), ratio_to_raw=ratios)
