"""Variables, connections and secrets, as they are stored: encrypted. Nothing here can read them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class ValueRow:
    kind: str
    name: str
    content: str
    key_id: str
    description: str | None
    changed_by: str
    changed_at: datetime


async def put(
    conn: AsyncConnection, *, kind: str, name: str, content: str, key_id: str, description: str | None, actor: str
) -> bool:
    """Whether it is new."""
    params = {
        "kind": kind,
        "name": name,
        "content": content,
        "key_id": key_id,
        "description": description,
        "actor": actor,
    }
    return bool(await one_value(conn, sql("secrets", "put"), params))


async def find(conn: AsyncConnection, wanted: Collection[tuple[str, str]]) -> list[ValueRow]:
    params = {"kinds": [kind for kind, _ in wanted], "names": [name for _, name in wanted]}
    return await all_rows(conn, sql("secrets", "find"), params, ValueRow)


async def list_all(conn: AsyncConnection, *, kind: str | None, limit: int) -> list[ValueRow]:
    return await all_rows(conn, sql("secrets", "list"), {"kind": kind, "limit": limit}, ValueRow)


async def delete(conn: AsyncConnection, *, kind: str, name: str, actor: str) -> bool:
    return bool(await one_value(conn, sql("secrets", "delete"), {"kind": kind, "name": name, "actor": actor}))


async def reseal(conn: AsyncConnection, old: ValueRow, *, content: str, key_id: str) -> bool:
    params = {"kind": old.kind, "name": old.name, "old": old.content, "content": content, "key_id": key_id}
    return bool(await one_value(conn, sql("secrets", "reseal"), params))
