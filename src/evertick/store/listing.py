"""Runs, tasks and DAGs by many filters and in many orders, with an offset and a total."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import LiteralString, cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.store.pages import (
    COUNT_ONLY,
    MOST_COUNTED,
    NEVER_NULL,
    Asked,
    Order,
    Question,
    answer,
    count,
    is_by_key,
    question,
    read_page,
    refuse_endless,
)
from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql

_NUMBERED = re.compile(r"__(\d{1,18})$")
_PAGE, _WAY = "/* page */", "/* way */"
# So many are sooner fetched and sorted than found one by one among a million that are in order.
MOST_FEW = 5000
# What may leave few runs of many.
_SELECTIVE = (
    *("kinds", "versions", "due", "fire", "started", "finished", "changed", "seconds", "like", "heads"),
    *("actor_like", "actor_heads", "params_like", "asset_like"),
)


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
    note: str | None


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


@dataclass(frozen=True, slots=True)
class _ListedDag:
    dag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """What is None is not asked. `like`: patterns of ILIKE, `heads`: beginnings; one of them must fit. `names`: what a state is
    called where it is ordered by name."""

    dag_id: int | None = None
    dag_ids: list[int] | None = None
    dags: list[str] | None = None
    after: int | None = None
    before: int | None = None
    states: list[str] | None = None
    kinds: list[str] | None = None
    versions: list[int] | None = None
    due: Range[datetime] | None = None
    fire: Range[datetime] | None = None
    started: Range[datetime] | None = None
    finished: Range[datetime] | None = None
    changed: Range[datetime] | None = None
    seconds: Range[Decimal] | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    actor_like: list[str] | None = None
    actor_heads: list[str] | None = None
    dag_like: list[str] | None = None
    dag_heads: list[str] | None = None
    params_like: list[str] | None = None
    asset_like: list[str] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """As of runs. `states` are of `names`, which says what a phase is called; 'none' is one without a name. `is_live`: all of these
    are of tasks that are not over and have begun, which only open runs have. `kinds` says what a kind of task is called,
    `no_pool` what stands for none."""

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
    """`seen_tags`: whoever asks may know only of DAGs with one of these."""

    seen_tags: list[str] | None = None
    any_tags: list[str] | None = None
    all_tags: list[str] | None = None
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


async def list_runs(conn: AsyncConnection, wanted: RunFilter, asked: Asked) -> tuple[list[ListedRun], int]:
    """One page, and how many there are, up to `MOST_COUNTED`. Oldest first unless asked otherwise."""
    within = await _dags_of(conn, wanted)
    if _may_be_rare(wanted, asked.order):
        total = await count(conn, question_of_runs(wanted, COUNT_ONLY, within), MOST_COUNTED + 1)
        if total <= MOST_FEW:
            page = question_of_runs(wanted, replace(asked, is_counted=False), within, is_few=True)
            found, _ = await answer(conn, page, ListedRun)
            return found, total if asked.is_counted else 0
    if served_page(asked.order) is None and not is_by_key(asked.order):
        await refuse_endless(conn, question_of_runs(wanted, COUNT_ONLY, within))
    return await answer(conn, question_of_runs(wanted, asked, within), ListedRun)


def _may_be_rare(wanted: RunFilter, order: Order) -> bool:
    """Few runs are fetched and sorted: an index that knows the order might be read to its end for them. States have indexes in the
    order of runs."""
    is_asked = any(getattr(wanted, name) is not None for name in _SELECTIVE)
    return is_asked or (wanted.states is not None and not is_by_key(order))


def question_of_runs(wanted: RunFilter, asked: Asked, within: Sequence[int], *, is_few: bool = False) -> Question:
    """`within`: the DAGs that are meant. Indexes know times within each. `is_few`: all that fits is fetched before it is sorted."""
    params = {**asdict(wanted), **_bounds_of(wanted), "names": Jsonb(wanted.names), "within": list(within)}
    statement = sql("listing", "runs")
    page = sql("listing", "page_of_few") if is_few else served_page(asked.order)
    if page is not None:
        head, _, tail = statement.split(_PAGE)
        way: LiteralString = "desc" if asked.order and asked.order[0][1] else ""
        statement = head + page.replace("listed_run", "found").replace(_WAY, way) + tail
    # Of the journal's entries not each is about a run, but each run has a text.
    return question(statement, params, asked, NEVER_NULL | {"text_id"})


def _bounds_of(wanted: RunFilter) -> dict[str, object]:
    """The ends of what is asked of time, and how a text begins."""
    bounds: dict[str, object] = {
        "is_of_run": any((wanted.due, wanted.fire, wanted.heads)),
        "is_of_status": any((wanted.states, wanted.started, wanted.finished, wanted.changed)),
        "head": wanted.heads[0] if wanted.heads is not None and len(wanted.heads) == 1 else None,
    }
    for name in ("due", "fire", "started", "finished", "changed"):
        span: Range[datetime] | None = getattr(wanted, name)
        bounds[f"{name}_from"] = span.lower if span is not None and span.lower is not None else "-infinity"
        bounds[f"{name}_to"] = span.upper if span is not None and span.upper is not None else "infinity"
    return bounds


def served_page(order: Order) -> LiteralString | None:
    """The page of runs in that order, if an index knows it. Runs that are equal there come in the order of their numbers."""
    if not order or list(order[1:]) not in ([], [("run_id", False)]):
        return None
    match order[0]:
        case ("dag", _):
            return sql("listing", "page_by_dag")
        case ("text_id", _):
            return sql("listing", "page_by_text")
        case ("due_at", _):
            return sql("listing", "page_by_due")
        case ("fire_at", _):
            return sql("listing", "page_by_fire")
        case ("finished_at", _):
            return sql("listing", "page_by_end")
        case ("changed_at", _):
            return sql("listing", "page_by_change")
        case ("started_at", True):
            return sql("listing", "page_by_start")
        case _:
            return None


async def _dags_of(conn: AsyncConnection, wanted: RunFilter | TaskFilter) -> list[int]:
    """Which DAGs are meant."""
    if wanted.dag_id is not None:
        return [wanted.dag_id]
    params = {name: getattr(wanted, name) for name in ("dag_ids", "dags", "dag_like", "dag_heads")}
    cursor = await conn.execute(sql("listing", "dags_of_runs"), params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def _numbers_of(conn: AsyncConnection, wanted: TaskFilter) -> list[int] | None:
    """Of the runs that are meant by their texts; None for all."""
    if wanted.text_ids is None:
        return None
    params = {"within": await _dags_of(conn, wanted), "text_ids": wanted.text_ids}
    cursor = await conn.execute(sql("listing", "runs_of_texts"), params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def list_tasks(conn: AsyncConnection, wanted: TaskFilter, asked: Asked) -> tuple[list[ListedTask], int]:
    """In the order of runs, and of tasks in them, unless asked otherwise."""
    words = {"names": Jsonb(wanted.names), "kinds": Jsonb(wanted.kinds)}
    params = {**asdict(wanted), **words, "run_ids": await _numbers_of(conn, wanted)}
    is_small = wanted.run_id is not None
    return await read_page(conn, sql("listing", "tasks"), params, asked, ListedTask, is_small=is_small)


async def list_dags(conn: AsyncConnection, wanted: ListedDagFilter, asked: Asked) -> tuple[list[str], int]:
    """Their names."""
    found, total = await read_page(conn, sql("listing", "dags"), asdict(wanted), asked, _ListedDag)
    return [each.dag for each in found], total


async def find_run(conn: AsyncConnection, *, dag_id: int, text_id: str) -> ListedRun | None:
    """By its key, or by the number at the end of a made-up id."""
    run_id = cast("int | None", await one_value(conn, sql("listing", "run_of_key"), {"dag_id": dag_id, "key": text_id}))
    if run_id is None and (numbered := _NUMBERED.search(text_id)):
        run_id = int(numbered[1])
    if run_id is None:
        return None
    found = await run_by_number(conn, dag_id=dag_id, run_id=run_id)
    return found if found is not None and found.text_id == text_id else None


async def run_by_number(conn: AsyncConnection, *, dag_id: int, run_id: int) -> ListedRun | None:
    return await one_row(conn, sql("listing", "find_run"), {"dag_id": dag_id, "run_id": run_id}, ListedRun)


async def tasks_of(
    conn: AsyncConnection, *, run_id: int, idxs: Collection[int], limit: int = 100_000
) -> list[ListedTask]:
    """These tasks of a run, each with all its instances."""
    params = {"run_id": run_id, "idxs": sorted(idxs), "limit": limit}
    return await all_rows(conn, sql("listing", "tasks_of"), params, ListedTask)


async def active_runs(conn: AsyncConnection, dag_id: int) -> int:
    return cast(int, await one_value(conn, sql("listing", "active_runs"), {"dag_id": dag_id}))


async def tags(conn: AsyncConnection, *, seen_tags: list[str] | None) -> list[str]:
    cursor = await conn.execute(sql("listing", "tags"), {"seen_tags": seen_tags})
    return [cast(str, row[0]) for row in await cursor.fetchall()]


async def count_runs(conn: AsyncConnection, *, dags: list[str]) -> dict[str, dict[str, int]]:
    """By DAG and state; what has none is left out."""
    found: dict[str, dict[str, int]] = {}
    cursor = await conn.execute(sql("listing", "count_runs"), {"dags": dags})
    for name, state, runs in await cursor.fetchall():
        found.setdefault(cast(str, name), {})[cast(str, state)] = cast(int, runs)
    return found


async def note(conn: AsyncConnection, *, run_id: int, idx: int, map_index: int) -> Note | None:
    """Of a run: `idx` and `map_index` are -1."""
    return await one_row(conn, sql("listing", "note"), {"run_id": run_id, "idx": idx, "map_index": map_index}, Note)


async def put_note(
    conn: AsyncConnection, *, run_id: int, idx: int, map_index: int, content: str | None, actor: str
) -> bool:
    """Of a run: `idx` and `map_index` are -1. Whether there is such a run."""
    params = {"run_id": run_id, "idx": idx, "map_index": map_index, "content": content, "actor": actor}
    return bool(await one_value(conn, sql("listing", "put_note"), params))
