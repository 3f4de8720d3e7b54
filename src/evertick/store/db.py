"""Connections to PostgreSQL, one set of session options per purpose, and the retry of a deadlocked transaction.

Every connection is opened here, so that no session is ever without its timeouts. Must never log or show a password.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

import psycopg
from psycopg import AsyncConnection, conninfo, errors

from evertick.domain.errors import PostgresUnavailable
from evertick.store import failpoints

OLDEST_SERVER_VERSION = 150000

T = TypeVar("T")


class Purpose(StrEnum):
    """What a connection is for. It decides the timeouts and how plans are made."""

    HOT = "hot"
    PLANNING = "planning"
    READ = "read"
    LISTEN = "listen"


# A frozen client must not hold locks for long, and a cut network must be noticed before a lease passes to another.
_NETWORK = {
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

# The server, too, must notice soon that a client's host is gone: until then it keeps that client's locks.
_EVERY_SESSION = {
    "search_path": "evertick",
    "timezone": "UTC",
    "jit": "off",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

# The queue tables look empty to the planner half of the time; a plan made then must not read all of a table once it has
# grown. Every join of these connections is a few keys against an index, so the other kinds of join are never right.
_STEADY_PLANS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    # Before PostgreSQL 18 a plan that is "off" counts as very dear, and a dear plan is given parallel workers.
    "max_parallel_workers_per_gather": "0",
}

_SESSION: dict[Purpose, dict[str, str]] = {
    Purpose.HOT: {
        "statement_timeout": "15s",
        "lock_timeout": "5s",
        "idle_in_transaction_session_timeout": "5s",
        **_STEADY_PLANS,
    },
    Purpose.PLANNING: {
        "statement_timeout": "30s",
        "lock_timeout": "5s",
        "idle_in_transaction_session_timeout": "5s",
        **_STEADY_PLANS,
    },
    Purpose.READ: {
        "statement_timeout": "15s",
        "lock_timeout": "2s",
        "idle_in_transaction_session_timeout": "10s",
        "default_transaction_read_only": "on",
    },
    Purpose.LISTEN: {
        "statement_timeout": "15s",
        "lock_timeout": "2s",
        "idle_in_transaction_session_timeout": "5s",
    },
}


async def connect(url: str, *, purpose: Purpose) -> AsyncConnection:
    """Open an autocommit connection that is fit for `purpose`, to PostgreSQL 15 or newer."""
    place = where(url)
    try:
        conn = await AsyncConnection.connect(
            _conninfo(url, purpose),
            autocommit=True,
            prepare_threshold=0 if purpose is Purpose.HOT else 5,
            cursor_factory=failpoints.cursor_class(),
        )
    except (psycopg.Error, OSError) as error:
        raise PostgresUnavailable(f"Cannot connect to PostgreSQL at {place}: {_reason(error, url)}") from None
    try:
        refuse_old_server(conn.info.server_version, place)
    except PostgresUnavailable:
        await conn.close()
        raise
    return conn


async def retry_on_deadlock(work: Callable[[], Awaitable[T]], *, tries: int = 5) -> T:
    """Run one whole transaction, and again if PostgreSQL chose it as a deadlock's or a serialisation's victim.

    `work` must begin and end its own transaction: the failed one is already rolled back when it runs again.
    """
    for number in range(1, tries):
        try:
            return await work()
        except (errors.DeadlockDetected, errors.SerializationFailure):
            # Two victims that wait equally long would meet again.
            await asyncio.sleep(random.uniform(0, 0.01 * 2**number))
    return await work()


def where(url: str) -> str:
    """The place that a URL names, for messages: host, port and database, never the user's password."""
    parts = _parse(url)
    host = parts.get("host") or parts.get("hostaddr") or "the default socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    database = f" (database {parts['dbname']})" if parts.get("dbname") else ""
    return f"{host}{port}{database}"


def refuse_old_server(server_version: int, place: str) -> None:
    """Raise for a server older than the SQL that Evertick is written in. `server_version` is libpq's number."""
    if server_version >= OLDEST_SERVER_VERSION:
        return
    raise PostgresUnavailable(
        f"PostgreSQL {server_version // 10000}.{server_version % 10000} at {place} is too old: Evertick needs"
        f" {OLDEST_SERVER_VERSION // 10000} or newer. Upgrade the server, or unset EVERTICK_DATABASE_URL to use"
        " the embedded one."
    )


def _conninfo(url: str, purpose: Purpose) -> str:
    parts = _parse(url)
    ours = " ".join(f"-c {name}={value}" for name, value in {**_EVERY_SESSION, **_SESSION[purpose]}.items())
    parts["options"] = f"{parts.get('options', '')} {ours}".strip()
    parts["application_name"] = f"evertick-{purpose}"
    return conninfo.make_conninfo("", **{**_NETWORK, **parts})


def _parse(url: str) -> dict[str, str]:
    try:
        parts = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        parts = None
    # libpq quotes the part that it could not read, and takes the rest of a password with a bare / or @ for a host, a
    # port or a database. Neither may reach a message.
    if parts is None or _is_misread(parts):
        raise PostgresUnavailable(
            "The database URL cannot be read: it must look like postgresql://user:password@host:5432/database,"
            " with special characters of the password written as %40 for @, %2F for / and so on."
        )
    return parts


def _is_misread(parts: dict[str, str]) -> bool:
    has_strange_port = not parts.get("port", "").replace(",", "").isdigit() and "port" in parts
    return has_strange_port or "@" in parts.get("host", "")[1:] or "@" in parts.get("dbname", "")


def _reason(error: Exception, url: str) -> str:
    text = " ".join(str(error).split())
    password = _parse(url).get("password")
    return text.replace(password, "***") if password else text
