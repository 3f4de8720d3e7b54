"""reap: a runner that is provably gone is buried, and what it held goes back through the ordinary door (V5)."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.store import runners
from evertick.store.db import retry_on_deadlock


async def bury(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """How many attempts it still held. Burying twice is harmless."""
    return await retry_on_deadlock(
        lambda: runners.bury(conn, session=session, reason=reason, infra_retries=infra_retries)
    )


async def bury_silent(conn: AsyncConnection, *, elapsed: float, lost_after: float, infra_retries: int) -> list[int]:
    """Add this tick's silence, bury who was silent for too long, and whatever a gone session still holds."""
    silent = await runners.listen_for_silence(conn, elapsed=elapsed, lost_after=lost_after)
    for session in silent:
        reason = f"agent_lost: no heartbeat for {lost_after:.0f} s"
        await bury(conn, session=session, reason=reason, infra_retries=infra_retries)
    for session in await runners.unburied(conn):
        await bury(conn, session=session, reason="agent_lost: its runner is gone", infra_retries=infra_retries)
    return silent
