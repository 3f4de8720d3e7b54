"""Runs by many filters, with an offset and a total."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql

_NUMBERED = re.compile(r"__(\d{1,18})$")


@dataclass(frozen=True, slots=True)
class ListedRun:
    run_id: int
    dag_id: int
    dag: str
    version_id: int
    version: int
    version_created_at: datetime
    text_id: str
    kind: str
    fire_at: datetime | None
    due_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    seconds: float | None
    state: str
    reason: str | None
    params: dict[str, object]
    triggered_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """What is None is not asked. Patterns are of LIKE, without regard to capitals; one of them must fit."""

    dag_ids: list[int] | None = None
    states: list[str] | None = None
    kinds: list[str] | None = None
    version: int | None = None
    due_from: datetime | None = None
    due_until: datetime | None = None
    fire_from: datetime | None = None
    fire_until: datetime | None = None
    start_from: datetime | None = None
    start_until: datetime | None = None
    end_from: datetime | None = None
    end_until: datetime | None = None
    seconds_from: float | None = None
    seconds_until: float | None = None
    like: list[str] | None = None
    actor_like: list[str] | None = None
    dag_like: list[str] | None = None


async def runs_by_id(conn: AsyncConnection, wanted: RunFilter, *, offset: int, limit: int) -> list[ListedRun]:
    """Newest first."""
    params = {**asdict(wanted), "offset": offset, "limit": limit}
    return await all_rows(conn, sql("listing", "runs_by_id"), params, ListedRun)


async def find_run(conn: AsyncConnection, *, dag_id: int, text_id: str) -> ListedRun | None:
    """By its key, or by the number at the end of a made-up id."""
    run_id = cast("int | None", await one_value(conn, sql("listing", "run_of_key"), {"dag_id": dag_id, "key": text_id}))
    if run_id is None and (numbered := _NUMBERED.search(text_id)):
        run_id = int(numbered[1])
    if run_id is None:
        return None
    params = {"dag_id": dag_id, "run_id": run_id, "text_id": text_id}
    return await one_row(conn, sql("listing", "find_run"), params, ListedRun)
