"""The database dies, restarts, is away, is slow, or throws its clients out."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.chaos.nemesis import Nemesis
from tests.chaos.record import Fault
from tests.chaos.usage import descendants
from tests.chaos.watch import Watcher
from tests.waiting import elapse

POSTGRES = "postgres"
SESSIONS = (
    "select pid from pg_stat_activity where backend_type = 'client backend' and application_name like 'evertick%%'"
)


async def restart(nemesis: Nemesis, how: str) -> float | None:
    """A `fast` or an `immediate` restart: the second is a crash."""
    return await _down(nemesis, Fault.RESTART, how, lambda: nemesis.cluster.server.stop(how))


async def kill_postmaster(nemesis: Nemesis) -> float | None:
    return await _down(nemesis, Fault.KILL, "postmaster", nemesis.cluster.server.kill)


async def outage(nemesis: Nemesis, seconds: float) -> float | None:
    """Away for that long."""
    return await _down(nemesis, Fault.OUTAGE, "", nemesis.cluster.server.kill, seconds=seconds)


async def _down(
    nemesis: Nemesis, kind: Fault, part: str, end: Callable[[], Awaitable[None]], seconds: float = 0.0
) -> float | None:
    async with nemesis.only(POSTGRES) as is_free:
        if not is_free:
            return None
        async with nemesis.fault(kind, POSTGRES, part=part, seconds=seconds) as struck:
            await end()
            await elapse(seconds)
            await nemesis.cluster.server.start()
        return await nemesis.recovery(struck, nemesis.works_again())


async def kill_backend(nemesis: Nemesis) -> float | None:
    """kill -9 of one backend: the server throws everybody out and recovers, as from a crash."""
    async with nemesis.only(POSTGRES) as is_free:
        pids = await _sessions(nemesis) if is_free else []
        if not pids:
            return None
        async with nemesis.fault(Fault.KILL, POSTGRES, part="backend") as struck:
            with suppress(ProcessLookupError):
                os.kill(nemesis.dice.choice(pids), signal.SIGKILL)
        return await nemesis.recovery(struck, nemesis.works_again())


async def terminate(nemesis: Nemesis) -> float | None:
    """pg_terminate_backend of some of the services' sessions, as an administrator would."""
    async with nemesis.only(POSTGRES) as is_free:
        pids = await _sessions(nemesis) if is_free else []
        if not pids:
            return None
        chosen = nemesis.dice.sample(pids, max(1, len(pids) // 2))
        async with nemesis.fault(Fault.TERMINATE, POSTGRES, part="sessions", sessions=len(chosen)) as struck:
            await nemesis.cluster.watch.rows("select pg_terminate_backend(x) from unnest(%s::int[]) x", chosen)
        return await nemesis.recovery(struck, nemesis.works_again())


async def terminate_leader(nemesis: Nemesis) -> float | None:
    """Every session of the leader is ended, as a pooler that recycles them would."""
    found = await nemesis.pick_leader()
    if found is None:
        return None
    name = found[0].name
    async with nemesis.fault(Fault.TERMINATE, name, part="leader") as struck:
        await nemesis.cluster.watch.rows(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s", name
        )
    return await nemesis.recovery(struck, nemesis.works_again())


async def freeze(nemesis: Nemesis, seconds: float) -> float | None:
    """The whole server stands still: sockets open, nothing answers."""
    async with nemesis.only(POSTGRES) as is_free:
        postmaster = nemesis.cluster.server.pid
        if not is_free or postmaster is None:
            return None
        async with nemesis.fault(Fault.FREEZE, POSTGRES, part=POSTGRES, seconds=seconds) as struck:
            pids = [postmaster, *descendants(postmaster)]
            try:
                _signal_all(pids, signal.SIGSTOP)
                await elapse(seconds)
            finally:
                _signal_all(pids, signal.SIGCONT)
        return await nemesis.recovery(struck, nemesis.works_again())


async def lock(nemesis: Nemesis, seconds: float, table: str = "task") -> float | None:
    """Somebody holds a table in ACCESS EXCLUSIVE mode, as a careless migration would."""
    async with nemesis.only(POSTGRES) as is_free:
        if not is_free:
            return None
        holder = Watcher(nemesis.cluster.server.url)
        try:
            async with nemesis.fault(Fault.LOCK, POSTGRES, part=table, seconds=seconds) as struck:
                await holder.must("begin")
                if await holder.rows(f"lock table {table} in access exclusive mode") is None:
                    struck.is_void = True
                else:
                    await elapse(seconds)
                    await holder.rows("rollback")
        finally:
            await holder.close()
        return await nemesis.recovery(struck, nemesis.works_again())


async def crowd(nemesis: Nemesis, seconds: float, sessions: int = 3) -> float | None:
    """Somebody's heavy queries take the machine's time."""
    query = "select count(*) from generate_series(1, 100000000) x where x %% 7 = length(md5(x::text))"

    async def busy() -> None:
        hog = Watcher(nemesis.cluster.server.url)
        try:
            await hog.rows(f"set statement_timeout = '{int(seconds * 1000)}ms'")
            await hog.rows(query)
        finally:
            await hog.close()

    async with nemesis.only(POSTGRES) as is_free:
        if not is_free:
            return None
        async with nemesis.fault(Fault.CROWD, POSTGRES, part="queries", seconds=seconds) as struck:
            await asyncio.gather(*(busy() for _ in range(sessions)))
        return await nemesis.recovery(struck, nemesis.works_again())


async def _sessions(nemesis: Nemesis) -> list[int]:
    return [row[0] for row in await nemesis.cluster.watch.rows(SESSIONS) or []]


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
