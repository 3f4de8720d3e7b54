"""N35: everything at once. A seeded mix of all faults, one to three at a time, under load, with stale writers about."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psycopg

from tests.chaos.cluster import CLIENT, Shape
from tests.chaos.faults import database, network, planning, processes
from tests.chaos.machine import lacks_false_clock, lacks_mounts
from tests.chaos.nemesis import Nemesis
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.clocks import JUMPS_SECONDS, add_skewed_services, skew
from tests.chaos.scenarios.disks import SMALL, add_small_runner, full_spool
from tests.chaos.stage import Stage
from tests.chaos.verdict import INVARIANTS
from tests.chaos.zombie import haunted
from tests.waiting import elapse

Deed = Callable[[Nemesis, random.Random], Awaitable[float | None]]

LANES = 3
DEFAULT_SECONDS = 240.0
# After the faults: what is left of the load, and the drain.
CALM_SECONDS = 8.0
# Writes of who was replaced, however short it is: three times what must be tried, because the database is often away.
STALE_WRITES, STALE_PER_SECOND = 1500, 6.0


def short(dice: random.Random) -> float:
    """Mostly below every threshold; now and then above the leader's lease."""
    return dice.uniform(6, 7) if dice.random() < 0.15 else dice.uniform(0.3, 2.0)


def long(dice: random.Random) -> float:
    """Mostly short; now and then past the silence after which a runner is given up."""
    return dice.uniform(11, 13) if dice.random() < 0.12 else dice.uniform(0.5, 3.0)


MENU: dict[str, Deed] = {
    "kill leader": lambda n, d: processes.kill_leader(n),
    "kill standby": lambda n, d: processes.kill_standby(n),
    "kill runner": lambda n, d: processes.kill_runner(n),
    "kill warm parent": lambda n, d: processes.kill_warm_parent(n),
    "kill body": lambda n, d: processes.kill_child(n),
    "freeze leader": lambda n, d: processes.freeze_leader(n, short(d)),
    "freeze planning leader": lambda n, d: processes.freeze_leader(n, short(d), is_planning=True),
    "freeze standby": lambda n, d: processes.freeze_standby(n, short(d)),
    "freeze runner": lambda n, d: processes.freeze_runner(n, long(d), with_bodies=False),
    "freeze runner and bodies": lambda n, d: processes.freeze_runner(n, long(d), with_bodies=True),
    "freeze body": lambda n, d: processes.freeze_child(n, d.uniform(0.3, 1.5)),
    "cut leader": lambda n, d: network.cut_leader(n, short(d)),
    "cut leader one way": lambda n, d: network.cut_leader(n, short(d), d.choice(("deaf", "mute"))),
    "cut runner": lambda n, d: network.cut_runner(n, long(d)),
    "cut runner one way": lambda n, d: network.cut_runner(n, long(d), d.choice(("deaf", "mute"))),
    "reset": lambda n, d: network.reset(n),
    "refuse": lambda n, d: network.refuse(n, d.uniform(0.5, 2)),
    "delay": lambda n, d: network.delay(n, d.uniform(0.5, 2), d.choice((50, 200, 800))),
    "drop reply": lambda n, d: network.drop_reply(n),
    "drop reply to client": lambda n, d: network.drop_reply(n, to=CLIENT, match="trigger_run"),
    "terminate sessions": lambda n, d: database.terminate(n),
    "terminate leader": lambda n, d: database.terminate_leader(n),
    "kill backend": lambda n, d: database.kill_backend(n),
    "kill postmaster": lambda n, d: database.kill_postmaster(n),
    "restart fast": lambda n, d: database.restart(n, "fast"),
    "restart immediate": lambda n, d: database.restart(n, "immediate"),
    "outage": lambda n, d: database.outage(n, d.uniform(0.5, 4)),
    "freeze database": lambda n, d: database.freeze(n, d.uniform(0.3, 2)),
    "hold a table": lambda n, d: database.lock(
        n, d.uniform(0.5, 2), d.choice(("task", "run_status", "runner", "shard"))
    ),
    "heavy queries": lambda n, d: database.crowd(n, d.uniform(0.5, 1.5), sessions=2),
    "two leaders": lambda n, d: planning.overlap(n, d.uniform(0.2, 0.8)),
    "poison schedule": lambda n, d: planning.poison_schedule(n),
    "poison version": lambda n, d: planning.poison_version(n),
    "retry storm": lambda n, d: planning.retry_storm(n),
}


# Deeds that need a member of their own, by its name.
ODD: dict[str, tuple[str, Deed]] = {
    "skew scheduler": (
        "scheduler-skewed",
        lambda n, d: skew(n, "scheduler-skewed", d.uniform(0.5, 2), d.choice(JUMPS_SECONDS)),
    ),
    "skew runner": ("runner-skewed", lambda n, d: skew(n, "runner-skewed", d.uniform(0.5, 2), d.choice(JUMPS_SECONDS))),
    "fill log folder": (SMALL, lambda n, d: full_spool(n, n.cluster.members[SMALL], d.uniform(0.5, 2))),
}


async def add_odd_members(stage: Stage) -> None:
    """Services with a clock that can be set and with a small disk, where this machine can have them."""
    for reason, add in ((lacks_false_clock(), add_skewed_services), (lacks_mounts(), add_small_runner)):
        if reason:
            stage.note(f"left out: {reason}")
        else:
            await add(stage)


async def composite(stage: Stage) -> None:
    members = stage.cluster.members
    menu = MENU | {name: deed for name, (member, deed) in ODD.items() if member in members}
    seconds = stage.seconds or stage.scaled(3600, DEFAULT_SECONDS)
    await stage.begin_load(seconds=seconds + CALM_SECONDS, steady=200, quick=12, lingering=1, per_second=2)
    over = time.monotonic() + seconds
    lanes = [Lane(stage.nemesis, menu, f"{stage.dice.random()}") for _ in range(LANES)]
    per_second = max(STALE_PER_SECOND, STALE_WRITES / seconds)
    async with haunted(stage.cluster, random.Random(stage.dice.random()), per_second=per_second) as zombie:
        await asyncio.gather(*(lane.run(over) for lane in lanes))
    stage.counted(zombie)


class Lane:
    """One fault after the other: every deed once, in the order of the seed, and then all of them again. The lanes
    together make one to three at a time."""

    def __init__(self, nemesis: Nemesis, menu: dict[str, Deed], seed: str) -> None:
        self._dice = random.Random(seed)
        self._nemesis, self._menu = nemesis.with_dice(random.Random(f"{seed} targets")), menu
        self._left: list[str] = []

    def draw(self) -> str:
        if not self._left:
            self._left = list(self._menu)
            self._dice.shuffle(self._left)
        return self._left.pop()

    async def run(self, over: float) -> None:
        await elapse(self._dice.uniform(0, 2))
        while time.monotonic() < over:
            # What one deed draws must not change what comes after it: how much it draws depends on whom it meets.
            name, dice, pause = self.draw(), random.Random(self._dice.random()), self._dice.uniform(0.05, 0.6)
            # The database may be away for another lane's sake; then this deed is not done, and comes again later.
            with suppress(psycopg.OperationalError, psycopg.InterfaceError, OSError):
                await self._menu[name](self._nemesis, dice)
            await elapse(pause)


SCENARIOS = (
    Scenario(
        name="N35",
        title="everything at once, by the seed",
        play=composite,
        prepare=add_odd_members,
        shape=lambda is_full: Shape(schedulers=2, runners=4 if is_full else 2, slots=6),
        required=INVARIANTS,
        is_alone=True,
    ),
)
