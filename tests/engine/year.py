"""A simulated year: random schedules, two schedulers that crash and take over, people who pause, edit, delete and deploy. In
the end every fire and every skip record must be exactly what the oracle says.

    python -m tests.engine.year [--schedules 500] [--days 365] [--seed N]

Every choice comes from one random generator and the database's clock is set, so that a seed repeats exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import NotLeader
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy, delay_of
from evertick.domain.schedules.spec import ScheduleKind, parse_schedule
from evertick.engine.dags import pause, unpause
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.schedules import (
    CatchUp,
    delete_schedule,
    pause_schedule,
    put_schedule,
    reset_schedule,
    unpause_schedule,
)
from tests.databases import own_cluster
from tests.engine.world import lead, make_dag, put, set_clock, value
from tests.engine.year_oracle import Life, Record

BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca")
CRONS = (
    "30 2 * * *",
    "30 1 * * *",
    "0 */6 * * *",
    "15 */12 * * *",
    "0 12 * * MON-FRI",
    "*/20 2 * * *",
    "0 0 L * *",
    "0 0 13 * 5",
    "45 23 * * 5#2",
    "0 3 1,15 * *",
)
PER_DAG = 5


class Mismatch(AssertionError):
    """The tables and the oracle do not say the same."""


class Year:
    """`conns` are the two schedulers; people use the second one."""

    def __init__(self, conns: list[AsyncConnection], *, seed: int, schedules: int, days: float) -> None:
        self.conns, self.dice, self.seed = conns, random.Random(seed), seed
        self.now, self.end = BEGIN, BEGIN + timedelta(days=days)
        self.zones = ZONES if days > 100 else ZONES[:3]
        self.dags = [f"d{number}" for number in range(max(1, schedules // PER_DAG))]
        self.code: dict[str, dict[str, NamedSchedule]] = {dag: {} for dag in self.dags}
        self.lives: dict[tuple[str, str], Life] = {}
        for number in range(schedules):
            dag, name = self.dags[number % len(self.dags)], f"s{number}"
            self.lives[dag, name] = Life(begin=BEGIN, end=self.end)
            self.code[dag][name] = self._schedule(name)
        self.paused: set[str] = set()
        self.leader, self.epochs = 0, [0]
        self.did: Counter[str] = Counter()

    async def run(self) -> None:
        await self._set_clock()
        self.epochs.append(await lead(self.conns[0]))
        for dag in self.dags:
            await self._publish(dag)
        while self.now < self.end:
            await self._advance()
            names = list(ACTIONS)
            name = self.dice.choices(names, [ACTIONS[each][1] for each in names])[0]
            await ACTIONS[name][0](self)
            self.did[name] += 1
        await self.fire()
        await self.compare()

    async def compare(self) -> None:
        found_fires: dict[tuple[str, str], list[datetime]] = {key: [] for key in self.lives}
        found_skips: dict[tuple[str, str], list[Record]] = {key: [] for key in self.lives}
        of = "from {} x join schedule c using (schedule_id) join dag d on d.dag_id = c.dag_id"
        cursor = await self.conns[0].execute(f"select d.name, c.name, x.fire_at {of.format('run')} order by x.fire_at")  # type: ignore[arg-type]
        for dag, name, at in await cursor.fetchall():
            found_fires[dag, name].append(at)
        columns = "d.name, c.name, x.first_at, x.last_at, x.count, x.reason"
        cursor = await self.conns[0].execute(f"select {columns} {of.format('skip_record')} order by x.first_at")  # type: ignore[arg-type]
        for dag, name, *record in await cursor.fetchall():
            found_skips[dag, name].append(tuple(record))
        for key, life in self.lives.items():
            _compare(f"seed {self.seed}: fires of {key}, {life.wanted}", found_fires[key], sorted(life.fires))
            _compare(f"seed {self.seed}: skips of {key}, {life.wanted}", found_skips[key], sorted(life.skips))

    # the schedulers ---------------------------------------------------------------------------------------------------

    async def fire(self) -> None:
        await self._drain(self.conns[self.leader])
        self._fired()

    async def fire_both(self) -> None:
        """The election switched off: both act with the valid epoch at the same instant."""
        await asyncio.gather(*(self._drain(conn) for conn in self.conns))
        await self._drain(self.conns[self.leader])
        self._fired()

    async def crash(self) -> None:
        """Before the commit of a batch, after the commit of another, and the other scheduler goes on."""
        conn = self.conns[self.leader]
        async with conn.transaction(force_rollback=True):
            await fire_schedules(conn, shard=0, epoch=self.epochs[-1], batch=self.dice.choice([1, 7, 1000]))
        # A smaller batch would also fire fewer of one schedule at once, and give what overlaps more records than one.
        await fire_schedules(conn, shard=0, epoch=self.epochs[-1], batch=self.dice.choice([100, 150]))
        await self.take_over()
        await self.fire()

    async def take_over(self) -> None:
        self.leader = 1 - self.leader
        self.epochs.append(await lead(self.conns[self.leader]))
        old = self.conns[1 - self.leader]
        try:
            await fire_schedules(old, shard=0, epoch=self.epochs[-2], batch=1000)
        except NotLeader:
            return
        if await value(old, "select count(*) from schedule_state where next_due <= clock() and not is_paused"):
            raise Mismatch(f"seed {self.seed}: an old leader was not refused")

    async def work(self) -> None:
        """Whatever is open ends, as if runners had done it: what waits for nobody would only fill the line."""
        conn = self.conns[1]
        async with conn.transaction():
            await conn.execute("truncate ready_task, task")
            ended = "update run_status set state = 'success', open_tasks = 0, finished_at = clock()"
            await conn.execute(f"{ended} where state in ('queued', 'running')")  # type: ignore[arg-type]
        for life in self.lives.values():
            life.open_runs = 0

    # people -----------------------------------------------------------------------------------------------------------

    async def edit(self) -> None:
        dag, name, life = self._any()
        wanted = self._schedule(name, life.wanted)
        await self._crash_first(lambda: put_schedule(self.conns[1], dag=dag, schedule=wanted, actor=Actor("ann")))
        life.set(wanted, delay_of(wanted.spec, dag=dag, name=name), self.now)
        life.by_hand = True

    async def hold(self) -> None:
        dag, name, life = self._any()
        if life.wanted is None:
            return
        if life.is_held or self.dice.random() < 0.3:
            policy, window = self._catch_up()
            asked = CatchUp(policy=policy, window_seconds=window)
            await self._crash_first(
                lambda: unpause_schedule(self.conns[1], dag=dag, name=name, actor=Actor("bob"), catch_up=asked)
            )
            life.by_hand |= life.is_held
            life.unpause(self.now, policy, window, dag=False)
        else:
            await self._crash_first(lambda: pause_schedule(self.conns[1], dag=dag, name=name, actor=Actor("bob")))
            life.pause(self.now, dag=False)
            life.by_hand = True

    async def hold_dag(self) -> None:
        dag = (
            self.dice.choice(sorted(self.paused))
            if self.paused and self.dice.random() < 0.6
            else self.dice.choice(self.dags)
        )
        lives = [life for (of, _), life in self.lives.items() if of == dag]
        if dag in self.paused:
            policy, window = self._catch_up()
            asked = CatchUp(policy=policy, window_seconds=window)
            await self._crash_first(lambda: unpause(self.conns[1], dag=dag, actor=Actor("bob"), catch_up=asked))
            self.paused.remove(dag)
            for life in lives:
                life.unpause(self.now, policy, window, dag=True)
        else:
            await self._crash_first(lambda: pause(self.conns[1], dag=dag, actor=Actor("bob")))
            self.paused.add(dag)
            for life in lives:
                life.pause(self.now, dag=True)

    async def remove(self) -> None:
        dag, name, life = self._any()
        if life.wanted is None or self.dice.random() < 0.3:
            await reset_schedule(self.conns[1], dag=dag, name=name, actor=Actor("cid"))
            wanted = self.code[dag][name]
            life.set(wanted, delay_of(wanted.spec, dag=dag, name=name), self.now)
            life.by_hand = life.is_held = False
        else:
            await self._crash_first(lambda: delete_schedule(self.conns[1], dag=dag, name=name, actor=Actor("cid")))
            life.remove(self.now)
            life.by_hand = True

    async def deploy(self) -> None:
        dag, name, _ = self._any()
        self.code[dag][name] = self._schedule(name, self.code[dag][name])
        await self._publish(dag)

    # how --------------------------------------------------------------------------------------------------------------

    async def _publish(self, dag: str) -> None:
        declared = self.code[dag]
        shape = replace(make_dag(dag, {"a": []}), schedules=tuple(declared.values()))
        await put(self.conns[1], shape)
        for name, wanted in declared.items():
            life = self.lives[dag, name]
            if not life.by_hand and life.wanted != wanted:
                life.set(wanted, delay_of(wanted.spec, dag=dag, name=name), self.now)

    async def _drain(self, conn: AsyncConnection) -> None:
        while (await fire_schedules(conn, shard=0, epoch=self.epochs[-1], batch=1000)).was_due:
            pass

    def _fired(self) -> None:
        for life in self.lives.values():
            life.fire(self.now)

    async def _crash_first(self, change: Callable[[], Awaitable[object]]) -> None:
        """Now and then whoever changes something dies before its commit, and does it again."""
        if self.dice.random() < 0.2:
            async with self.conns[1].transaction(force_rollback=True):
                await change()
        await change()

    async def _advance(self) -> None:
        if self.dice.random() < 0.15:
            due = await value(self.conns[0], "select min(next_due) from schedule_state where not is_paused")
            if isinstance(due, datetime):
                late = timedelta(milliseconds=self.dice.choice([0, 0, 1, 900, 9_999, 10_001]))
                self.now = max(self.now, min(due + late, self.end))
        elif (later := self._later_times()) and self.dice.random() < 0.3:
            self.now = min(min(later) + timedelta(milliseconds=self.dice.choice([9_000, 9_999, 10_001])), self.end)
        else:
            self.now = min(self.now + timedelta(seconds=round(self.dice.expovariate(1 / (8 * 3600)), 3)), self.end)
        await self._set_clock()

    def _later_times(self) -> list[datetime]:
        lives = [each for each in self.lives.values() if each.wanted and each.wanted.spec.kind is ScheduleKind.TIMES]
        return [at + each.delay for each in lives for at in each.instants if at + each.delay > self.now]

    async def _set_clock(self) -> None:
        for conn in self.conns:
            await set_clock(conn, self.now)

    def _any(self) -> tuple[str, str, Life]:
        (dag, name), life = self.dice.choice(list(self.lives.items()))
        return dag, name, life

    def _catch_up(self) -> tuple[MisfirePolicy, float | None]:
        return self.dice.choice(list(MisfirePolicy)), self.dice.choice([None, None, 3600.0, 864_000.0])

    def _schedule(self, name: str, old: NamedSchedule | None = None) -> NamedSchedule:
        """A random one; some changes leave the instants as they are, and change the jitter or the rules alone."""
        dice = self.dice
        jitter = dice.choice([None, None, 60, 7200])
        if old is not None and dice.random() < 0.4:
            spec = replace(old.spec, jitter_seconds=float(jitter) if jitter else None)
        else:
            zone = dice.choice(self.zones)
            spec = parse_schedule(self._when(), timezone=zone, jitter_seconds=jitter)
            if spec.kind in (ScheduleKind.CRON, ScheduleKind.INTERVAL) and dice.random() < 0.2:
                start_at = BEGIN + (self.end - BEGIN) * dice.random() * 0.5
                spec = replace(
                    spec, start_at=start_at, end_at=start_at + timedelta(days=32) + (self.end - BEGIN) * dice.random()
                )
        return NamedSchedule(
            name=name,
            spec=spec,
            misfire=dice.choice(list(MisfirePolicy)),
            catchup_window_seconds=dice.choice([0.0, 3600.0, 86_400.0, 864_000.0]),
            catchup_limit=dice.choice([None, 1, 3, 120]),
            overlap=dice.choice([OverlapPolicy.ALLOW] * 6 + list(OverlapPolicy)),
        )

    def _when(self) -> object:
        dice = self.dice
        match dice.choice(["cron", "cron", "interval", "once", "times"]):
            case "cron":
                return dice.choice(CRONS)
            case "interval":
                return timedelta(seconds=dice.choice([5400, 7200.5, 43_200, 86_400, 100_000]))
            case "once":
                return self._moment()
            case _:
                # In bursts: a look that is a little late finds several, some of them on time.
                moments = [self._moment() for _ in range(dice.randint(2, 20))]
                return [at + timedelta(seconds=4 * n) for at in moments for n in range(dice.choice([1, 4]))]

    def _moment(self) -> datetime:
        return BEGIN + timedelta(seconds=round((self.end - BEGIN).total_seconds() * self.dice.random()))


def _compare(what: str, found: list[object], expected: list[object]) -> None:
    if found != expected:
        extra = [each for each in found if each not in expected]
        missing = [each for each in expected if each not in found]
        raise Mismatch(f"{what}: {len(found)}, not {len(expected)}; extra {extra[:3]}, missing {missing[:3]}")


ACTIONS: dict[str, tuple[Callable[[Year], Awaitable[None]], int]] = {
    "fire": (Year.fire, 40),
    "fire_both": (Year.fire_both, 10),
    "crash": (Year.crash, 6),
    "take_over": (Year.take_over, 3),
    "work": (Year.work, 8),
    "edit": (Year.edit, 8),
    "hold": (Year.hold, 8),
    "hold_dag": (Year.hold_dag, 6),
    "remove": (Year.remove, 3),
    "deploy": (Year.deploy, 4),
}


async def run_year(url: str, *, seed: int, schedules: int, days: float) -> Counter[str]:
    """On the fresh database at `url`. Returns how often what was done, and how much there was to compare."""
    conns = [await connect(url, purpose=Purpose.SCHEDULER) for _ in range(2)]
    try:
        year = Year(conns, seed=seed, schedules=schedules, days=days)
        await year.run()
        runs = await value(conns[0], "select count(*) from run")
        records = await value(conns[0], "select count(*) from skip_record")
        return year.did + Counter({"runs": int(str(runs)), "skip_records": int(str(records))})
    finally:
        for conn in conns:
            await conn.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--days", type=float, default=365)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, own_cluster(Path(folder) / "postgres") as cluster:
        name = cluster.create(cluster.template())
        print(f"{options.schedules} schedules, {options.days:g} days, seed {seed} ...", file=sys.stderr)
        did = asyncio.run(
            run_year(cluster.database_url(name), seed=seed, schedules=options.schedules, days=options.days)
        )
    print(f"Fires and skip records equal the oracle exactly (seed {seed}, {time.monotonic() - began:.0f} s).")
    for action, count in did.most_common():
        print(f"  {action:<20}{count:>10,}")


if __name__ == "__main__":
    main()
