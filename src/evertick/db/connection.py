"""A connection with a time limit on every reply and the identity of its server; and the database URLs that lead to it.

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
from psycopg import AsyncConnection, AsyncCursor, AsyncTransaction, conninfo
from psycopg.abc import RV, Params, PQGen
from psycopg.pq import TransactionStatus

from evertick.domain.errors import PostgresUnavailable
from evertick.domain.failover import Server

# The C function that raises "cached plan must not change result type": the message text depends on the server's language.
_REFUSES_OTHER_TYPE = "RevalidateCachedQuery"


class TimedConnection(AsyncConnection[Any]):
    """`answer_timeout`: how long one answer may take; None is without limit, for connections that wait for notifications.

    `shared_path`: the search path that each transaction sets, where the session belongs to a pooler.
    """

    answer_timeout: float | None = None
    server: Server | None = None
    untold: str | None = None
    is_pooled: bool = False
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
        """Raise CancelledError if the caller was canceled while it waited. psycopg loses a cancellation that comes with
        the answer (`asyncio.wait_for` of Python 3.11) or with an error: a loop would go on, and its service never end."""
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            answer = await self._timed_wait(gen, *args, **options)
        except Exception as error:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError from error
            raise
        if task and task.cancelling() > before:
            raise asyncio.CancelledError
        return answer

    async def _timed_wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        if self.answer_timeout is None:
            return await super().wait(gen, *args, **options)
        timer = asyncio.get_running_loop().call_later(self.answer_timeout, self.abort)
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
                f"PostgreSQL did not answer within {self.answer_timeout:g} s; whether the statement was executed is unknown"
            ) from error
        finally:
            timer.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether the connection is idle: no statement of a canceled caller, no transaction, no unsolicited message from the
        server. A server that closes the connection sends such a message, which the next statement would otherwise run into."""
        if self.closed or self.pgconn.transaction_status != TransactionStatus.IDLE:
            return False
        if self._said is None:
            self._said = select.poll()
            self._said.register(self.fileno(), select.POLLIN)
        return not self._said.poll(0)

    def abort(self) -> None:
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


def in_transactions(line: TimedConnection, search_path: str) -> None:
    """Have every transaction on a pooler's session set its search path, single statements included."""
    line.shared_path = search_path
    given = line.cursor_factory
    # Beneath a class of its own that a failpoint has installed: that one comes after the commit.
    line.cursor_factory = (
        type("SharedCursor", (given, _SharedCursor), {}) if given is not AsyncCursor else _SharedCursor
    )


def has_own_session(conn: AsyncConnection) -> bool:
    """Whether session state (settings, prepared statements, locks, listens) persists on this connection.

    Not behind a pooler, which may use another session for each transaction.
    """
    return not (isinstance(conn, TimedConnection) and conn.is_pooled)


def disable_timeout(conn: AsyncConnection) -> None:
    """For operations that may take long: a migration."""
    if isinstance(conn, TimedConnection):
        conn.answer_timeout = None


class Opened(Protocol):
    """Any holder of a connection: a link, or a borrowed connection."""

    async def get(self) -> AsyncConnection: ...


Parts = dict[str, str]


# Evertick reads and writes; a standby would return slightly outdated data (E2).
_PRIMARY = "primary"


_MEANS_PRIMARY = {"any", "read-write", "primary"}


def parse(url: str) -> Parts:
    """Parse a URL as libpq does."""
    try:
        parts = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        parts = None
    # libpq quotes the part that it could not parse, and mistakes the rest of a password with a bare / or @ for a host, a
    # port or a database. Neither may appear in a message.
    if parts is None or _is_misread(parts):
        raise PostgresUnavailable(
            "The database URL cannot be read: it must look like postgresql://user:password@host:5432/database,"
            " with special characters of the password written as %40 for @, %2F for / and so on. Several hosts are"
            " separated by commas: postgresql://user:password@one:5432,two:5432/database."
        )
    return parts


def where(url: str) -> str:
    """The location that a URL names, for messages: hosts, ports and database, never the user's password."""
    return place_of(parse(url))


def place_of(parts: Parts) -> str:
    hosts = ", ".join(_host_and_port(each) for each in _split(parts))
    database = f" (database {parts['dbname']})" if parts.get("dbname") else ""
    return f"{hosts}{database}"


def each_host(parts: Parts) -> list[Parts]:
    """One set of parts per host, each to be connected to on its own.

    libpq would choose the first writable server, and that can be an old primary. libpq's own check for a writable session is
    not used either: it would reject our read-only connections.
    """
    wanted = parts.get("target_session_attrs", _PRIMARY)
    if wanted not in _MEANS_PRIMARY:
        raise PostgresUnavailable(
            f"The database URL asks for target_session_attrs={wanted}, but Evertick needs the primary: remove the option."
        )
    split = {"host", "hostaddr", "port", "load_balance_hosts"}
    rest = {name: value for name, value in parts.items() if name not in split}
    return [{**rest, **host, "target_session_attrs": _PRIMARY} for host in _split(parts)]


def without_password(text: str, parts: Parts) -> str:
    """An error's text on one line, without the password."""
    password = parts.get("password")
    line = " ".join(text.split())
    return line.replace(password, "***") if password else line


def _split(parts: Parts) -> list[Parts]:
    """Host, address and port of each host. As in libpq, a single port applies to all, and an empty one is the default."""
    lists = {name: parts[name].split(",") for name in ("host", "hostaddr", "port") if name in parts}
    count = max((len(lists[name]) for name in ("host", "hostaddr") if name in lists), default=1)
    if any(len(values) not in (1, count) for values in lists.values()):
        raise PostgresUnavailable(
            f"The database URL has {count} hosts but a different number of addresses or ports: give one for each host, or none."
        )
    spread = {name: values if len(values) == count else values * count for name, values in lists.items()}
    return [{name: values[index] for name, values in spread.items() if values[index]} for index in range(count)]


def _host_and_port(parts: Parts) -> str:
    host = parts.get("host") or parts.get("hostaddr") or "the default socket"
    return f"{host}:{parts['port']}" if parts.get("port") else host


def _is_misread(parts: Parts) -> bool:
    has_strange_port = any(port and not port.isdigit() for port in parts.get("port", "").split(","))
    return has_strange_port or "@" in parts.get("host", "")[1:] or "@" in parts.get("dbname", "")
