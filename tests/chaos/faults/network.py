"""The way between one service and the database: cut, slow, deaf on one side, refused, or losing an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.cluster import CLIENT
from tests.chaos.members import Member
from tests.chaos.nemesis import Condition, Nemesis
from tests.chaos.proxy import Mode
from tests.chaos.record import Fault
from tests.waiting import elapse, eventually

CUTS = {
    "blackhole": (Fault.CUT, Mode.blackhole()),
    "deaf": (Fault.ONE_WAY, Mode.one_way("up")),
    "mute": (Fault.ONE_WAY, Mode.one_way("down")),
}


@asynccontextmanager
async def _mode(nemesis: Nemesis, group: str, mode: Mode) -> AsyncIterator[None]:
    nemesis.cluster.proxy.set(group, mode)
    try:
        yield
    finally:
        nemesis.cluster.proxy.heal(group)


async def cut_leader(nemesis: Nemesis, seconds: float, how: str = "blackhole") -> float | None:
    """Cut it off; seconds until another one leads, counted from the cut."""
    found = await nemesis.pick_leader()
    if found is None:
        return None
    leader, epoch = found
    kind, mode = CUTS[how]
    until = nemesis.led_by_another(epoch) if seconds > nemesis.cluster.lease_seconds else None
    async with nemesis.only(leader.name):
        async with nemesis.fault(kind, leader.name, part=f"leader {how}", seconds=seconds, until=until) as struck:
            async with _mode(nemesis, leader.name, mode):
                await elapse(seconds)
        if until is None:
            await nemesis.recovery(struck, nemesis.works_again())
    return struck.recovered_seconds


async def cut_runner(nemesis: Nemesis, seconds: float, how: str = "blackhole") -> float | None:
    """Cut it off; seconds after the cut has ended until its heartbeat is heard again."""
    runner = nemesis.pick_runner()
    if runner is None:
        return None
    kind, mode = CUTS[how]
    async with nemesis.only(runner.name):
        async with nemesis.fault(kind, runner.name, part=f"runner {how}", seconds=seconds) as struck:
            async with _mode(nemesis, runner.name, mode):
                await elapse(seconds)
        return await nemesis.recovery(struck, nemesis.beats_again(runner))


async def reset(nemesis: Nemesis) -> float | None:
    """Every open connection of one service is reset, once."""
    member = await _anybody(nemesis)
    if member is None:
        return None
    async with nemesis.only(member.name):
        async with nemesis.fault(Fault.RESET, member.name) as struck:
            nemesis.cluster.proxy.reset(member.name)
        return await nemesis.recovery(struck, _again(nemesis, member))


async def refuse(nemesis: Nemesis, seconds: float) -> float | None:
    """Open connections are reset and new ones refused for a while."""
    member = await _anybody(nemesis)
    if member is None:
        return None
    async with nemesis.only(member.name):
        async with nemesis.fault(Fault.REFUSE, member.name, seconds=seconds) as struck:
            async with _mode(nemesis, member.name, Mode.refuse()):
                nemesis.cluster.proxy.reset(member.name)
                await elapse(seconds)
        return await nemesis.recovery(struck, _again(nemesis, member))


async def delay(nemesis: Nemesis, seconds: float, milliseconds: float, target: str | None = None) -> float | None:
    """Everything takes longer, both ways: for one service or for all."""
    names = list(nemesis.cluster.members) if target == "all" else []
    if not names:
        member = await _anybody(nemesis)
        if member is None:
            return None
        names = [member.name]
    async with nemesis.fault(Fault.DELAY, target or names[0], seconds=seconds, milliseconds=milliseconds) as struck:
        try:
            for name in names:
                nemesis.cluster.proxy.set(name, Mode.delay(milliseconds, jitter_ms=milliseconds / 2))
            await elapse(seconds)
        finally:
            for name in names:
                nemesis.cluster.proxy.heal(name)
    return await nemesis.recovery(struck, nemesis.works_again())


async def drop_reply(nemesis: Nemesis, *, to: str | None = None, match: str | None = None) -> float | None:
    """A commit happens and its answer is lost: of a service's next transaction, or of a client's."""
    member = None if to is not None else await _anybody(nemesis)
    target = to or (member.name if member else CLIENT)
    if not nemesis.is_free(target):
        return None
    proxy = nemesis.cluster.proxy
    async with nemesis.only(target):
        before = len(proxy.status()[target]["dropped"])
        async with nemesis.fault(Fault.DROP_REPLY, target, match=match) as struck:
            proxy.drop_reply(target, match=match)
            try:
                await eventually(lambda: len(proxy.status()[target]["dropped"]) > before, 5, pause_seconds=0.05)
            except AssertionError:
                # Nobody said anything that matches: nothing was dropped, and nothing will be.
                proxy.heal(target)
                struck.is_void = True
        if struck.is_void:
            return None
        is_well = nemesis.works_again() if member is None else _again(nemesis, member)
        return await nemesis.recovery(struck, is_well)


async def _anybody(nemesis: Nemesis) -> Member | None:
    """A runner or a scheduler, leading or not."""
    free = [m for m in nemesis.cluster.members.values() if m.pid is not None and nemesis.is_free(m.name)]
    return nemesis.dice.choice(free) if free else None


def _again(nemesis: Nemesis, member: Member) -> Condition:
    return nemesis.beats_again(member) if member.kind == "runner" else nemesis.works_again()
