"""put, delete and reseal: variables, connections and secrets are stored encrypted; reading them needs the key."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.db.queries import secrets
from evertick.db.queries.secrets import Holder, NewValue, ValueRow
from evertick.domain.encryption import Keyring
from evertick.domain.errors import Conflict, NotFound
from evertick.domain.stored_values import Connection, ValueKind, check_connection, check_name, check_value

MOST_VALUES = 100_000


async def put_value(
    conn: AsyncConnection,
    keyring: Keyring,
    *,
    kind: ValueKind,
    name: str,
    value: str,
    actor: str,
    description: str | None = None,
) -> bool:
    """Whether it is new."""
    about = About(kind=kind, name=name, description=description)
    return bool(await _put(conn, keyring, about, check_value(kind, value), actor=actor))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The value to change. `is_new`: none with that name may exist yet."""

    kind: ValueKind
    name: str
    description: str | None = None
    is_new: bool = False


async def put_text(conn: AsyncConnection, keyring: Keyring, about: About, text: str, *, actor: str) -> None:
    await _put(conn, keyring, about, check_value(about.kind, text), actor=actor)


async def put_connection(
    conn: AsyncConnection, keyring: Keyring, about: About, connection: Connection, *, actor: str
) -> None:
    """A connection given in parts: not every combination can be written as a URI."""
    await _put(conn, keyring, about, check_connection(connection), actor=actor)


async def _put(conn: AsyncConnection, keyring: Keyring, about: About, content: str, *, actor: str) -> bool:
    sealed = keyring.seal(about.kind, check_name(about.kind, about.name), content)
    new = NewValue(
        kind=about.kind,
        name=about.name,
        content=sealed,
        key_id=keyring.first_id,
        description=about.description,
    )
    is_new = await secrets.put(conn, new, actor=actor, only_new=about.is_new)
    if is_new is None:
        raise Conflict(f"{about.kind.capitalize()} {about.name!r} already exists: change it, or choose another name.")
    return is_new


async def read_value(conn: AsyncConnection, keyring: Keyring, *, kind: ValueKind, name: str) -> tuple[ValueRow, str]:
    found = await secrets.find(conn, [(kind, name)])
    if not found:
        raise await missing_value(conn, kind, name)
    row = found[0]
    return row, keyring.open(kind, name, row.content, row.key_id)


async def read_values(
    conn: AsyncConnection, keyring: Keyring, wanted: Collection[tuple[str, str]], holder: Holder | None = None
) -> dict[tuple[str, str], str]:
    """The stored ones of these values; for the holder of an attempt only the values that its task declares."""
    rows = await (secrets.of_attempt(conn, holder, wanted) if holder else secrets.find(conn, wanted))
    return {(row.kind, row.name): keyring.open(row.kind, row.name, row.content, row.key_id) for row in rows}


async def delete_value(conn: AsyncConnection, *, kind: ValueKind, name: str, actor: str) -> None:
    if not await secrets.delete(conn, kind=kind, name=name, actor=actor):
        raise await missing_value(conn, kind, name)


async def reseal(conn: AsyncConnection, keyring: Keyring) -> int:
    """Re-encrypt all values with the primary key. Returns how many had another key. Resumes after an interruption."""
    count = 0
    for row in await secrets.list_all(conn, kind=None, limit=MOST_VALUES):
        if row.key_id != keyring.first_id:
            value = keyring.open(row.kind, row.name, row.content, row.key_id)
            content = keyring.seal(row.kind, row.name, value)
            count += await secrets.reseal(conn, row, content=content, key_id=keyring.first_id)
    return count


async def missing_value(conn: AsyncConnection, kind: ValueKind, name: str) -> NotFound:
    """The error for a name that does not exist, with a similar name if there is one."""
    known = [row.name for row in await secrets.list_all(conn, kind=kind, limit=1000)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"List {kind}s with `evertick {kind}s list`."
    return NotFound(f"There is no {kind} {name!r}. {hint}")
