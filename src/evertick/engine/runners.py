"""Runners: their heartbeat, drain requests, and the recovery of tasks of a runner or scheduler that is gone.

A heartbeat's reply names the attempts that the runner lost, must stop, or does not know about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.db.queries.runners import BusyRunner
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.attempt import AttemptRef, HeartbeatReply, RunnerRequest, TaskKey, session_text
from evertick.domain.errors import NotFound
from evertick.engine.verbs import leader_verb


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many attempts were taken from a runner (None: it is alive), and how many could not be moved and were quarantined."""

    reaped: int | None
    refused: int


class ExtendRow(NamedTuple):
    kind: str
    run_id: int
    idx: int
    map_index: int
    epoch: int


@sql_function(retries=False)
async def extend_leases(conn: AsyncConnection, *, session: int, held: list[list[int]]) -> list[ExtendRow]:
    """`held`: run, index, map index and epoch of each attempt."""


async def extend(conn: AsyncConnection, *, session: int, held: Sequence[tuple[TaskKey, int]]) -> HeartbeatReply:
    return heartbeat_reply(await extend_leases(conn, session=session, held=[[*key, epoch] for key, epoch in held]))


def heartbeat_reply(rows: Sequence[ExtendRow]) -> HeartbeatReply:
    named: dict[str, list[AttemptRef]] = {"lost": [], "stop": [], "unknown": []}
    for row in rows:
        if row.kind in named:
            named[row.kind].append(AttemptRef(TaskKey(row.run_id, row.idx, row.map_index), row.epoch))
    kinds = {row.kind for row in rows}
    request = next((each for each in RunnerRequest if each in kinds), None)
    return HeartbeatReply(is_gone="gone" in kinds, request=request, has_triggers="triggers" in kinds, **named)


_SHORTEST_PREFIX = 4


async def drain(conn: AsyncConnection, *, sessions: list[int], actor: Actor, then_leave: bool = False) -> list[int]:
    """The sessions that were not draining before. A wake-up triggers an immediate heartbeat, which delivers the request."""
    request = RunnerRequest.LEAVE if then_leave else RunnerRequest.DRAIN
    return await runners.ask_of(conn, sessions=sessions, request=request, actor=actor)


async def undrain(conn: AsyncConnection, *, sessions: list[int], actor: Actor) -> list[int]:
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


@sql_function
async def mark_runner_dead(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """For a process that can prove that a runner is gone. Returns the number of attempts taken from it. Idempotent."""


@leader_verb
async def reap_runner(
    conn: AsyncConnection, *, shard: int, epoch: int, session: int, lost_after: float, infra_retries: int
) -> Reaped:
    """Mark a silent runner dead, or clean up after a runner that is gone and still holds something."""
