"""Attempts that were submitted to a remote executor: the work list of that executor's runners."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.domain.attempt import TaskKey
from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql
from evertick.store.tasks import Look

MOST_LISTED = 100_000


class QueuedRow(NamedTuple):
    """A task that was claimed for an executor; `session` is the attempt's own."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int
    place: int
    seq: int


@dataclass(frozen=True, slots=True)
class DispatchRow:
    """One attempt on the list. `state` is queued or running; None once the attempt is over, whatever the state of its task.
    `has_finished`: its agent reported the outcome and was not declared dead."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int
    queue: str
    tries: int
    is_submitted: bool
    queued_seconds: float
    tried_seconds: float | None
    retry_seconds: float | None
    trouble: str | None
    state: str | None
    request: str | None
    version_id: int | None
    attempt: int | None
    has_finished: bool

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.run_id, self.idx, self.map_index)


@dataclass(frozen=True, slots=True)
class NotBegun:
    """`submitted_at`: when the executor accepted it. `trouble`: the last error."""

    executor: str
    run_id: int
    map_index: int
    dag: str
    task: str
    queue: str
    queued_at: datetime
    tries: int
    submitted_at: datetime | None
    trouble: str | None
    retry_at: datetime | None


@dataclass(frozen=True, slots=True)
class EndedQueued:
    """The sessions of the attempts that moved, and how many tasks can start now."""

    moved_sessions: list[int] | None
    offered: int


async def claim(
    conn: AsyncConnection, *, session: int, queues: list[str], free: int, look: Look, sessions: list[int]
) -> list[QueuedRow]:
    """`sessions`: one for each free slot, generated for the attempts."""
    params = {"session": session, "queues": queues, "free": free, "sessions": sessions}
    params |= {"low": look.low, "aging_seconds": look.aging_seconds}
    cursor = await conn.execute(sql("dispatch", "claim"), params, prepare=True)
    return [QueuedRow(*row) for row in await cursor.fetchall()]


async def claim_rows(
    conn: AsyncConnection, *, session: int, queues: list[str], places: list[int], seqs: list[int], sessions: list[int]
) -> list[QueuedRow]:
    """Claim these rows of the queue, if no other runner took them and there is capacity."""
    params = {"session": session, "queues": queues, "places": places, "seqs": seqs, "sessions": sessions}
    cursor = await conn.execute(sql("dispatch", "claim_rows"), params, prepare=True)
    return [QueuedRow(*row) for row in await cursor.fetchall()]


async def list_of(conn: AsyncConnection, *, owner: int, limit: int = MOST_LISTED) -> list[DispatchRow]:
    return await all_rows(conn, sql("dispatch", "list_of"), {"owner": owner, "limit": limit}, DispatchRow)


async def not_begun(conn: AsyncConnection, *, limit: int) -> list[NotBegun]:
    return await all_rows(conn, sql("dispatch", "not_begun"), {"limit": limit}, NotBegun)


async def known(conn: AsyncConnection, sessions: list[int]) -> set[int]:
    cursor = await conn.execute(sql("dispatch", "known"), {"sessions": sessions})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def note_tries(conn: AsyncConnection, *, owner: int, sessions: list[int]) -> set[int]:
    """The sessions that may be submitted."""
    cursor = await conn.execute(sql("dispatch", "note_tries"), {"owner": owner, "sessions": sessions})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def note_submitted(conn: AsyncConnection, *, owner: int, sessions: list[int]) -> None:
    await conn.execute(sql("dispatch", "note_submitted"), {"owner": owner, "sessions": sessions})


async def note_troubles(conn: AsyncConnection, *, owner: int, troubles: list[dict[str, object]]) -> None:
    """[{session, trouble, seconds until the next try}]."""
    await conn.execute(sql("dispatch", "note_troubles"), {"owner": owner, "troubles": Json(troubles)})


async def end_queued(conn: AsyncConnection, *, reports: list[dict[str, object]], infra_retries: int) -> EndedQueued:
    params = {"reports": Json(reports), "infra_retries": infra_retries}
    row = await one_row(conn, sql("dispatch", "end_queued"), params, EndedQueued)
    assert row is not None
    return row


async def adopt(conn: AsyncConnection, *, session: int, silent_seconds: float, most: int) -> int:
    params = {"session": session, "silent_seconds": silent_seconds, "most": most}
    return cast(int, await one_value(conn, sql("dispatch", "adopt"), params))


async def forget(conn: AsyncConnection, sessions: list[int]) -> int:
    return cast(int, await one_value(conn, sql("dispatch", "forget"), {"sessions": sessions}))
