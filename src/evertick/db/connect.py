"""Connections to PostgreSQL, one set of session options per purpose, and the retry of a deadlocked transaction.

Every connection is opened here, so that every session has its timeouts and none leads to a server that was
replaced. Must never log or show a password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

import psycopg
from psycopg import AsyncConnection, conninfo

from evertick.db import failover, failpoints
from evertick.db.connection import (
    Parts,
    TimedConnection,
    each_host,
    in_transactions,
    parse,
    place_of,
    where,
    without_password,
)
from evertick.db.failover import ServerGuard, guard_of
from evertick.db.function_sets import TABLES_SCHEMA, own_set
from evertick.db.statements import VALUES
from evertick.domain.errors import EvertickError, PostgresUnavailable, StaleServer

OLDEST_SERVER_VERSION = 150000


class Purpose(StrEnum):
    """The use of a connection. It decides the timeouts and how statements are planned."""

    RUNNER = "runner"
    SCHEDULER = "scheduler"
    READ = "read"
    LISTEN = "listen"
    MONITOR = "monitor"
    API_READ = "api-read"
    API_WRITE = "api-write"


# A frozen client must not hold locks for long, and a cut network must be noticed before a lease passes to another process.
_NETWORK = {
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

# The server must also notice soon that a client's host is gone: until then it keeps that client's locks.
_EVERY_SESSION = {
    "timezone": "UTC",
    "jit": "off",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

# Data is in memory or on an SSD. With the default random_page_cost, which is meant for spinning disks, finding ten thousand
# failed runs reads a million: 170 ms instead of 70.
_READING = {"default_transaction_read_only": "on", "random_page_cost": "1.1"}

# Half of the time the queue tables look empty to the planner; a plan made then must not read the whole table once it has
# grown. Every join on these connections is a few keys against an index, so other join types are never right.
_STEADY_PLANS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    # Before PostgreSQL 18 a plan type that is "off" only counts as very expensive, and an expensive plan gets parallel workers.
    "max_parallel_workers_per_gather": "0",
}


def _timeouts(statement: str, lock: str, idle: str = "5s") -> dict[str, str]:
    return {"statement_timeout": statement, "lock_timeout": lock, "idle_in_transaction_session_timeout": idle}


_SESSION: dict[Purpose, dict[str, str]] = {
    Purpose.RUNNER: _timeouts("15s", "5s") | _STEADY_PLANS,
    Purpose.SCHEDULER: _timeouts("30s", "5s") | _STEADY_PLANS,
    Purpose.READ: _timeouts("15s", "2s", "10s") | _READING,
    Purpose.LISTEN: _timeouts("15s", "2s"),
    # A person waits for these results, and the engine has priority: a statement that takes longer is canceled (H4).
    Purpose.API_READ: _timeouts("5s", "1s") | _READING | {"max_parallel_workers_per_gather": "0"},
    Purpose.API_WRITE: _timeouts("10s", "3s") | _STEADY_PLANS,
    # Wake-ups and marks: the sender must soon notice if they cannot be sent.
    Purpose.MONITOR: _timeouts("3s", "2s"),
}

# The longest wait for a reply: longer than the server's own timeouts, so that the server's error arrives first if it has one.
_LONGEST_SECONDS: dict[Purpose, float | None] = {
    Purpose.RUNNER: 20.0,
    Purpose.SCHEDULER: 35.0,
    Purpose.READ: 20.0,
    Purpose.LISTEN: None,
    Purpose.MONITOR: 5.0,
    Purpose.API_READ: 7.0,
    Purpose.API_WRITE: 13.0,
}

# One of several hosts may hang: this is how long to wait for it after another one has answered.
FIRST_PATIENCE_SECONDS, PATIENCE_SECONDS = 2.0, 0.5

_HINTS = {
    "too many clients": "All connections are in use: see 'Connections' in docs/howto/operate.md for how to reserve some.",
    "remaining connection slots": "All connections are in use: see 'Connections' in docs/howto/operate.md for how to"
    " reserve some.",
    "too many connections for role": "Raise the CONNECTION LIMIT of this role.",
    "certificate verify failed": "The server's certificate is not signed by a CA in sslrootcert of EVERTICK_DATABASE_URL, or it"
    " has expired: set the CA's certificate, or renew the server's.",
    "does not match host name": "Connect by a name that is in the server's certificate, or issue a certificate for this name.",
    "no encryption": "It accepts only TLS connections: add ?sslmode=verify-full&sslrootcert=ca.crt to EVERTICK_DATABASE_URL.",
    "server does not support SSL": "Set ssl = on in its postgresql.conf; without TLS the traffic can be read on the network.",
    "connection requires a valid client certificate": "Add sslcert= and sslkey= of this machine to EVERTICK_DATABASE_URL.",
    "certificate expired": "The client certificate of this machine has expired: renew the file that sslcert= names.",
    "unknown ca": "The server does not trust the CA of the certificate that sslcert= names.",
    "certificate authentication failed": "The name (CN) in the certificate that sslcert= names must be that of the role.",
    "root certificate file": "Correct sslrootcert= in EVERTICK_DATABASE_URL; sslrootcert=system uses the machine's own CAs.",
    "unsupported startup parameter": "A connection pooler is in front of it: use the server's own address, or see"
    " 'Behind a pooler' in docs/howto/operate.md.",
}


async def connect(url: str, *, purpose: Purpose) -> AsyncConnection:
    """Open an autocommit connection for `purpose` to a primary of PostgreSQL 15 or newer.

    With several hosts, all are tried, and the server that was promoted last is used.
    """
    parts, guard = parse(url), guard_of(url)
    hosts = each_host(parts)
    patience_seconds = FIRST_PATIENCE_SECONDS if guard.seen is None else PATIENCE_SECONDS
    opened: list[TimedConnection] = []
    refused: list[PostgresUnavailable] = []

    async def knock(host: Parts) -> None:
        try:
            opened.append(await _open(host, purpose, guard))
        except PostgresUnavailable as error:
            refused.append(error)

    try:
        async with asyncio.TaskGroup() as group:
            tries = {group.create_task(knock(host)) for host in hosts}
            while tries:
                patience = patience_seconds if opened else None
                done, tries = await asyncio.wait(tries, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
            for each in tries:
                each.cancel()
        if not opened:
            raise _all_refused(refused, parts)
        chosen = next((line for line in opened if guard.trusts(line.server)), opened[0])
        opened.remove(chosen)
        return chosen
    finally:
        for line in opened:
            await line.close()


def refuse_old_server(server_version: int, place: str) -> None:
    """Raise for a server older than the SQL that Evertick uses. `server_version` is libpq's number."""
    if server_version >= OLDEST_SERVER_VERSION:
        return
    raise PostgresUnavailable(
        f"PostgreSQL {server_version // 10000}.{server_version % 10000} at {place} is too old: Evertick needs"
        f" {OLDEST_SERVER_VERSION // 10000} or newer. Upgrade the server, or unset EVERTICK_DATABASE_URL to use"
        " the embedded one."
    )


# Servers that speak PostgreSQL's protocol: how `version()` and a session's parameters name them, and why they cannot be used.
_OTHER_SERVERS = {
    "CockroachDB": "its advisory locks are no-ops, so two schedulers would lead at once",
    "YugabyteDB": "it refuses ctid, with which queues take their rows",
}


def refuse_other_server(version: str, place: str) -> None:
    """Raise for a server that only speaks PostgreSQL's protocol. `version` is its own description."""
    name = "CockroachDB" if "CockroachDB" in version else "YugabyteDB" if "-YB-" in version else None
    if name is not None:
        raise PostgresUnavailable(
            f"The server at {place} is {name}, which Evertick cannot use: {_OTHER_SERVERS[name]}. Set EVERTICK_DATABASE_URL"
            " to PostgreSQL 15 or newer, or unset it to use the embedded one."
        )


async def _version_of(line: TimedConnection) -> str:
    with suppress(psycopg.Error):
        row = await (await line.execute("select version()")).fetchone()
        return str(row[0]) if row else ""
    return ""


async def _open(parts: Parts, purpose: Purpose, guard: ServerGuard) -> TimedConnection:
    """A connection to one host, if its server may be used."""
    place = place_of(parts)
    try:
        line = await TimedConnection.connect(
            _conninfo(parts, purpose),
            autocommit=True,
            prepare_threshold=None,
            context=VALUES,
            cursor_factory=failpoints.cursor_class(),
        )
    except (psycopg.Error, OSError) as error:
        raise PostgresUnavailable(_cannot(place, error, parts)) from None
    try:
        line.answer_timeout = _LONGEST_SECONDS[purpose] or _LONGEST_SECONDS[Purpose.MONITOR]
        told = [line.info.parameter_status(name) or "" for name in ("crdb_version", "server_version")]
        refuse_other_server(" ".join(told), place)
        refuse_old_server(line.info.server_version, place)
        try:
            await verify_server(line, guard, place)
        except psycopg.Error:
            # A proxy in between may not pass those parameters on.
            refuse_other_server(await _version_of(line), place)
            raise
        line.answer_timeout = _LONGEST_SECONDS[purpose]
        if line.is_pooled:
            in_transactions(line, own_set().search_path)
        else:
            line.prepare_threshold = 0 if purpose is Purpose.RUNNER else 5
        guard.watch_over(line)
    except psycopg.Error as error:
        await line.close()
        raise PostgresUnavailable(_cannot(place, error, parts)) from None
    except BaseException:
        await line.close()
        raise
    return line


async def verify_server(line: TimedConnection, guard: ServerGuard, place: str) -> None:
    """Identify the server behind a connection, and refuse a replaced server or a session without our settings."""
    sight = await failover.read_server_status(line)
    if sight.is_standby:
        raise PostgresUnavailable(f"The PostgreSQL at {place} is a standby, and Evertick needs the primary.")
    # The backend pid in the startup message is not that of the server process that answers: a pooler is in between.
    line.is_pooled = sight.pid != line.info.backend_pid
    if not _fits(sight.search_path, is_pooled=line.is_pooled):
        raise PostgresUnavailable(
            f"The PostgreSQL at {place} is behind a pooler that drops session settings: search_path is"
            f" {sight.search_path!r} and must be {TABLES_SCHEMA}. Set EVERTICK_DATABASE_URL to the server's own address,"
            " or see 'Behind a pooler' in docs/howto/operate.md."
        )
    line.server, line.untold = sight.server, sight.untold
    guard.accept(sight.server, place)


def _fits(search_path: str, *, is_pooled: bool) -> bool:
    """Behind a pooler each transaction sets its own; there the database has the tables on its path, as an operator must see to."""
    found = [each.strip().strip('"') for each in search_path.split(",")]
    return found == own_set().search_path.split(",") or (is_pooled and TABLES_SCHEMA in found)


def _conninfo(host: Parts, purpose: Purpose) -> str:
    parts = dict(host)
    settings = {"search_path": own_set().search_path, **_EVERY_SESSION, **_SESSION[purpose]}
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    parts["options"] = f"{parts.get('options', '')} {ours}".strip()
    parts["application_name"] = f"evertick-{purpose}"
    return conninfo.make_conninfo("", **{**_NETWORK, **parts})


def _cannot(place: str, error: Exception, parts: Parts) -> str:
    text = without_password(str(error), parts)
    hint = next((advice for sign, advice in _HINTS.items() if sign in text), None)
    return f"Cannot connect to PostgreSQL at {place}: {text}" + (f" {hint}" if hint else "")


def _all_refused(refused: list[PostgresUnavailable], parts: Parts) -> PostgresUnavailable:
    """A single error unchanged; several in one message, with the type of a refusal by the server if there was one."""
    if len(refused) == 1:
        return refused[0]
    kind = StaleServer if any(isinstance(each, StaleServer) for each in refused) else PostgresUnavailable
    return kind(f"None of the servers {place_of(parts)} can be used. " + " ".join(str(each) for each in refused))


@contextmanager
def with_advice(url: str) -> Iterator[None]:
    """Turn every PostgreSQL error into one of ours, with the server's location."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise PostgresUnavailable(f"PostgreSQL at {where(url)} failed: {error}. Try again.") from None
    except psycopg.Error as error:
        raise EvertickError(f"PostgreSQL at {where(url)} rejected the statement: {error}") from None
