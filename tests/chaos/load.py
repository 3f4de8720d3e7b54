"""What the installation is given to do: schedules of many paces, and people who trigger runs and note every answer.

Everything is drawn from the seed. The schedules end by themselves, so that nobody has to stop them while things break.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import psycopg

from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.errors import EvertickError, PostgresUnavailable
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.runs import trigger
from evertick.runtime.connections import ReconnectingConnection
from tests.chaos.cluster import Cluster
from tests.chaos.dags import publish_specs
from tests.chaos.record import Answer, Phase
from tests.waiting import elapse, eventually

# Every schedule that falls behind catches up with all it missed, but for the DAGs that show the other policies.
MISFIRE = {
    **dict.fromkeys(("warm_chain", "late_latest"), MisfirePolicy.LATEST),
    **dict.fromkeys(("ledger", "late_skip"), MisfirePolicy.SKIP),
}

PACES_SECONDS = (5, 7, 10, 15, 20, 30, 45, 60)
MOST_SCHEDULES_OF_A_DAG = 50
# Where every run waits for the one before it, there must be time to catch up.
LINGERING_PACES = {
    OverlapPolicy.SKIP: 1.0,
    OverlapPolicy.QUEUE_ONE: 1.0,
    OverlapPolicy.QUEUE_ALL: 4.0,
    OverlapPolicy.CANCEL: 1.5,
}
ANSWER_SECONDS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """`steady` schedules fire every 5 to 60 s, `quick` ones every second; `per_second` runs are triggered by hand. For each
    policy about overlaps there are so many `lingering` schedules, whose runs often last longer than until the next fire."""

    seconds: float
    lingering: int = 0
    steady: int = 0
    quick: int = 0
    per_second: float = 0.0
    steady_dags: tuple[str, ...] = ("chain", "chain", "flaky", "warm_chain", "slow", "ledger", "guarded")
    quick_dags: tuple[str, ...] = ("pulse",)
    trigger_dags: tuple[str, ...] = ("pulse", "chain", "flaky", "guarded")
    paces: tuple[float, ...] = PACES_SECONDS


@dataclass(slots=True, kw_only=True)
class Load:
    """Begin it, break things, and wait for its end."""

    cluster: Cluster
    plan: LoadPlan
    dice: random.Random
    end_at: datetime | None = None
    acknowledged: int = 0
    _clients: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self) -> None:
        """Publish all, with schedules that fire from almost now until the end."""
        async with await connect(self.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            start_at = await shards.read_clock(conn) + timedelta(seconds=2)
            self.end_at = start_at + timedelta(seconds=self.plan.seconds)
            specs = self._specs(start_at, self.end_at)
            await publish_specs(conn, self.cluster.ground.work, specs)
        self.cluster.record.phase(Phase.LOAD)
        if self.plan.per_second > 0:
            self._clients = [asyncio.create_task(self._trigger_for_ever(number)) for number in range(2)]

    def _specs(self, start_at: datetime, end_at: datetime) -> list[DagSpec]:
        known = self.cluster.ground.work.specs
        schedules: dict[str, list[NamedSchedule]] = defaultdict(list)
        for number in range(self.plan.steady):
            dag = self.plan.steady_dags[number % len(self.plan.steady_dags)]
            pace = self.dice.choice(self.plan.paces)
            schedules[dag].append(self._every(pace, f"{dag}-{number}", start_at, end_at))
        for number in range(self.plan.quick):
            dag = self.plan.quick_dags[number % len(self.plan.quick_dags)]
            schedules[dag].append(self._every(1, f"{dag}-quick-{number}", start_at, end_at))
        for policy, pace in LINGERING_PACES.items():
            for number in range(self.plan.lingering):
                dag = f"linger_{policy}"
                schedules[dag].append(self._every(pace, f"{dag}-{number}", start_at, end_at))
        return [
            replace(
                spec,
                schedules=tuple(schedules[name]),
                misfire=MISFIRE.get(name, MisfirePolicy.ALL),
                catchup_window_seconds=86_400.0,
            )
            for name, spec in known.items()
        ]

    def _every(self, pace: float, name: str, start_at: datetime, end_at: datetime) -> NamedSchedule:
        """Some by cron with seconds, most by interval; each at an offset of its own, so that they do not all come at once."""
        params: dict[str, object] = {"schedule": name}
        if name.startswith("guarded"):
            params["half"] = self.dice.randrange(2)
        if pace == 1 and self.dice.random() < 0.3:
            return NamedSchedule(
                name=name, spec=parse_schedule("* * * * * *", start_at=start_at, end_at=end_at), params=params
            )
        # Also a load that is shorter than the pace has each schedule fire once.
        anchor = start_at + timedelta(milliseconds=self.dice.randrange(int(min(pace, self.plan.seconds) * 1000)))
        spec = parse_schedule(timedelta(seconds=pace), start_at=start_at, end_at=end_at, anchor_at=anchor)
        return NamedSchedule(name=name, spec=spec, params=params)

    async def _trigger_for_ever(self, client: int) -> None:
        """One person who triggers runs with keys. An answer that does not come leaves the outcome unknown; half of the
        time the same key is sent again until it is known."""
        link = ReconnectingConnection(self.cluster.client_url, Purpose.SCHEDULER)
        dice = random.Random(f"{self.dice.random()} {client}")
        number = 0
        try:
            while True:
                number += 1
                key, dag = f"client-{client}-{number}", dice.choice(self.plan.trigger_dags)
                self.cluster.clients.asked("trigger", request=key, dag=dag)
                insists = dice.random() < 0.5
                while not await self._ask(link, key, dag) and insists:
                    await elapse(0.3)
                await elapse(dice.uniform(0.5, 1.5) * 2 / self.plan.per_second)
        finally:
            await link.close()

    async def _ask(self, link: ReconnectingConnection, key: str, dag: str) -> bool:
        """Whether the answer is known."""
        clients = self.cluster.clients
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                made = await trigger(await link.get(), dag=dag, params={}, actor=Actor("client"), key=key)
        except (psycopg.Error, PostgresUnavailable, OSError, TimeoutError) as error:
            clients.answered(key, Answer.UNKNOWN, error=f"{type(error).__name__}: {error}")
            await link.close()
            return False
        except EvertickError as error:
            clients.answered(key, Answer.ERROR, error=str(error))
            return True
        clients.answered(key, Answer.OK, run_id=made.run_id)
        self.acknowledged += 1
        return True

    async def cut_short(self) -> None:
        """End it now, as people would: publish every DAG without its schedules."""
        async with await connect(self.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            await publish_specs(conn, self.cluster.ground.work, list(self.cluster.ground.work.specs.values()))
            self.end_at = await shards.read_clock(conn)

    async def over(self) -> None:
        """Wait until the last schedule has ended, and let the people go home."""
        assert self.end_at is not None
        end_at = self.end_at

        async def is_past() -> bool:
            now: datetime | None = await self.cluster.watch.value("select clock()")
            return now is not None and now > end_at

        await eventually(is_past, self.plan.seconds + 120, pause_seconds=0.1)
        await self.stop_clients()
        self.cluster.record.phase(Phase.STOPPED)

    async def stop_clients(self) -> None:
        for client in self._clients:
            client.cancel()
            with suppress(asyncio.CancelledError):
                await client
        self._clients = []


@asynccontextmanager
async def loaded(cluster: Cluster, plan: LoadPlan, dice: random.Random) -> AsyncIterator[Load]:
    """The load for the length of the block, and at the end of the block its own end."""
    load = Load(cluster=cluster, plan=plan, dice=dice)
    await load.begin()
    try:
        yield load
        await load.over()
    finally:
        await load.stop_clients()
