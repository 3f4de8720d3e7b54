"""Operations called in this process, on a connection of its own to the database: no server, no HTTP.

The database is the one of the settings, or the embedded server of the home while that runs. Errors never show a password.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any

import psycopg
from psycopg import AsyncConnection

from evertick.client.connect import Client, refuse_server
from evertick.config import Settings, read_settings
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.connection import where
from evertick.db.migrate import refuse_pending, status
from evertick.db.queries.shards import read_clock
from evertick.domain.access import Principal, Role
from evertick.domain.errors import EvertickError, InvalidSettings, OutcomeUnknown, PostgresUnavailable
from evertick.logs.reader import LogArchive
from evertick.operations.caller import Caller
from evertick.supervisor.postgres_home import own_database_url


class LocalContext:
    """One connection to read with and one to change with, opened when they are first needed and again after they broke."""

    is_stopping = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._url = database_url(settings)
        self._connections: dict[Purpose, AsyncConnection] = {}

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        with with_advice(self._url):
            yield await self._get(Purpose.READ)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        with with_advice(self._url):
            yield await self._get(Purpose.SCHEDULER)

    @contextmanager
    def committing(self, conn: AsyncConnection) -> Iterator[None]:
        """A connection that breaks within the block leaves open whether the change was made; the error says so."""
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if not (conn.closed or conn.broken):
                raise
            why = str(error).splitlines()[0]
            raise OutcomeUnknown(
                f"The answer of PostgreSQL at {where(self._url)} was lost ({why}), so it is not known whether this was"
                " done. Check before you repeat it."
            ) from None

    @cached_property
    def log_archive(self) -> LogArchive:
        return LogArchive(self.settings)

    def misconfigured(self, error: InvalidSettings, message: str) -> EvertickError:
        return error

    async def close(self) -> None:
        for conn in self._connections.values():
            await conn.close()
        self._connections.clear()

    async def _get(self, purpose: Purpose) -> AsyncConnection:
        conn = self._connections.get(purpose)
        if conn is None or conn.closed or conn.broken:
            conn = self._connections[purpose] = await open_connection(self._url, purpose)
        return conn


class LocalClient(Client):
    where = "database"
    items_per_page = 10_000
    pause_seconds = 0.2

    def __init__(self) -> None:
        self._context = LocalContext(read_settings())
        self._runner = asyncio.Runner()

    @property
    def now(self) -> datetime:
        return self._runner.run(self._read_clock())

    def close(self) -> None:
        self._runner.run(self._context.close())
        self._runner.close()

    def _call(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Any:
        async def run() -> Any:
            return await operation(local_caller(self._context), **params)

        return self._runner.run(run())

    def _stream(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Iterator[Any]:
        async def next_of(events: AsyncGenerator[Any, None]) -> Any:
            return await anext(events, None)

        events = self._call(operation, params)
        try:
            while (each := self._runner.run(next_of(events))) is not None:
                yield each
        finally:
            self._runner.run(events.aclose())

    async def _read_clock(self) -> datetime:
        async with self._context.read() as conn:
            return await read_clock(conn)


def local_caller(context: LocalContext) -> Caller:
    """An administrator: access to the database grants every right."""
    return Caller(
        context=context,
        principal=Principal(name=user_name(), role=Role.ADMIN),
        origin=socket.gethostname(),
        client="cli",
    )


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def database_url(settings: Settings) -> str:
    refuse_server()
    return own_database_url(settings)


async def open_connection(url: str, purpose: Purpose) -> AsyncConnection:
    """A connection to a database whose schema fits this program."""
    try:
        conn = await connect(url, purpose=purpose)
    except PostgresUnavailable as error:
        raise PostgresUnavailable(f"{error} {_how_to_start()}") from None
    try:
        refuse_pending(await status(conn), url)
    except BaseException:
        await conn.close()
        raise
    return conn


@asynccontextmanager
async def opened(url: str, purpose: Purpose) -> AsyncIterator[AsyncConnection]:
    """The same, closed at the end, with PostgreSQL's errors as ours."""
    with with_advice(url):
        async with await open_connection(url, purpose) as conn:
            yield conn


def _how_to_start() -> str:
    if read_settings().database_url:
        return "Start that server, or correct EVERTICK_DATABASE_URL."
    return "Evertick is just starting or stopping there: try again."
