"""Stored values that tasks use by name: variables, connections, secrets. Their names, formats, and which parts are secret."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from evertick.domain.errors import UserError

if TYPE_CHECKING:
    from evertick.domain.dags.params import JsonValue

LONGEST_VALUE = 64 * 1024
_PORTS = 65_536
# Airflow's names of the parts of a connection.
_PARTS = {"conn_type": "type", "username": "login"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class ValueKind(StrEnum):
    VARIABLE = "variable"
    CONNECTION = "connection"
    SECRET = "secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The address of a system and the credentials for it. `print` does not show the password."""

    type: str
    host: str = ""
    port: int | None = None
    login: str = ""
    password: str = field(default="", repr=False)
    schema: str = ""
    extra: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The connection as one URI, without its secret parts."""
        hidden = dict.fromkeys(self.extra, "***")
        return replace(self, password="***" if self.password else "", extra=hidden).uri.replace("%2A", "*")

    @property
    def uri(self) -> str:
        """The connection as one URI, with the password."""
        entry = quote(self.login, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = (f"{entry}@" if entry else "") + host + (f":{self.port}" if self.port else "")
        query = f"?{urlencode(self.extra)}" if self.extra else ""
        return f"{self.type}://{place}/{quote(self.schema)}{query}"


def check_name(kind: ValueKind, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r:.100} is not a valid name for a {kind}: use letters, digits, '_', '-', '.', at most 200 characters."
        )
    return name


def check_value(kind: ValueKind, text: str) -> str:
    """The text to store. A connection is given as a URI, `postgresql://anna:password@host:5432/shop`, or as a JSON object."""
    if not text:
        raise UserError(f"the {kind} is empty: pass its value on standard input.")
    if len(text.encode(errors="replace")) > LONGEST_VALUE or "\0" in text:
        raise UserError(f"a {kind} must have at most {LONGEST_VALUE:,} bytes, and no NUL.")
    if kind is not ValueKind.CONNECTION:
        return text
    if text.lstrip().startswith("{"):
        return check_connection(*_connection_of_json(text))
    return connection_json(parse_connection(text))


def _connection_of_json(text: str) -> tuple[Connection, dict[str, JsonValue]]:
    """Its parts, with the names of Airflow accepted, and its `extra`, which can be nested."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the connection begins with a brace, but is no JSON object: {error}.") from None
    extra = given.pop("extra", None) or {}
    try:
        extra = json.loads(extra) if isinstance(extra, str) else extra
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise UserError("`extra` of a connection must be a JSON object.")
    parts = {_PARTS.get(name, name): value for name, value in given.items() if value is not None}
    port = parts.pop("port", None)
    if unknown := sorted(parts.keys() - {"type", "host", "login", "password", "schema", "description"}):
        known = "type, host, port, login, password, schema and extra"
        raise UserError(f"a connection has no {unknown[0]!r}: it has {known}.")
    if wrong := [name for name, value in parts.items() if not isinstance(value, str)]:
        raise UserError(f"{wrong[0]!r} of a connection must be a text.")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < _PORTS):
        raise UserError("`port` of a connection must be a number from 1 to 65535.")
    parts.pop("description", None)
    return Connection(**{"type": "", **parts, "port": port}), extra


def check_connection(connection: Connection, extra: Mapping[str, JsonValue]) -> str:
    """The text to store for a connection given in parts. `extra` replaces its own and keeps the types of JSON."""
    if not connection.type.strip() or not connection.type.isprintable():
        raise UserError("a connection needs a type, as in postgresql.")
    text = connection_json(connection, extra)
    if len(text.encode(errors="replace")) > LONGEST_VALUE or "\\u0000" in text:
        raise UserError(f"a connection must have at most {LONGEST_VALUE:,} bytes, and no NUL.")
    return text


def parse_connection(text: str) -> Connection:
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if not parts.scheme or "://" not in text:
        raise UserError("a connection must be a URI such as postgresql://anna:PASSWORD@host:5432/shop?sslmode=require")
    return Connection(
        type=parts.scheme,
        host=parts.hostname or "",
        port=port,
        login=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        schema=unquote(parts.path.lstrip("/")),
        extra=dict(parse_qsl(parts.query, keep_blank_values=True)),
    )


def connection_json(connection: Connection, extra: Mapping[str, JsonValue] | None = None) -> str:
    return json.dumps({**asdict(connection), "extra": connection.extra if extra is None else extra})


def read_connection(text: str) -> Connection:
    """Parse the text that `check_value` or `check_connection` stored, or a URI from another backend."""
    if text.lstrip().startswith("{"):
        parts = json.loads(text)
        texts = {
            name: each if isinstance(each, str) else json.dumps(each) for name, each in parts.get("extra", {}).items()
        }
        return Connection(**{**parts, "extra": texts})
    return parse_connection(text)


def read_extra(text: str) -> dict[str, JsonValue]:
    """The extra values of a stored connection with their types; tasks receive all of them as text."""
    return dict(json.loads(text).get("extra", {}))


def hidden_parts(kind: ValueKind, text: str) -> list[str]:
    """The parts of a value that must not appear in logs, results and errors."""
    match kind:
        case ValueKind.SECRET:
            return [text]
        case ValueKind.CONNECTION:
            connection = read_connection(text)
            nested = _texts_in(read_extra(text)) if text.lstrip().startswith("{") else ()
            return [part for part in (connection.password, *connection.extra.values(), *nested) if part]
        case ValueKind.VARIABLE:
            return []


def _texts_in(value: object) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(each)


def as_environment(
    variables: Mapping[str, object], connections: Mapping[str, Connection], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables of a shell or a program, such as `EVERTICK_SECRET_TOKEN` and `EVERTICK_CONNECTION_DB`."""
    given = {f"EVERTICK_SECRET_{_upper(name)}": value for name, value in secrets.items()}
    given |= {f"EVERTICK_CONNECTION_{_upper(name)}": each.uri for name, each in connections.items()}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()}
    return given | {f"EVERTICK_VARIABLE_{_upper(name)}": text for name, text in texts.items()}


def _upper(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name).upper()
