"""A place elsewhere, and an executor for it that can be slow, flaky, forgetful or busy. Its agents are stand-ins that do in SQL
what an agent has the API do; what they run is nothing, and whether two ran one attempt is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.agent_protocol import to_bytes
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable, SubmissionRefused
from evertick.engine.finish_and_claim import finish_and_claim
from evertick.executors.base import Observed, Phase, RemoteOrder
from tests.engine.remote_agents import begin
from tests.waiting import elapse

# What a place does with a submission, by its name and how often it came. `fine` takes it; `lost` says so and does not;
# `late` takes it and does not answer.
Mood = Callable[[str, int], str]


@dataclass(slots=True)
class Thing:
    order: RemoteOrder
    seen: Observed
    life: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Place:
    """What is over there. It outlives executors. `lives`: whether what is taken begins by itself, and how it goes on:
    `run` to its end, `hold` until it is let go, `idle` (it never begins), `die` after it began, `leave`: it ends with nothing but
    its outcome, as an agent does that cannot reach the API; `deaf`: the same, but it goes on; `linger`: it tells its end, and goes
    on until it is let go.
    `stale` is what looks show instead of what there is, and `stuck` what cannot be taken away; `taken_away` says as what each was.
    """

    url: str
    lives: str = "run"
    mood: Mood = lambda name, tries: "fine"
    is_down: bool = False
    is_mute: bool = False
    latency_seconds: float = 0.0
    looks: int = 0
    stale: dict[str, Observed] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    taken_away: dict[str, Phase] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    things: dict[str, Thing] = field(default_factory=dict)
    most_at_once: int = 0
    at_once: int = 0
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, order: RemoteOrder) -> None:
        if order.name not in self.things:
            thing = self.things[order.name] = Thing(order, Observed(phase=Phase.WAITING))
            # How it lives is settled when it is taken: by the time it begins, a test may have asked for something else.
            thing.life = asyncio.get_running_loop().create_task(self._live(thing, self.lives))
            self.changed.set()

    def end(self, name: str, seen: Observed) -> None:
        """It ended over there by itself."""
        self.things[name].seen = seen
        self.changed.set()

    async def _live(self, thing: Thing, lives: str) -> None:
        if lives == "idle":
            return
        async with await connect(self.url, purpose=Purpose.SCHEDULER) as conn:
            if not await begin(conn, session=thing.order.session, epoch=thing.order.epoch):
                self.end(thing.order.name, Observed(phase=Phase.ENDED, reason="refused", exit_code=3))
                return
            self.begun[thing.order.name] += 1
            thing.seen = Observed(phase=Phase.RUNNING)
            if lives == "die":
                self.end(thing.order.name, Observed(phase=Phase.ENDED, reason="OOMKilled", exit_code=137))
                return
            if lives == "hold":
                await self.let_go.wait()
            left = outcome_of(thing.order)
            if lives == "deaf":
                self.end(thing.order.name, Observed(phase=Phase.RUNNING, outcome=left))
                await self.let_go.wait()
            if lives not in ("leave", "deaf"):
                await finish(conn, thing.order)
            if lives == "linger":
                await self.let_go.wait()
            self.end(thing.order.name, Observed(phase=Phase.ENDED, exit_code=0, outcome=left))

    async def close(self) -> None:
        lives = [thing.life for thing in self.things.values() if thing.life is not None]
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)


async def finish(conn: AsyncConnection, order: RemoteOrder) -> None:
    key = order.key
    told = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": order.epoch, "kind": "success"}
    # At once, as `finish_attempt` does it: a look in between would find an attempt that is over and has not told its end.
    async with conn.transaction():
        await finish_and_claim(
            conn, session=order.session, reports=[json.dumps(told)], queues=[], free=0, infra_retries=3
        )
        await conn.execute(
            "update runner set ended_at = clock(), end_reason = 'finished' where session = %s", [order.session]
        )


def outcome_for(order: RemoteOrder) -> Outcome:
    return Outcome(key=order.key, epoch=order.epoch, kind=OutcomeKind.SUCCESS, result_json='"far"')


def outcome_of(order: RemoteOrder) -> bytes:
    return to_bytes(outcome_for(order), session=order.session)


class UnrulyExecutor:
    """One of possibly several for the same place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def submit(self, order: RemoteOrder) -> None:
        place = self._place
        place.tries[order.name] += 1
        place.at_once += 1
        place.most_at_once = max(place.most_at_once, place.at_once)
        try:
            await self._answer()
            await self._submit(order, place.mood(order.name, place.tries[order.name]))
        finally:
            place.at_once -= 1

    async def _submit(self, order: RemoteOrder, mood: str) -> None:
        match mood:
            case "busy":
                raise ExecutorBusy("quota exceeded", retry_after_seconds=0.05)
            case "down":
                raise ExecutorUnavailable("500 internal error")
            case "refused":
                raise SubmissionRefused("no such image")
            case "broken":
                raise RuntimeError("a bug of the executor's own")
            case "late":
                self._place.take(order)
                raise ExecutorUnavailable("no answer in time")
            case "lost":
                return
            case _:
                self._place.take(order)

    async def observe(self) -> Mapping[str, Observed]:
        await self._answer()
        self._place.looks += 1
        return {name: self._place.stale.get(name, thing.seen) for name, thing in self._place.things.items()}

    async def find(self, name: str) -> Observed | None:
        await self._answer()
        thing = self._place.things.get(name)
        return None if thing is None else thing.seen

    async def cancel(self, name: str, grace_seconds: float) -> None:
        await self._answer()
        if name in self._place.stuck:
            raise ExecutorUnavailable("admission denied the request")
        thing = self._place.things.pop(name, None)
        if thing is not None:
            self._place.taken_away[name] = thing.seen.phase
        if thing is not None and thing.life is not None:
            thing.life.cancel()
        self._place.changed.set()

    async def hints(self) -> AsyncIterator[None]:
        while True:
            await self._place.changed.wait()
            self._place.changed.clear()
            if self._place.is_mute:
                raise RuntimeError("a bug of the executor's own")
            yield None

    async def _answer(self) -> None:
        if self._place.latency_seconds:
            await elapse(self._place.latency_seconds)
        if self._place.is_down:
            raise ExecutorUnavailable("connection refused")
