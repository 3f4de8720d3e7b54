"""Database URLs: their parts, the place to show in messages, and each host of a URL with several.

Must never show a password, nor a piece of a URL that may contain one.
"""

from __future__ import annotations

import psycopg
from psycopg import conninfo

from evertick.domain.errors import PostgresUnavailable

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
