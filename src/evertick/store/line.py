"""A connection with a time limit on every reply, and with the identity of its server.

The server's own timeouts bound its work, not the delivery of its reply: a frozen host, a lost packet or a commit
that waits for a dead standby would block the caller indefinitely. Whether such a statement was executed remains unknown.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, _AsyncGeneratorContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, AsyncTransaction
from psycopg.abc import RV, Params, PQGen
from psycopg.pq import TransactionStatus

from evertick.domain.failover import Server

# The C function that raises "cached plan must not change result type": the message text depends on the server's language.
_REFUSES_OTHER_TYPE = "RevalidateCachedQuery"


class Line(AsyncConnection[Any]):
    """`longest_seconds`: how long one answer may take; None is without limit, for connections that wait for notifications.

    `shared_path`: the search path that each transaction sets, where the session belongs to a pooler.
    """

    longest_seconds: float | None = None
    server: Server | None = None
    untold: str | None = None
    is_shared: bool = False
    shared_path: str | None = None
    _said: select.poll | None = None

    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> _AsyncGeneratorContextManager[AsyncTransaction]:
        """As psycopg's; behind a pooler it begins by saying where the functions of this release are."""
        usual = super().transaction(savepoint_name, force_rollback)
        is_outermost = self.pgconn.transaction_status == TransactionStatus.IDLE
        return self._with_path(usual, self.shared_path) if self.shared_path and is_outermost else usual

    @asynccontextmanager
    async def _with_path(
        self, usual: AbstractAsyncContextManager[AsyncTransaction], search_path: str
    ) -> AsyncIterator[AsyncTransaction]:
        async with usual as begun:
            await self.execute("select set_config('search_path', %s, true)", [search_path])
            yield begun

    async def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        if self.longest_seconds is None:
            return await super().wait(gen, *args, **options)
        timer = asyncio.get_running_loop().call_later(self.longest_seconds, self.cut)
        try:
            return await super().wait(gen, *args, **options)
        except psycopg.errors.FeatureNotSupported as error:
            if error.diag.source_function != _REFUSES_OTHER_TYPE:
                raise
            # A statement prepared before a migration changed a column's type keeps failing; a new session prepares it again.
            self.pgconn.finish()
            raise psycopg.OperationalError(
                f"{error}; the prepared statements of this connection are out of date"
            ) from error
        except psycopg.OperationalError as error:
            if asyncio.get_running_loop().time() < timer.when():
                raise
            raise psycopg.OperationalError(
                f"PostgreSQL did not answer within {self.longest_seconds:g} s; whether the statement was executed is unknown"
            ) from error
        finally:
            timer.cancel()

    @property
    def is_at_rest(self) -> bool:
        """Whether the connection is idle: no statement of a canceled caller, no transaction, no unsolicited message from the
        server. A server that closes the connection sends such a message, which the next statement would otherwise run into."""
        if self.closed or self.pgconn.transaction_status != TransactionStatus.IDLE:
            return False
        if self._said is None:
            self._said = select.poll()
            self._said.register(self.fileno(), select.POLLIN)
        return not self._said.poll(0)

    def cut(self) -> None:
        """Close the socket now, so that callers waiting for a reply stop waiting."""
        if not self.closed:
            with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(self.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)


class _SharedCursor(AsyncCursor[Any]):
    """Behind a pooler each statement is a transaction that sets its search path. One that says that it must not be prepared is
    sent as it is: VACUUM cannot be part of a transaction."""

    async def execute(self, query: Any, params: Params | None = None, **options: Any) -> Self:
        is_alone = self.connection.pgconn.transaction_status == TransactionStatus.IDLE
        if not is_alone or options.get("prepare") is False:
            return await super().execute(query, params, **options)
        async with self.connection.transaction():
            return await super().execute(query, params, **options)


def in_transactions(line: Line, search_path: str) -> None:
    """Have every transaction on a pooler's session set its search path, single statements included."""
    line.shared_path = search_path
    given = line.cursor_factory
    # Beneath a class of its own that a failpoint has installed: that one comes after the commit.
    line.cursor_factory = (
        type("SharedCursor", (given, _SharedCursor), {}) if given is not AsyncCursor else _SharedCursor
    )


def keeps_session(conn: AsyncConnection) -> bool:
    """Whether session state (settings, prepared statements, locks, listens) persists on this connection.

    Not behind a pooler, which may use another session for each transaction.
    """
    return not (isinstance(conn, Line) and conn.is_shared)


def take_your_time(conn: AsyncConnection) -> None:
    """For operations that may take long: a migration."""
    if isinstance(conn, Line):
        conn.longest_seconds = None


class Opened(Protocol):
    """Any holder of a connection: a link, or a borrowed connection."""

    async def get(self) -> AsyncConnection: ...
