"""extend: one heartbeat per runner. The reply names the attempts it lost, must stop, or holds without knowing it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.store import tasks

Held = tuple[TaskKey, int]


class Request(StrEnum):
    """An operator's request to a runner: to claim no new tasks, or to exit once it has none."""

    DRAIN = "drain"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """`is_gone`: the runner was declared dead; it must drop everything and start again under a new session."""

    is_gone: bool
    lost: list[Held]
    stop: list[Held]
    unknown: list[Held]
    request: Request | None = None


async def extend(conn: AsyncConnection, *, session: int, held: list[Held]) -> Extended:
    rows = await tasks.extend(conn, session=session, held=held)
    named: dict[str, list[Held]] = {"lost": [], "stop": [], "unknown": []}
    for row in rows:
        if row.kind in named:
            named[row.kind].append((TaskKey(row.run_id, row.idx, row.map_index), row.epoch))
    kinds = {row.kind for row in rows}
    request = next((each for each in Request if each in kinds), None)
    return Extended(is_gone="gone" in kinds, request=request, **named)
