"""put, delete and reseal: variables, connections and secrets are stored encrypted, and read by whoever has the key."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from psycopg import AsyncConnection

from evertick.domain.errors import NotFound
from evertick.domain.sealing import Keyring
from evertick.domain.stored_values import ValueKind, check_name, check_value
from evertick.store import secrets
from evertick.store.secrets import ValueRow

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
    content = keyring.seal(kind, check_name(kind, name), check_value(kind, value))
    return await secrets.put(
        conn, kind=kind, name=name, content=content, key_id=keyring.first_id, description=description, actor=actor
    )


async def read_value(conn: AsyncConnection, keyring: Keyring, *, kind: ValueKind, name: str) -> tuple[ValueRow, str]:
    found = await secrets.find(conn, [(kind, name)])
    if not found:
        raise await _missing(conn, kind, name)
    row = found[0]
    return row, keyring.open(kind, name, row.content, row.key_id)


async def read_values(
    conn: AsyncConnection, keyring: Keyring, wanted: Collection[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """Those of them that are stored."""
    rows = await secrets.find(conn, wanted)
    return {(row.kind, row.name): keyring.open(row.kind, row.name, row.content, row.key_id) for row in rows}


async def delete_value(conn: AsyncConnection, *, kind: ValueKind, name: str, actor: str) -> None:
    if not await secrets.delete(conn, kind=kind, name=name, actor=actor):
        raise await _missing(conn, kind, name)


async def reseal(conn: AsyncConnection, keyring: Keyring) -> int:
    """Bring every value under the first key. How many were under another. Interrupted, it goes on the next time."""
    count = 0
    for row in await secrets.list_all(conn, kind=None, limit=MOST_VALUES):
        if row.key_id != keyring.first_id:
            value = keyring.open(row.kind, row.name, row.content, row.key_id)
            content = keyring.seal(row.kind, row.name, value)
            count += await secrets.reseal(conn, row, content=content, key_id=keyring.first_id)
    return count


async def _missing(conn: AsyncConnection, kind: ValueKind, name: str) -> NotFound:
    known = [row.name for row in await secrets.list_all(conn, kind=kind, limit=1000)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`evertick {kind}s list` shows what there is."
    return NotFound(f"There is no {kind} {name!r}; {hint}")
