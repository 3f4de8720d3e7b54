"""Return values and named outputs of tasks: listed by many filters, and set by hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.domain.attempt import TaskKey
from evertick.store.pages import Asked, read_page
from evertick.store.rows import one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class ListedOutput:
    """`key` None: the task's return value."""

    run_id: int
    dag: str
    text_id: str
    fire_at: datetime | None
    due_at: datetime
    idx: int
    map_index: int
    task: str
    started_at: datetime | None
    finished_at: datetime | None
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFilter:
    """A filter that is None does not apply. `returned`: the name to use for the key of a return value."""

    returned: str
    run_id: int | None = None
    dag_id: int | None = None
    dag_ids: list[int] | None = None
    text_ids: list[str] | None = None
    tasks: list[str] | None = None
    map_indexes: list[int] | None = None
    keys: list[str] | None = None
    key_like: list[str] | None = None
    key_heads: list[str] | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    run_like: list[str] | None = None
    run_heads: list[str] | None = None
    dag_like: list[str] | None = None
    dag_heads: list[str] | None = None
    due: Range[datetime] | None = None
    fire: Range[datetime] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutput:
    """`name` None: replaces the task's return value. `is_removed`: deleted. `must`: 'new' or 'old'."""

    name: str | None
    must: str
    value: object = None
    is_removed: bool = False


async def list_outputs(conn: AsyncConnection, wanted: OutputFilter, asked: Asked) -> tuple[list[ListedOutput], int]:
    is_small = wanted.run_id is not None
    return await read_page(conn, sql("outputs", "list"), asdict(wanted), asked, ListedOutput, is_small=is_small)


async def put(conn: AsyncConnection, key: TaskKey, new: NewOutput, *, actor: str) -> str | None:
    """'done', 'exists', 'missing', or None: there is no such task, or it has not succeeded."""
    value = None if new.is_removed else Jsonb(new.value)
    params = {**key._asdict(), "name": new.name, "value": value, "must": new.must, "actor": actor}
    return cast("str | None", await one_value(conn, sql("outputs", "put"), params))
