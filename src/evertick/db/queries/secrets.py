"""Variables, connections and secrets as they are stored: encrypted. This module cannot decrypt them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, one_value, sql
from evertick.domain.attempt import TaskKey


@dataclass(frozen=True, slots=True)
class ValueRow:
    kind: str
    name: str
    content: str
    key_id: str
    description: str | None
    changed_by: str
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValue:
    kind: str
    name: str
    content: str
    key_id: str
    description: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The session that holds an attempt, and the attempt."""

    key: TaskKey
    epoch: int
    session: int


@dataclass(frozen=True, slots=True)
class NamedValue:
    name: str
    description: str | None


async def put(conn: AsyncConnection, value: NewValue, *, actor: str, only_new: bool = False) -> bool | None:
    """Whether it is new; None if only a new one was wanted and it exists."""
    params = {**asdict(value), "actor": actor, "only_new": only_new}
    return cast("bool | None", await one_value(conn, sql("secrets", "put"), params))


async def names(conn: AsyncConnection, *, kind: str, limit: int) -> list[NamedValue]:
    return await all_rows(conn, sql("secrets", "names"), {"kind": kind, "limit": limit}, NamedValue)


async def find(conn: AsyncConnection, wanted: Collection[tuple[str, str]]) -> list[ValueRow]:
    params = {"kinds": [kind for kind, _ in wanted], "names": [name for _, name in wanted]}
    return await all_rows(conn, sql("secrets", "find"), params, ValueRow)


async def of_attempt(conn: AsyncConnection, holder: Holder, wanted: Collection[tuple[str, str]]) -> list[ValueRow]:
    """Like `find`, limited to values declared by the task that this session holds at this epoch."""
    params = {"kinds": [kind for kind, _ in wanted], "names": [name for _, name in wanted]}
    who = {**holder.key._asdict(), "session": holder.session, "epoch": holder.epoch}
    return await all_rows(conn, sql("secrets", "of_attempt"), {**params, **who}, ValueRow)


async def lock(conn: AsyncConnection, wanted: Collection[tuple[str, str]]) -> list[ValueRow]:
    """Like `find`, and locked against changes until this transaction ends."""
    params = {"kinds": [kind for kind, _ in wanted], "names": [name for _, name in wanted]}
    return await all_rows(conn, sql("secrets", "lock"), params, ValueRow)


async def list_all(conn: AsyncConnection, *, kind: str | None, limit: int) -> list[ValueRow]:
    return await all_rows(conn, sql("secrets", "list"), {"kind": kind, "limit": limit}, ValueRow)


async def delete(conn: AsyncConnection, *, kind: str, name: str, actor: str) -> bool:
    return bool(await one_value(conn, sql("secrets", "delete"), {"kind": kind, "name": name, "actor": actor}))


async def reseal(conn: AsyncConnection, old: ValueRow, *, content: str, key_id: str) -> bool:
    params = {"kind": old.kind, "name": old.name, "old": old.content, "content": content, "key_id": key_id}
    return bool(await one_value(conn, sql("secrets", "reseal"), params))
