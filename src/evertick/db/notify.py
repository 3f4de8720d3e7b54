"""Wake-ups: NOTIFY only shortens waits, and is sent outside data transactions; correctness relies on polling.

A transaction with NOTIFY holds one cluster-wide lock while it commits, so senders must coalesce.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from psycopg import AsyncConnection

# How long a listener may take to notice that another server is in charge. Until then it polls.
LOOK_UP_SECONDS = 5.0


class Channel(StrEnum):
    """The receivers of a wake-up: runners with free slots, runners that must stop something, the scheduler, all runners on a
    machine where another registered, schedulers that could lead, API processes that cache authentication, and publishers of
    git repositories."""

    TASKS = "evertick_ready"
    STOP = "evertick_stop"
    SCHEDULE = "evertick_plan"
    RUNNER = "evertick_join"
    LEADER = "evertick_lead"
    DEPLOY = "evertick_deploy"
    # Sent within the change itself, which is rare: a late notification must not let a revoked credential sign in.
    ACCOUNTS = "evertick_access"


async def notify(conn: AsyncConnection, channel: Channel) -> None:
    """Send one wake-up now, in a separate transaction that need not be durable."""
    # For this transaction only: the next write on this connection must be durable, whichever session it gets.
    await conn.execute("select set_config('synchronous_commit', 'off', true), pg_notify(%s, '')", [channel.value])


async def listen(
    conn: AsyncConnection,
    channels: list[Channel],
    on_wake: Callable[[Channel], None],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Call `on_wake` for each wake-up, until the connection breaks, is no longer wanted, or the task is canceled."""
    for channel in channels:
        await conn.execute(f"listen {channel.value}")
    # A notification sent before we listened is replaced by a poll.
    for channel in channels:
        on_wake(channel)
    while is_wanted():
        async for message in conn.notifies(timeout=LOOK_UP_SECONDS):
            on_wake(Channel(message.channel))
