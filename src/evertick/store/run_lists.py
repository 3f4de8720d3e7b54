"""Runs by many filters and in many orders, with an offset and a total: read from an index, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import LiteralString, NamedTuple, cast

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
    count,
    is_by_key,
    question,
    refuse_endless,
)
from evertick.store.rows import all_rows
from evertick.store.statements import sql

_PAGE, _WAY = "/* page */", "/* way */"
# Up to this many are faster fetched and sorted than found one by one among a million in index order.
MOST_FEW = 10_000
# Less than a millisecond passes between the two reads: runs deleted in between several times in a row do not occur in practice.
_MOST_READS = 10
# Filters that may leave few runs of many.
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
    run_type: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """A filter that is None does not apply. `types` are finer than `kinds`, and no index has them: filter by their kinds, too.
    `like`: patterns of ILIKE, `heads`: prefixes; any of them must match. `names`: the names of states, for sorting
    by name."""

    dag_id: int | None = None
    dag_ids: list[int] | None = None
    dags: list[str] | None = None
    after: int | None = None
    before: int | None = None
    states: list[str] | None = None
    kinds: list[str] | None = None
    types: list[str] | None = None
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


class Meant(NamedTuple):
    """The DAGs that match, and their schedules if times matter. Indexes order times within each. `caused_ids`: the schedules
    with runs triggered by an asset, if only such runs are wanted."""

    dag_ids: list[int]
    schedule_ids: Sequence[int] = ()
    caused_ids: list[int] | None = None


async def list_runs(conn: AsyncConnection, wanted: RunFilter, asked: Asked) -> tuple[list[ListedRun], int]:
    """One page, and the total, up to `MOST_COUNTED`. Oldest first by default."""
    within = await _meant(conn, wanted, asked.order)
    if _may_be_rare(wanted, asked.order):
        total = await count(conn, question_of_runs(wanted, COUNT_ONLY, within), MOST_COUNTED + 1)
        if total <= MOST_FEW:
            page = question_of_runs(wanted, replace(asked, is_counted=False), within, is_few=True)
            found, _ = await _read(conn, page)
            return found, total if asked.is_counted else 0
    if served_page(asked.order) is None and not is_by_key(asked.order):
        await refuse_endless(conn, question_of_runs(wanted, COUNT_ONLY, within))
    return await _read(conn, question_of_runs(wanted, asked, within))


async def _read(conn: AsyncConnection, asked: Question) -> tuple[list[ListedRun], int]:
    """A change between the two reads is shown as of the second. If a run was deleted in between, the page is read again: a caller
    takes an incomplete page for the last one."""
    for _ in range(_MOST_READS):
        cursor = await conn.execute(*asked, prepare=False)
        ((total, run_ids),) = await cursor.fetchall()
        found = (
            await all_rows(conn, sql("listing", "runs_by_number"), {"run_ids": run_ids}, ListedRun) if run_ids else []
        )
        if len(found) == len(run_ids):
            break
    return found, total


def _may_be_rare(wanted: RunFilter, order: Order) -> bool:
    """Whether to fetch all matches and sort them: an index in the requested order might be read to its end for a few. States have
    indexes in the order of runs."""
    is_asked = any(getattr(wanted, name) is not None for name in _SELECTIVE)
    return is_asked or (wanted.states is not None and not is_by_key(order))


async def _meant(conn: AsyncConnection, wanted: RunFilter, order: Order) -> Meant:
    dag_ids = await dags_of(conn, asdict(wanted))
    is_asked = bool(wanted.due or wanted.fire) or bool(order and order[0][0] in ("due_at", "fire_at"))
    schedule_ids = await _numbers(conn, sql("listing", "schedules_of"), {"within": dag_ids}) if is_asked else []
    is_after_asset = wanted.types is not None and set(wanted.types) == {"asset_triggered"}
    caused_ids = await _numbers(conn, sql("listing", "schedules_with_causes"), {}) if is_after_asset else None
    return Meant(dag_ids, schedule_ids, caused_ids)


def question_of_runs(wanted: RunFilter, asked: Asked, within: Meant, *, is_few: bool = False) -> Question:
    """`is_few`: fetch all matches before sorting them."""
    meant = {"within": within.dag_ids, "schedules": list(within.schedule_ids), "causes": within.caused_ids}
    params = {**asdict(wanted), **_bounds_of(wanted), **meant, "names": Jsonb(wanted.names)}
    statement = sql("listing", "runs")
    page = sql("listing", "page_of_few") if is_few else served_page(asked.order)
    if page is not None:
        head, _, tail = statement.split(_PAGE)
        way: LiteralString = "desc" if asked.order and asked.order[0][1] else ""
        statement = head + page.replace("listed_run", "found").replace(_WAY, way) + tail
    # Not every journal entry refers to a run, but each run has a text.
    return question(statement, params, asked, NEVER_NULL | {"text_id"})


def _bounds_of(wanted: RunFilter) -> dict[str, object]:
    """The bounds of the time filters, and the prefix of a text."""
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
    """The page of runs in that order, if an index provides it. Runs with equal values are ordered by id."""
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


async def dags_of(conn: AsyncConnection, asked: Mapping[str, object]) -> list[int]:
    """The DAGs that pass a filter of runs or of tasks, by its fields."""
    if asked["dag_id"] is not None:
        return [cast(int, asked["dag_id"])]
    params = {name: asked[name] for name in ("dag_ids", "dags", "dag_like", "dag_heads")}
    return await _numbers(conn, sql("listing", "dags_of_runs"), params)


async def numbers_of(conn: AsyncConnection, text_ids: Sequence[str], asked: Mapping[str, object]) -> list[int]:
    """The ids of the runs with these texts, in the DAGs that pass a filter."""
    params = {"within": await dags_of(conn, asked), "text_ids": list(text_ids)}
    return await _numbers(conn, sql("listing", "runs_of_texts"), params)


async def _numbers(conn: AsyncConnection, statement: LiteralString, params: Mapping[str, object]) -> list[int]:
    cursor = await conn.execute(statement, params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]
