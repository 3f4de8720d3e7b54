"""Processes die or stand still: leaders, standbys, runners, warm parents, bodies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

from tests.chaos.effects import read
from tests.chaos.members import Member
from tests.chaos.nemesis import Nemesis
from tests.chaos.record import Fault, boot_ns
from tests.chaos.usage import descendants
from tests.chaos.watch import Led, Watcher
from tests.waiting import elapse, eventually

RECENT_EFFECTS = 400
# What fires several times per second under every load: who leads its shard is always about to plan.
QUICK = "pulse"


async def kill_leader(nemesis: Nemesis) -> float | None:
    """kill -9; seconds until another one leads."""
    found = await nemesis.pick_leader()
    if found is None:
        return None
    leader, epoch = found
    async with nemesis.only(leader.name):
        async with nemesis.fault(Fault.KILL, leader.name, part="leader", until=nemesis.led_by_another(epoch)) as struck:
            await leader.kill()
    return struck.recovered_seconds


async def kill_standby(nemesis: Nemesis) -> float | None:
    """kill -9 of a scheduler that does not lead: nobody may notice."""
    standby = await nemesis.pick_standby()
    if standby is None:
        return None
    async with nemesis.only(standby.name):
        async with nemesis.fault(Fault.KILL, standby.name, part="standby", disturbs=()) as struck:
            await standby.kill()
        return await nemesis.recovery(struck, nemesis.works_again())


async def kill_runner(nemesis: Nemesis, runner: Member | None = None, part: str = "runner") -> float | None:
    """kill -9; seconds until all that it held runs again elsewhere, or has ended."""
    runner = runner or nemesis.pick_runner()
    if runner is None:
        return None
    async with nemesis.only(runner.name):
        held = await nemesis.held_by(runner)
        until = nemesis.reran(held) if held else nemesis.works_again()
        async with nemesis.fault(Fault.KILL, runner.name, part=part, attempts=len(held), until=until) as struck:
            await runner.kill()
    return struck.recovered_seconds


async def kill_warm_parent(nemesis: Nemesis) -> float | None:
    """The process that bodies are forked from: its bodies end with it, the runner makes another."""
    runner = nemesis.pick_runner()
    parents = runner.warm_parents() if runner is not None else []
    if runner is None or not parents:
        return None
    async with nemesis.only(runner.name):
        async with nemesis.fault(Fault.KILL, runner.name, part="warm_parent") as struck:
            _signal(parents, signal.SIGKILL)
        return await nemesis.recovery(struck, nemesis.works_again())


async def kill_child(nemesis: Nemesis) -> float | None:
    """A body that is at work: its attempt fails, and nothing else does."""
    runner = nemesis.pick_runner()
    bodies = bodies_of(nemesis, runner) if runner is not None else []
    if runner is None or not bodies:
        return None
    async with nemesis.fault(Fault.BODY, runner.name, part="killed") as struck:
        _signal([nemesis.dice.choice(bodies)], signal.SIGKILL)
    return await nemesis.recovery(struck, nemesis.works_again())


async def freeze_leader(
    nemesis: Nemesis, seconds: float, *, is_planning: bool = False, whom: tuple[Member, Led] | None = None
) -> float | None:
    """SIGSTOP, hold, SIGCONT; seconds until another one leads. With `is_planning` it is stopped while its transaction
    is open in the server. `whom`: a leader that was picked before."""
    found = whom or await nemesis.pick_leader(of=QUICK if is_planning else None)
    if found is None:
        return None
    leader, epoch = found
    part = "planning_leader" if is_planning else "leader"
    # Below its lease nothing has to happen; above it, the time counts from the freeze.
    is_long = seconds > nemesis.cluster.lease_seconds
    until = nemesis.led_by_another(epoch) if is_long else None
    async with nemesis.only(leader.name):
        async with nemesis.fault(Fault.FREEZE, leader.name, part=part, seconds=seconds, until=until) as struck:
            if is_planning:
                await _stop_in_transaction(nemesis, leader)
                # Until then it led, and renewed the leases of its other shards.
                struck.began_ns = boot_ns()
            else:
                leader.send(signal.SIGSTOP)
            try:
                await elapse(seconds)
            finally:
                leader.send(signal.SIGCONT)
        if not is_long:
            await nemesis.recovery(struck, nemesis.works_again())
    return struck.recovered_seconds


async def freeze_standby(nemesis: Nemesis, seconds: float) -> float | None:
    standby = await nemesis.pick_standby()
    if standby is None:
        return None
    async with nemesis.only(standby.name):
        async with nemesis.fault(Fault.FREEZE, standby.name, part="standby", seconds=seconds, disturbs=()) as struck:
            await _stand_still([standby.pid], seconds)
        return await nemesis.recovery(struck, nemesis.works_again())


async def freeze_runner(nemesis: Nemesis, seconds: float, *, with_bodies: bool) -> float | None:
    """The runner alone, as a debugger would, or with all below it, as a paused machine."""
    runner = nemesis.pick_runner()
    if runner is None or runner.pid is None:
        return None
    pids = [runner.pid, *descendants(runner.pid)] if with_bodies else [runner.pid]
    part = "runner_and_bodies" if with_bodies else "runner"
    async with nemesis.only(runner.name):
        async with nemesis.fault(Fault.FREEZE, runner.name, part=part, seconds=seconds) as struck:
            await _stand_still(pids, seconds)
        return await nemesis.recovery(struck, nemesis.beats_again(runner))


async def freeze_child(nemesis: Nemesis, seconds: float) -> float | None:
    """A body stands still; its runner goes on with heartbeats and with all else."""
    runner = nemesis.pick_runner()
    bodies = bodies_of(nemesis, runner) if runner is not None else []
    if runner is None or not bodies:
        return None
    async with nemesis.fault(Fault.BODY, runner.name, part="frozen", seconds=seconds) as struck:
        await _stand_still([nemesis.dice.choice(bodies)], seconds)
    return await nemesis.recovery(struck, nemesis.works_again())


def bodies_of(nemesis: Nemesis, runner: Member) -> list[int]:
    """Processes of the runner in which a body is at work, by what bodies wrote last."""
    open_bodies: dict[tuple[int, str, int, int], int] = {}
    for effect in read(nemesis.cluster.effects_file)[-RECENT_EFFECTS:]:
        key = (effect.run_id, effect.task, effect.map_index, effect.epoch)
        if effect.what == "begin" and effect.service == runner.name:
            open_bodies[key] = effect.pid
        elif effect.what in ("end", "fail"):
            open_bodies.pop(key, None)
    ours = set(descendants(runner.pid)) if runner.pid is not None else set()
    return sorted(set(open_bodies.values()) & ours)


async def _stand_still(pids: Iterable[int | None], seconds: float) -> None:
    stopped = [pid for pid in pids if pid is not None]
    _signal(stopped, signal.SIGSTOP)
    try:
        await elapse(seconds)
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _stop_in_transaction(nemesis: Nemesis, leader: Member) -> None:
    """Hold back its next planning statement by a lock until it is inside, stop the process, and let the server go on."""
    holder = Watcher(nemesis.cluster.server.url)
    try:
        await holder.must("begin")
        await holder.must("lock table schedule_state in exclusive mode")
        waiting = (
            "select count(*) from pg_locks l join pg_stat_activity a using (pid)"
            " where not l.granted and l.relation = 'evertick.schedule_state'::regclass and a.usename = %s"
        )
        with suppress(AssertionError):
            await eventually(lambda: nemesis.cluster.watch.value(waiting, leader.name), 3, pause_seconds=0.01)
        leader.send(signal.SIGSTOP)
        await holder.must("rollback")
    finally:
        await holder.close()
