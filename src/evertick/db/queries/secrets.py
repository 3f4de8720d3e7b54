"""Variables, connections and secrets as they are stored: encrypted. This module cannot decrypt them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query, sql_function
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
class AttemptHolder:
    """The session that holds an attempt, and the attempt."""

    key: TaskKey
    epoch: int
    session: int


@dataclass(frozen=True, slots=True)
class NamedValue:
    name: str
    description: str | None


@query
async def names(conn: AsyncConnection, *, kind: str, limit: int) -> list[NamedValue]: ...


@query
async def find(conn: AsyncConnection, *, kinds: list[str], names: list[str]) -> list[ValueRow]: ...


@query
async def lock(conn: AsyncConnection, *, kinds: list[str], names: list[str]) -> list[ValueRow]:
    """Like `find`, and locked against changes until this transaction ends."""


@sql_function(retries=False)
async def values_of_attempt(
    conn: AsyncConnection, key: TaskKey, *, epoch: int, session: int, kinds: list[str], names: list[str]
) -> list[ValueRow]:
    """Like `find`, limited to values declared by the task that this session holds at this epoch."""


@query
async def list_all(conn: AsyncConnection, *, kind: str | None, limit: int) -> list[ValueRow]: ...
