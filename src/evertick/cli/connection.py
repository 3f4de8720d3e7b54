"""How a command reaches the database: the URL it was given, or the embedded server of its home while that runs.

A command asks or changes once and is done. What goes wrong becomes an error that says what to do, never with a password.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings, read_settings
from evertick.domain.errors import EvertickError, PostgresUnavailable, SchemaMismatch
from evertick.services.postgres_home import holder_of
from evertick.store.db import Purpose, connect, where
from evertick.store.migrate import SchemaStatus, status
from evertick.store.shards import read_clock
from evertick.store.wake import Channel, notify

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]


def ask(work: Work[T]) -> tuple[T, datetime]:
    """What a reading finds, and the database's time of it."""

    async def read() -> tuple[T, datetime]:
        async with opened(database_url(read_settings()), Purpose.READ) as conn:
            return await work(conn), await read_clock(conn)

    return asyncio.run(read())


def change(work: Work[T], *wake: Channel) -> T:
    """What a change gives. Afterwards those who should act on it are woken."""
    settings = read_settings()

    async def write() -> T:
        async with opened(database_url(settings), Purpose.PLANNING) as conn:
            done = await work(conn)
            # A wake-up only shortens a wait: the change is done, whether it arrives or not.
            with suppress(psycopg.Error):
                for channel in wake if settings.notify else ():
                    await notify(conn, channel)
            return done

    return asyncio.run(write())


def database_url(settings: Settings) -> str:
    """Where the database is: as told, or in the home if Evertick runs there."""
    if settings.database_url:
        return settings.database_url
    holder = holder_of(settings.home)
    if holder is None:
        raise PostgresUnavailable(
            f"Evertick is not running in {shown(settings.home)}; start it with `evertick up`, or set"
            " EVERTICK_HOME or EVERTICK_DATABASE_URL to where it runs."
        )
    return holder.url


@asynccontextmanager
async def opened(url: str, purpose: Purpose) -> AsyncIterator[AsyncConnection]:
    """A connection to a database whose schema fits this program."""
    with telling(url):
        try:
            conn = await connect(url, purpose=purpose)
        except PostgresUnavailable as error:
            raise PostgresUnavailable(f"{error} {_how_to_start()}") from None
        async with conn:
            refuse_pending(await status(conn), url)
            yield conn


@contextmanager
def telling(url: str) -> Iterator[None]:
    """Whatever PostgreSQL says becomes one of our errors, with its place."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise PostgresUnavailable(f"PostgreSQL at {where(url)} gave up: {error}. Try again.") from None
    except psycopg.Error as error:
        raise EvertickError(f"PostgreSQL at {where(url)} refused: {error}") from None


def refuse_pending(found: SchemaStatus, url: str) -> None:
    if found.pending:
        first = "has no Evertick schema yet" if not found.applied else f"lacks migration {found.pending[0].label}"
        raise SchemaMismatch(f"The database at {where(url)} {first}. Run `evertick db migrate`.")


def shown(path: Path) -> str:
    return str(path) if path.is_absolute() else f"./{path}"


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
