"""Wake-ups: NOTIFY only shortens waits, and is sent outside data transactions; polling is the truth.

One cluster-wide lock is held while a transaction with NOTIFY commits, so whoever sends must coalesce.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from psycopg import AsyncConnection

# How long somebody who listens may be the last to learn that another server is in charge. Until then it polls.
LOOK_UP_SECONDS = 5.0


class Channel(StrEnum):
    """Who is woken: runners with free slots, runners that must stop something, the scheduler, everybody on the machine of a
    runner that has joined, schedulers that could lead, and APIs that remember who somebody is."""

    READY = "evertick_ready"
    STOP = "evertick_stop"
    PLAN = "evertick_plan"
    JOIN = "evertick_join"
    LEAD = "evertick_lead"
    # Sent with the change itself, which is rare: nobody may be let in by what was revoked because a word came late.
    ACCESS = "evertick_access"


async def notify(conn: AsyncConnection, channel: Channel) -> None:
    """Send one wake-up now, in a transaction of its own that need not be durable."""
    # For this transaction only: what is written on this connection next must be durable, whoever has its session then.
    await conn.execute("select set_config('synchronous_commit', 'off', true), pg_notify(%s, '')", [channel.value])


async def listen(
    conn: AsyncConnection,
    channels: list[Channel],
    on_wake: Callable[[Channel], None],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Call `on_wake` for each wake-up, until the connection breaks, it is wanted no more or the task is canceled."""
    for channel in channels:
        await conn.execute(f"listen {channel.value}")
    # Whatever was sent before we listened is found by looking.
    for channel in channels:
        on_wake(channel)
    while is_wanted():
        async for message in conn.notifies(timeout=LOOK_UP_SECONDS):
            on_wake(Channel(message.channel))
