"""set_shards: over how many shards the DAGs are spread. What has to move is moved by the shards' leaders, beside their work."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import UserError
from evertick.domain.sharing import MOST_SHARDS
from evertick.store import sharing


async def set_shards(conn: AsyncConnection, *, shards: int, actor: str) -> None:
    """From now on. Idempotent: saying it again only has everything looked through once more."""
    if not 1 <= shards <= MOST_SHARDS:
        raise UserError(f"The number of shards must be from 1 to {MOST_SHARDS}; it is {shards}.")
    await sharing.set_shards(conn, shards=shards, actor=actor, if_never_chosen=False)


async def choose_shards(conn: AsyncConnection, *, shards: int, actor: str) -> bool:
    """For a database where nobody has ever said how many. Whether it was so."""
    return await sharing.set_shards(conn, shards=shards, actor=actor, if_never_chosen=True)
