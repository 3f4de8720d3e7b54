"""Tasks, DAGs and stored outputs by many filters and in many orders, with an offset and a total; one run; its notes.

Every list has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from decimal import Decimal
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.db.queries.run_lists import ListedRun, PageRequest, is_by_key, numbers_of, read_page
from evertick.db.statements import query, sql

_NUMBERED = re.compile(r"__(\d{1,18})$")


# The parts of a task filter: on versions, on the tasks in them, and on rows.
_OF_VERSIONS = frozenset({"dag_id", "dag_ids", "dags", "dag_like", "dag_heads", "versions"})


_OF_SPECS = frozenset({"tasks", "queues", "groups", "like", "heads"})


_OF_ROWS = _OF_VERSIONS | _OF_SPECS | {"states", "plain_states", "started", "finished", "is_mapped", "map_indexes"}


_OF_ROWS |= {"after", "before", "names", "kinds", "no_pool"}


_PLACE = frozenset({"run_id", "idx", "map_index"})


_OVER = frozenset({"success", "failed", "skipped", "canceled", "upstream_failed"})


_MOST_SPECS = 20_000


@dataclass(frozen=True, slots=True)
class Note:
    content: str
    written_by: str
    written_at: datetime


@dataclass(frozen=True, slots=True)
class ListedTask:
    """`phase` is the state, with 'retrying' for a pending task that waits for its next attempt, and 'polling' for a
    sensor between two polls."""

    run_id: int
    dag_id: int
    dag: str
    version_id: int
    version: int
    version_created_at: datetime
    text_id: str
    fire_at: datetime | None
    due_at: datetime
    idx: int
    map_index: int
    task: str
    queue: str
    priority: int
    max_attempts: int
    phase: str
    attempt: int
    tries: int
    started_at: datetime | None
    finished_at: datetime | None
    seconds: float | None
    reason: str | None
    host: str | None
    note: str | None
    pool: str | None
    slots: int | None
    map_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """The run fields as in the filter of runs. `states` are names from `names`, which maps phases to names; 'none' is a phase
    without a name. `plain_states`: the same as stored in the table, which has statistics. `is_live`: all of these states are of
    tasks that have started and are not over, which only open runs have. `kinds` maps task kinds to names,
    `no_pool` is the name for no pool."""

    run_id: int | None = None
    dag_id: int | None = None
    dag_ids: list[int] | None = None
    dags: list[str] | None = None
    groups: list[str] | None = None
    after: list[int] | None = None
    before: list[int] | None = None
    is_mapped: bool | None = None
    tasks: list[str] | None = None
    text_ids: list[str] | None = None
    states: list[str] | None = None
    plain_states: list[str] | None = None
    is_live: bool | None = None
    pools: list[str] | None = None
    pool_like: list[str] | None = None
    pool_heads: list[str] | None = None
    queues: list[str] | None = None
    queue_like: list[str] | None = None
    queue_heads: list[str] | None = None
    operators: list[str] | None = None
    operator_like: list[str] | None = None
    operator_heads: list[str] | None = None
    versions: list[int] | None = None
    tries: list[int] | None = None
    map_indexes: list[int] | None = None
    due: Range[datetime] | None = None
    fire: Range[datetime] | None = None
    started: Range[datetime] | None = None
    finished: Range[datetime] | None = None
    changed: Range[datetime] | None = None
    seconds: Range[Decimal] | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    run_like: list[str] | None = None
    run_heads: list[str] | None = None
    dag_like: list[str] | None = None
    dag_heads: list[str] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    no_pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDagFilter:
    """`seen_tags`: the caller may see only DAGs with one of these tags."""

    seen_tags: list[str] | None = None
    any_tags: list[str] | None = None
    all_tags: list[str] | None = None
    owners: list[str] | None = None
    paused: bool | None = None
    is_broken: bool | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    name_like: list[str] | None = None
    name_heads: list[str] | None = None
    last_states: list[str] | None = None
    last_started: Range[datetime] | None = None
    last_finished: Range[datetime] | None = None
    has_assets: bool | None = None
    asset_like: list[str] | None = None


async def list_tasks(conn: AsyncConnection, wanted: TaskFilter, asked: PageRequest) -> tuple[list[ListedTask], int]:
    """In the order of runs, and of tasks in them, by default."""
    if wanted.run_id is None:
        specs = await _specs_of(conn, wanted)
        if specs is not None and [] in specs.values():
            return [], 0
        is_by_place = is_by_key(asked.order) and _PLACE.issuperset(column for column, _ in asked.order)
        if specs is not None and _is_of_rows(wanted) and is_by_place:
            return await read_page(conn, sql("listings", "task_rows"), {**asdict(wanted), **specs}, asked, ListedTask)
    words = {"names": Jsonb(wanted.names), "kinds": Jsonb(wanted.kinds)}
    run_ids = None if wanted.text_ids is None else await numbers_of(conn, wanted.text_ids, asdict(wanted))
    params = {**asdict(wanted), **words, "run_ids": run_ids}
    is_small = wanted.run_id is not None
    return await read_page(conn, sql("listings", "tasks"), params, asked, ListedTask, is_small=is_small)


def _is_of_rows(wanted: TaskFilter) -> bool:
    """Whether the filter needs only a task's own row, or its position in its version. A finished task has a row, and
    no second name for its state; a task that has started has a row, too."""
    is_over = wanted.plain_states is not None and _OVER.issuperset(wanted.plain_states)
    is_begun = wanted.states is None and (wanted.started or wanted.finished) is not None
    others = (each.name for each in fields(wanted) if each.name not in _OF_ROWS)
    return (is_over or is_begun) and all(getattr(wanted, name) in (None, False) for name in others)


async def _specs_of(conn: AsyncConnection, wanted: TaskFilter) -> dict[str, list[int] | None] | None:
    """The versions, or positions in them, that pass the filter; None if they are too many to list."""
    if not any(getattr(wanted, name) is not None for name in _OF_VERSIONS | _OF_SPECS):
        return {"version_ids": None, "places": None}
    is_of_tasks = any(getattr(wanted, name) is not None for name in _OF_SPECS)
    params = {**asdict(wanted), "is_of_tasks": is_of_tasks, "limit": _MOST_SPECS + 1}
    cursor = await conn.execute(sql("listings", "specs_of_tasks"), params, prepare=False)
    found = [cast(int, row[0]) for row in await cursor.fetchall()]
    if len(found) > _MOST_SPECS:
        return None
    return {"version_ids": None if is_of_tasks else found, "places": found if is_of_tasks else None}


async def list_dags(conn: AsyncConnection, wanted: ListedDagFilter, asked: PageRequest) -> tuple[list[str], int]:
    """The names of the DAGs."""
    return await read_page(conn, sql("listings", "dags"), asdict(wanted), asked, str)


async def find_run(conn: AsyncConnection, *, dag_id: int, text_id: str) -> ListedRun | None:
    """Find a run by its key, or by the number at the end of a generated id."""
    run_id = await run_of_key(conn, dag_id=dag_id, key=text_id)
    if run_id is None and (numbered := _NUMBERED.search(text_id)):
        run_id = int(numbered[1])
    if run_id is None:
        return None
    found = await run_by_number(conn, dag_id=dag_id, run_id=run_id)
    return found if found is not None and found.text_id == text_id else None


@query
async def run_by_number(conn: AsyncConnection, *, dag_id: int, run_id: int) -> ListedRun | None: ...


@query
async def run_of_key(conn: AsyncConnection, *, dag_id: int, key: str) -> int | None: ...


@query
async def tasks_of(conn: AsyncConnection, *, run_id: int, idxs: list[int], limit: int = 100_000) -> list[ListedTask]:
    """These tasks of a run, each with all its instances."""


@query
async def active_runs(conn: AsyncConnection, dag_id: int) -> int: ...


@query
async def tags(conn: AsyncConnection, *, seen_tags: list[str] | None) -> list[str]: ...


async def count_runs(conn: AsyncConnection, *, dags: list[str]) -> dict[str, dict[str, int]]:
    """By DAG and state; zero counts are omitted."""
    found: dict[str, dict[str, int]] = {}
    cursor = await conn.execute(sql("listings", "count_runs"), {"dags": dags})
    for name, state, runs in await cursor.fetchall():
        found.setdefault(cast(str, name), {})[cast(str, state)] = cast(int, runs)
    return found


@query
async def note(conn: AsyncConnection, *, run_id: int, idx: int, map_index: int) -> Note | None:
    """For a run, `idx` and `map_index` are -1."""


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


async def list_outputs(
    conn: AsyncConnection, wanted: OutputFilter, asked: PageRequest
) -> tuple[list[ListedOutput], int]:
    is_small = wanted.run_id is not None
    return await read_page(conn, sql("listings", "list"), asdict(wanted), asked, ListedOutput, is_small=is_small)
