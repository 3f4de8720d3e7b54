"""What breaks things: every fault is logged from its begin to its end, and how long the system took to be well again.

Which fault is done to whom is drawn from the seed. A fault ends in any case, also when the harness is interrupted.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.engine.runs import trigger
from tests.chaos.cluster import Cluster
from tests.chaos.members import Member
from tests.chaos.record import Answer, Fault, boot_ns
from tests.chaos.watch import Led
from tests.waiting import elapse

RECOVERY_SECONDS = 60.0
LOOK_SECONDS = 0.02

Condition = Callable[[], Awaitable[bool]]


@dataclass(slots=True, kw_only=True)
class Struck:
    """One fault that was done; or not, if what it needed was not there: then it is void, and not counted."""

    number: int
    name: str
    target: str
    began_ns: int
    ended_ns: int | None = None
    well_ns: int | None = None
    recovered_seconds: float | None = None
    is_void: bool = False
    is_awaited: bool = False

    def touches(self, other: Struck) -> bool:
        """Whether it was going on, or not yet well again, at some time after the other one began."""
        lasts = self.ended_ns is None or self.is_awaited
        return self is not other and (lasts or max(self.ended_ns or 0, self.well_ns or 0) >= other.began_ns)


@dataclass(slots=True, kw_only=True)
class Nemesis:
    """Does faults to one installation. `trouble` holds what did not recover."""

    cluster: Cluster
    dice: random.Random
    done: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    # Those of them during which nothing else was broken: what the promises of docs/explanation/guarantees.md are about.
    alone: dict[str, list[float]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    _struck: list[Struck] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def with_dice(self, dice: random.Random) -> Nemesis:
        """The same nemesis, drawing from other dice: what one lane does must not depend on how fast another one is."""
        return replace(self, dice=dice)

    def unique(self) -> int:
        return next(self._numbers)

    @asynccontextmanager
    async def fault(
        self,
        kind: Fault,
        target: str,
        *,
        part: str = "",
        disturbs: Iterable[str] | None = None,
        until: Condition | None = None,
        **parameters: Any,
    ) -> AsyncIterator[Struck]:
        """For as long as the block lasts. `part` says what of the target is hit: its leader, its child, its backend.

        With `until`, recovery is looked for from the begin on, also while the fault lasts, and waited for at the end.
        """
        name = f"{kind} {part}".strip()
        log = self.cluster.record
        number = log.began(kind, target, disturbs=disturbs, part=part, **parameters)
        struck = Struck(number=number, name=name, target=target, began_ns=boot_ns())
        self._struck.append(struck)
        self.done[name] += 1
        watching = asyncio.create_task(self.recovery(struck, until, from_begin=True)) if until is not None else None
        try:
            yield struck
            struck.ended_ns = boot_ns()
            log.ended(number)
            if watching is not None:
                await watching
        finally:
            if struck.ended_ns is None:
                # Whatever broke, broke while it was being done.
                struck.is_void = True
                log.ended(number)
            self.done[name] -= struck.is_void
            if watching is not None:
                watching.cancel()
            if struck.recovered_seconds is not None:
                log.ended(number, recovered_seconds=round(struck.recovered_seconds, 3))

    async def recovery(
        self, struck: Struck, is_well: Condition, *, from_begin: bool = False, within_seconds: float = RECOVERY_SECONDS
    ) -> float | None:
        """Wait until it is well again and note how long that took since the fault's end, or since its begin; None if it
        never was."""
        deadline = time.monotonic() + within_seconds
        struck.is_awaited = True
        try:
            while not await is_well():
                if time.monotonic() > deadline:
                    self.trouble.append(f"{struck.name} of {struck.target}: not recovered within {within_seconds:g} s")
                    return None
                await elapse(LOOK_SECONDS)
        finally:
            struck.is_awaited, struck.well_ns = False, boot_ns()
        since = struck.began_ns if from_begin else struck.ended_ns
        assert since is not None, "what counts from the end is looked for after the end"
        seconds = (struck.well_ns - since) / 1e9
        struck.recovered_seconds = seconds
        self.recoveries.setdefault(struck.name, []).append(seconds)
        if not any(each.touches(struck) for each in self._struck):
            self.alone.setdefault(struck.name, []).append(seconds)
        if struck.ended_ns is not None:
            self.cluster.record.ended(struck.number, recovered_seconds=round(seconds, 3))
        return seconds

    @asynccontextmanager
    async def only(self, *names: str) -> AsyncIterator[bool]:
        """Whether these targets are free; inside the block nobody else hits them."""
        is_free = not self._busy.intersection(names)
        if is_free:
            self._busy.update(names)
        try:
            yield is_free
        finally:
            if is_free:
                self._busy.difference_update(names)

    def is_free(self, name: str) -> bool:
        return name not in self._busy

    async def pick_leader(self, *, of: str | None = None) -> tuple[Member, Led] | None:
        """A leader and its epochs by shard, if there is one that nothing is being done to. `of`: it leads this DAG's shard."""
        found = await self.cluster.leaders()
        if of is not None:
            shard = await self.cluster.watch.value("select shard from dag where name = %s", of)
            found = [(member, led) for member, led in found if shard in led]
        if not found:
            return None
        member, led = self.dice.choice(found) if len(found) > 1 else found[0]
        return (member, led) if member.pid is not None and self.is_free(member.name) else None

    async def pick_standby(self) -> Member | None:
        leading = [member.name for member, _ in await self.cluster.leaders()]
        return self._pick(member for member in self.cluster.of_kind("scheduler") if member.name not in leading)

    def pick_runner(self) -> Member | None:
        return self._pick(self.cluster.of_kind("runner"))

    def _pick(self, members: Iterable[Member]) -> Member | None:
        free = [member for member in members if member.pid is not None and self.is_free(member.name)]
        return self.dice.choice(free) if free else None

    # What it means to be well again -----------------------------------------------------------------------------------

    def led_by_another(self, led: Led) -> Condition:
        """Of each of these shards a newer leader than that of the epoch holds a live lease."""

        async def is_so() -> bool:
            now = {each.shard: each.epoch for each in await self.cluster.watch.leaders() if each.is_live}
            return all(now.get(shard, 0) > epoch for shard, epoch in led.items())

        return is_so

    def beats_again(self, runner: Member) -> Condition:
        """The runner's heartbeat is counted: of the session that it had, or of a new one."""
        before: dict[int, int] = {}

        async def is_so() -> bool:
            rows = await self.cluster.watch.rows(
                "select session, heartbeat_seq from runner where runner_id = %s and ended_at is null", runner.name
            )
            heard = {session for session, beat in rows or [] if beat > before.setdefault(session, beat)}
            return bool(heard)

        return is_so

    def reran(self, held: list[tuple[int, int, int, int]]) -> Condition:
        """Every attempt of (run, task, map index, epoch) was given up, and its task runs again elsewhere or has ended."""

        async def is_so() -> bool:
            rows = await self.cluster.watch.rows(
                "select count(*) from unnest(%s::bigint[], %s::int[], %s::int[], %s::int[]) h(r, i, m, e)"
                " join task k on k.run_id = h.r and k.idx = h.i and k.map_index = h.m"
                " where k.epoch = h.e and k.state not in ('success', 'failed', 'skipped', 'canceled')",
                *([each[column] for each in held] for column in range(4)),
            )
            return rows is not None and rows[0][0] == 0

        return is_so

    def works_again(self) -> Condition:
        """Somebody leads, and a run that is triggered now is executed to its end."""
        key = f"probe-{self.unique()}"
        is_asked = False

        async def is_so() -> bool:
            nonlocal is_asked
            if not await self.cluster.watch.is_led():
                return False
            if not is_asked:
                is_asked = await self._probe(key)
            state = await self.cluster.watch.value(
                "select s.state::text from run r join run_status s using (run_id) where r.key = %s", key
            )
            return state in ("success", "failed", "canceled")

        return is_so

    async def _probe(self, key: str) -> bool:
        clients = self.cluster.clients
        clients.asked("trigger", request=key, dag="pulse")
        try:
            async with asyncio.timeout(5), await connect(self.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
                made = await trigger(conn, dag="pulse", params={}, actor=Actor("probe"), key=key)
        except Exception as error:  # whatever it was, the next look asks again with the same key
            clients.answered(key, Answer.UNKNOWN, error=str(error))
            return False
        clients.answered(key, Answer.OK, run_id=made.run_id)
        return True

    async def held_by(self, runner: Member) -> list[tuple[int, int, int, int]]:
        """What the runner's live sessions hold now: run, task, map index, epoch."""
        rows = await self.cluster.watch.rows(
            "select l.run_id, l.idx, l.map_index, l.epoch from lease l join runner r using (session)"
            " where r.runner_id = %s and r.ended_at is null",
            runner.name,
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows or []]
