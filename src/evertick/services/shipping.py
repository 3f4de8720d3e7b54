"""Ships log lines to the database while attempts run, and what dead runners left in the spool. Never holds up a task:
while the database is away the lines wait in their spool files.
"""

from __future__ import annotations

from pathlib import Path

from psycopg import AsyncConnection

from evertick.execution.leftovers import discard, leftovers
from evertick.execution.spool import LogChunk
from evertick.services.events import Log
from evertick.store import logs, runners
from evertick.store.logs import NewChunk

CHUNKS_PER_STATEMENT = 50


def stored(chunk: LogChunk) -> NewChunk:
    text = chunk.content.decode("utf-8", "replace")
    return NewChunk(key=chunk.key, epoch=chunk.epoch, seq=chunk.offset, until=chunk.end, content=text)


async def ship(conn: AsyncConnection, *, session: int, chunks: list[LogChunk]) -> None:
    for first in range(0, len(chunks), CHUNKS_PER_STATEMENT):
        batch = [stored(chunk) for chunk in chunks[first : first + CHUNKS_PER_STATEMENT]]
        await logs.append(conn, session=session, chunks=batch)


async def ship_leftovers(conn: AsyncConnection, *, spool: Path, session: int, log: Log) -> None:
    """Lines of sessions that are gone arrive late and are marked so; then their files go."""
    live = {runner.session for runner in await runners.live(conn)} | {session}
    shipped: dict[Path, int] = {}
    for left in leftovers(spool, live):
        until = await logs.shipped_until(conn, left.key, epoch=left.epoch)
        await ship(conn, session=left.session, chunks=list(left.chunks(shipped_until=until)))
        shipped[left.path] = shipped.get(left.path, 0) + 1
    for path in shipped:
        discard(path)
    if shipped:
        log.info("late_logs", files=len(shipped), attempts=sum(shipped.values()))
