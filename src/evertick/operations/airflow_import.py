"""Stores what `airflow connections export`, `variables export` and `pools export` wrote, as JSON or, for connections, as lines
`NAME=URI`. Each name is stored by itself: one that is refused does not stop the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

from evertick.db.queries import gates
from evertick.domain.access import Actor
from evertick.domain.encryption import Keyring
from evertick.domain.errors import NotFound, UserError
from evertick.domain.stored_values import (
    Connection,
    ValueKind,
    check_connection,
    check_name,
    check_value,
    parse_connection,
)
from evertick.engine.gates import set_pool
from evertick.engine.secrets import About, put, read_value

POOL = "pool"
_DEFAULT_POOL = "default_pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One connection, variable or pool of an export."""

    kind: str
    name: str
    content: Any
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """`result`: new, equal, changed or refused."""

    kind: str
    name: str
    result: str
    reason: str = ""


def read_export(text: str, file: str) -> list[Item]:
    """The items of one file; their shape says what they are."""
    try:
        found = json.loads(text)
    except ValueError:
        return list(_read_lines(text, file))
    if not isinstance(found, dict):
        raise UserError(f"{file} is no export of Airflow: it must be a JSON object of names.")
    return [_item(str(name), given) for name, given in found.items()]


async def import_item(conn: AsyncConnection, keyring: Keyring, item: Item, *, actor: Actor, dry_run: bool) -> Imported:
    try:
        if item.kind == POOL:
            result = await _import_pool(conn, item, actor=actor, dry_run=dry_run)
        else:
            result = await _import_value(conn, keyring, item, actor=actor, dry_run=dry_run)
    except UserError as error:
        return Imported(kind=item.kind, name=item.name, result="refused", reason=str(error))
    return Imported(kind=item.kind, name=item.name, result=result)


def _read_lines(text: str, file: str) -> Iterator[Item]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, separator, uri = line.partition("=")
        if not separator or "://" not in uri:
            raise UserError(
                f"{file}, line {number} is neither JSON nor a connection as NAME=URI. Export with --file-format json or env."
            )
        yield Item(kind=ValueKind.CONNECTION, name=name.strip(), content=uri.strip())


def _item(name: str, given: object) -> Item:
    if isinstance(given, Mapping) and "conn_type" in given:
        return Item(kind=ValueKind.CONNECTION, name=name, content=given, description=given.get("description"))
    if isinstance(given, Mapping) and "slots" in given:
        return Item(kind=POOL, name=name, content=given["slots"])
    if isinstance(given, Mapping) and set(given) <= {"value", "description"} and "value" in given:
        return Item(kind=ValueKind.VARIABLE, name=name, content=given["value"], description=given.get("description"))
    return Item(kind=ValueKind.VARIABLE, name=name, content=given)


async def _import_value(conn: AsyncConnection, keyring: Keyring, item: Item, *, actor: Actor, dry_run: bool) -> str:
    kind = ValueKind(item.kind)
    check_name(kind, item.name)
    extra: dict[str, Any] = {}
    if kind is ValueKind.VARIABLE:
        content: str | Connection = item.content if isinstance(item.content, str) else json.dumps(item.content)
        text = check_value(kind, content) if isinstance(content, str) else ""
    else:
        content, extra = _connection(item)
        text = check_connection(content, extra)
    try:
        before: str | None = (await read_value(conn, keyring, kind=kind, name=item.name))[1]
    except NotFound:
        before = None
    if before == text:
        return "equal"
    if not dry_run:
        about = About(kind=kind, name=item.name, description=item.description)
        await put(conn, keyring, about, content, extra=extra, actor=actor)
    return "new" if before is None else "changed"


def _connection(item: Item) -> tuple[Connection, dict[str, Any]]:
    given = item.content
    if isinstance(given, str):
        found = parse_connection(given)
        return found, {**found.extra}
    extra = given.get("extra") or {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:
            raise UserError("its extra is not JSON") from None
    if not isinstance(extra, dict):
        raise UserError("its extra is not a JSON object")
    port = given.get("port")
    texts: dict[str, Any] = {name: given.get(name) or "" for name in ("host", "login", "password", "schema")}
    made = Connection(type=str(given["conn_type"]), port=None if port in (None, "") else int(port), **texts)
    return made, extra


async def _import_pool(conn: AsyncConnection, item: Item, *, actor: Actor, dry_run: bool) -> str:
    if item.name == _DEFAULT_POOL:
        return "equal"  # tasks in it have no pool here
    if not isinstance(item.content, int) or item.content < 1:
        raise UserError(f"it has {item.content!r} slots; a pool has at least one")
    known = {gate.name: gate.slots for gate in await gates.list_gates(conn, kinds=["pool"])}
    before = known.get(item.name)
    if before == item.content:
        return "equal"
    if not dry_run:
        await set_pool(conn, name=item.name, slots=item.content, actor=actor)
    return "new" if before is None else "changed"
