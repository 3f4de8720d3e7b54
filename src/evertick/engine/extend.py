"""extend: one heartbeat per runner. The reply names what it lost, what it must stop, and what it does not know it has."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.store import tasks

Held = tuple[TaskKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """`is_gone`: the runner was buried; it must drop everything and start again under a new session."""

    is_gone: bool
    lost: list[Held]
    stop: list[Held]
    unknown: list[Held]


async def extend(conn: AsyncConnection, *, session: int, held: list[Held]) -> Extended:
    rows = await tasks.extend(conn, session=session, held=held)
    named: dict[str, list[Held]] = {"lost": [], "stop": [], "unknown": []}
    for row in rows:
        if row.kind in named:
            named[row.kind].append((TaskKey(row.run_id, row.idx, row.map_index), row.epoch))
    return Extended(is_gone=any(row.kind == "gone" for row in rows), **named)
