"""Runners: their heartbeat, drain requests, and the recovery of tasks of a runner or scheduler that is gone.

A heartbeat's reply names the attempts that the runner lost, must stop, or does not know about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg import AsyncConnection

from evertick.db.connect import retry_on_deadlock
from evertick.db.queries import runners, runs, shards, tasks
from evertick.db.queries.runners import BusyRunner, Reaped
from evertick.db.queries.shards import LivenessChange
from evertick.domain.attempt import AttemptRef, HeartbeatReply, RunnerRequest, TaskKey, session_text
from evertick.domain.errors import NotFound
from evertick.engine.verbs import as_leader


async def extend(conn: AsyncConnection, *, session: int, held: Sequence[tuple[TaskKey, int]]) -> HeartbeatReply:
    rows = await tasks.extend(conn, session=session, held=held)
    named: dict[str, list[AttemptRef]] = {"lost": [], "stop": [], "unknown": []}
    for row in rows:
        if row.kind in named:
            named[row.kind].append(AttemptRef(TaskKey(row.run_id, row.idx, row.map_index), row.epoch))
    kinds = {row.kind for row in rows}
    request = next((each for each in RunnerRequest if each in kinds), None)
    return HeartbeatReply(is_gone="gone" in kinds, request=request, **named)


_SHORTEST_PREFIX = 4


async def drain(conn: AsyncConnection, *, sessions: list[int], actor: str, then_leave: bool = False) -> list[int]:
    """The sessions that were not draining before. A wake-up triggers an immediate heartbeat, which delivers the request."""
    request = RunnerRequest.LEAVE if then_leave else RunnerRequest.DRAIN
    return await runners.ask_of(conn, sessions=sessions, request=request, actor=actor)


async def undrain(conn: AsyncConnection, *, sessions: list[int], actor: str) -> list[int]:
    """The sessions that were draining."""
    return await runners.ask_of(conn, sessions=sessions, request=None, actor=actor)


async def find_runners(conn: AsyncConnection, which: Iterable[str]) -> list[BusyRunner]:
    """Live runners by readable id, name or session. An id or a name shared by several runners selects all of them."""
    alive = await runners.list_busy(conn, limit=10_000)
    found: dict[int, BusyRunner] = {}
    for text in which:
        matching = [each for each in alive if _is_meant(each, text)]
        if not matching:
            raise NotFound(f"There is no live runner {text!r}. List live runners with `evertick runners list`.")
        found |= {each.session: each for each in matching}
    return list(found.values())


def _is_meant(runner: BusyRunner, text: str) -> bool:
    is_session = len(text) >= _SHORTEST_PREFIX and session_text(runner.session).startswith(text.lower())
    return text in (runner.runner_id, runner.name) or is_session


async def mark_runner_dead(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """For a process that can prove that a runner is gone. Returns the number of attempts taken from it. Idempotent."""
    return await retry_on_deadlock(
        lambda: runners.mark_runner_dead(conn, session=session, reason=reason, infra_retries=infra_retries)
    )


async def observe_heartbeats(
    conn: AsyncConnection, *, shard: int, epoch: int, elapsed: float, lost_after: float
) -> LivenessChange:
    """For the leader: count missed heartbeats up by `elapsed`, and return the sessions that are lost."""
    return await as_leader(
        lambda: shards.observe_heartbeats(conn, shard=shard, epoch=epoch, elapsed=elapsed, lost_after=lost_after),
        shard=shard,
        epoch=epoch,
    )


async def reap_runner(
    conn: AsyncConnection, *, shard: int, epoch: int, session: int, lost_after: float, infra_retries: int
) -> Reaped:
    """For the leader: mark a silent runner dead, or clean up after a runner that is gone and still holds something."""
    return await as_leader(
        lambda: runners.reap(
            conn, shard=shard, epoch=epoch, session=session, lost_after=lost_after, infra_retries=infra_retries
        ),
        shard=shard,
        epoch=epoch,
    )


async def reap_orphan(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int, orphan_after: float) -> str:
    """Fail a run in which nothing could move for that long: 'reaped', 'moved' (it is not stuck), or 'refused'."""
    return await as_leader(
        lambda: runs.reap_orphan(conn, shard=shard, epoch=epoch, run_id=run_id, orphan_after=orphan_after),
        shard=shard,
        epoch=epoch,
    )
