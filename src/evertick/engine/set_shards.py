"""set_shards: the number of shards among which the DAGs are distributed. The shards' leaders move rows alongside their work."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import UserError
from evertick.domain.sharing import MOST_SHARDS
from evertick.store import sharing


async def set_shards(conn: AsyncConnection, *, shards: int, actor: str) -> None:
    """Effective from now on. Idempotent: repeating it only checks all rows once more."""
    if not 1 <= shards <= MOST_SHARDS:
        raise UserError(f"The number of shards must be from 1 to {MOST_SHARDS}; it is {shards}.")
    await sharing.set_shards(conn, shards=shards, actor=actor, if_never_chosen=False)


async def choose_shards(conn: AsyncConnection, *, shards: int, actor: str) -> bool:
    """For a database whose number of shards was never set. Returns whether that was the case."""
    return await sharing.set_shards(conn, shards=shards, actor=actor, if_never_chosen=True)
