"""How a command reaches the database: the URL it was given, or the embedded server of its home while that runs.

A command asks or changes once and is done. What goes wrong becomes an error that says what to do, never with a password.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import psycopg
from psycopg import AsyncConnection

from evertick.cli.far import far_server
from evertick.cli.logins import chosen_server
from evertick.config import Settings, read_settings
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.connection import where
from evertick.db.migrate import refuse_pending, status
from evertick.db.notify import Channel, notify
from evertick.db.queries.accounts import set_origin
from evertick.db.queries.shards import read_clock
from evertick.domain.errors import OutcomeUnknown, PostgresUnavailable, UserError
from evertick.supervisor.postgres_home import own_database_url

if TYPE_CHECKING:
    from evertick.cli.server import Server

# How long a failover or a restart usually takes, in steps.
ASK_AGAIN_SECONDS = (0.1, 0.5, 1.0, 2.0, 3.0)

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]
Far = Callable[["Server"], T]


def ask(work: Work[T], *, far: Far[T] | None = None) -> tuple[T, datetime]:
    """What a reading finds, and the database's time of it. `far` is how the same is asked of a server."""
    if (server := far_server()) is not None:
        found = _way_of(far)(server)
        return found, server.now

    async def read() -> tuple[T, datetime]:
        async with opened(database_url(read_settings()), Purpose.READ) as conn:
            return await work(conn), await read_clock(conn)

    return asyncio.run(read())


def change(work: Work[T], *wake: Channel, is_keyed: bool = False, far: Far[T] | None = None) -> T:
    """What a change gives. Afterwards those who should act on it are woken. `far` is how the same is asked of a server.

    With `is_keyed` the work carries a key that makes it one change however often it is done. Only then is it done again
    when its answer was lost; otherwise people are told to look.
    """
    if (server := far_server()) is not None:
        way = _way_of(far)

        async def send() -> T:
            return way(server)

        return asyncio.run(_until_answered(send) if is_keyed else send())
    settings = read_settings()
    url = database_url(settings)

    async def write() -> T:
        async with opened(url, Purpose.PLANNING) as conn:
            await set_origin(conn, origin=socket.gethostname(), request_id="")
            with unsure(conn, url):
                done = await work(conn)
            # A wake-up only shortens a wait: the change is done, whether it arrives or not.
            with suppress(psycopg.Error):
                for channel in wake if settings.notify else ():
                    await notify(conn, channel)
            return done

    return asyncio.run(_until_answered(write) if is_keyed else write())


def _way_of(far: Far[T] | None) -> Far[T]:
    if far is None:
        raise UserError(
            f"This command does not work through a server, and you chose {chosen_server()}. Run it where the database can"
            " be reached, without --server and EVERTICK_SERVER."
        )
    return far


async def _until_answered(write: Callable[[], Awaitable[T]]) -> T:
    lost: OutcomeUnknown | None = None
    for pause_seconds in (*ASK_AGAIN_SECONDS, None):
        try:
            return await write()
        except PostgresUnavailable as error:
            if isinstance(error, OutcomeUnknown):
                lost = error
            # One that never got as far as asking is told as it is.
            if lost is None:
                raise
        if pause_seconds is not None:
            sys.stderr.write("The answer of the database was lost; asking again.\n")
            await asyncio.sleep(pause_seconds)
    assert lost is not None
    raise lost


@contextmanager
def unsure(conn: AsyncConnection, url: str) -> Iterator[None]:
    """A connection that breaks within the block leaves open whether the change was made, and that is said."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        if not (conn.closed or conn.broken):
            raise
        why = str(error).splitlines()[0]
        raise OutcomeUnknown(
            f"The answer of PostgreSQL at {where(url)} was lost ({why}), so it is not known whether this was done."
            " Look before you repeat it."
        ) from None


def database_url(settings: Settings) -> str:
    """Where the database of a command is that cannot work through a server."""
    refuse_server()
    return own_database_url(settings)


def refuse_server() -> None:
    """For a command that has much to do before it asks: it must not be in vain."""
    if chosen_server() is not None:
        _way_of(None)


@asynccontextmanager
async def opened(url: str, purpose: Purpose) -> AsyncIterator[AsyncConnection]:
    """A connection to a database whose schema fits this program."""
    with with_advice(url):
        try:
            conn = await connect(url, purpose=purpose)
        except PostgresUnavailable as error:
            raise PostgresUnavailable(f"{error} {_how_to_start()}") from None
        async with conn:
            refuse_pending(await status(conn), url)
            yield conn


def actor() -> str:
    """Who asks, for the record."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


def _how_to_start() -> str:
    if read_settings().database_url:
        return "Start that server, or correct EVERTICK_DATABASE_URL."
    return "Evertick is just starting or stopping there: try again."
