"""A runner's session enters itself in the list of those that live."""

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
    """Joining again after a lost reply is joining once. Two of one readable id are allowed, and told of each other.

    `tells`: others of the machine hear of it before the first claim, so that whoever holds something is known.
    """
    await runners.register(conn, me)
    if tells:
        await notify(conn, Channel.JOIN)
    place = here()
    for other in await runners.namesakes(conn, runner_id=me.runner_id, session=me.session):
        if not is_provably_gone(other, place):
            message = "Another live runner has this id. They are told apart by their sessions."
            log.warning("same_id", message=message, other=session_text(other.session), other_host=other.host)
