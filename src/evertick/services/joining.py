"""Registers a runner's session in the list of live runners."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import session_text
from evertick.services.events import Log
from evertick.services.place import here
from evertick.services.whoami import is_provably_gone
from evertick.store import runners
from evertick.store.runners import NewRunner
from evertick.store.wake import Channel, notify


async def join(conn: AsyncConnection, me: NewRunner, *, tells: bool, log: Log) -> None:
    """Repeating a registration whose reply was lost is harmless. Two runners may have the same readable id; each logs a
    warning.

    `tells`: notify other runners of the machine before the first claim, so that the holder of every attempt is known.
    """
    await runners.register(conn, me)
    if tells:
        await notify(conn, Channel.JOIN)
    place = here()
    for other in await runners.namesakes(conn, runner_id=me.runner_id, session=me.session):
        if not is_provably_gone(other, place):
            message = "Another live runner has this id. Their sessions distinguish them."
            log.warning("same_id", message=message, other=session_text(other.session), other_host=other.host)
