"""Lists in pages, by many filters and in many orders, with an offset and a total; and the list of runs.

A page is read from an index, or it is refused: no filter may read the whole history.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, LiteralString, NamedTuple, TypeVar, cast

from psycopg import AsyncConnection
from psycopg.sql import SQL, Composed, Identifier
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.db.statements import all_rows, sql
from evertick.domain.errors import UserError
from evertick.domain.schedules.time_zones import with_zone

# Totals are counted up to this limit: counting must not read a million rows for a page of fifty.
MOST_COUNTED = 10_000


# The most rows sorted for a page in an order without an index. A million runs took a second.
MOST_SORTED = 50_000


# An index scan runs backwards only for columns without a "nulls first/last" clause.
NEVER_NULL = frozenset({"run_id", "idx", "map_index", "dag", "entry_id"})


_KEYS = frozenset({"run_id", "entry_id", "occurred_at"})


_ORDER = "/* order */"


# The start of a condition that is true if its parameter is not set.
_IF_ASKED = re.compile(r"\(%\((\w+)\)s::\w+(?:\[\])? is (null|not true)\s+or\b")


_NULLS_LAST: dict[bool, LiteralString] = {True: "{} desc nulls last, ", False: "{} nulls last, "}


Order = Sequence[tuple[str, bool]]


Question = tuple[Composed, dict[str, Any]]


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One page: the offset, the size, the order (columns, True for descending); missing values come last. `is_counted`:
    also return the total."""

    limit: int
    offset: int = 0
    order: Order = ()
    is_counted: bool = True


# No rows of the page: only the total.
COUNT_ONLY = PageRequest(limit=0)


async def read_page(
    conn: AsyncConnection,
    statement: LiteralString,
    params: Mapping[str, Any],
    asked: PageRequest,
    record: Callable[..., T],
    *,
    never_null: frozenset[str] = NEVER_NULL,
    is_small: bool = True,
) -> tuple[list[T], int]:
    """One page and a total, from a statement with a marker for its order. `is_small`: the matches are always few enough to sort."""
    if not (is_small or is_by_key(asked.order)):
        await refuse_endless(conn, question(statement, params, COUNT_ONLY, never_null))
    return await answer(conn, question(statement, params, asked, never_null), record)


def is_by_key(order: Order) -> bool:
    """Whether rows are read in that order directly from the primary key."""
    return not order or order[0][0] in _KEYS


async def count(conn: AsyncConnection, asked: Question, most: int) -> int:
    """The number of matches, up to a limit. The question must be for no page (COUNT_ONLY)."""
    statement, params = asked
    cursor = await conn.execute(statement, {**params, "most": most}, prepare=False)
    rows = await cursor.fetchall()
    return cast(int, rows[0][0])


async def refuse_endless(conn: AsyncConnection, asked: Question) -> None:
    """Refuse an order without an index if too many matches would have to be read and sorted for one page."""
    if await count(conn, asked, MOST_SORTED + 1) > MOST_SORTED:
        raise UserError(
            f"More than {MOST_SORTED:,} rows match, too many to sort. Narrow the list with a filter, or sort it by id."
        )


def question(
    statement: LiteralString, params: Mapping[str, Any], asked: PageRequest, never_null: frozenset[str]
) -> Question:
    most = MOST_COUNTED if asked.is_counted else 0
    unasked = frozenset(name for name, each in params.items() if each is None)
    statement = only_asked(statement, unasked, frozenset(name for name, each in params.items() if each is False))
    page = {"limit": asked.limit, "offset": asked.offset, "reach": asked.limit + asked.offset, "most": most}
    return _in_order(statement, asked.order, never_null), {**params, **page}


async def answer(conn: AsyncConnection, asked: Question, record: Callable[..., T]) -> tuple[list[T], int]:
    """Never prepared: one plan for all combinations of filters would be wrong for each of them."""
    cursor = await conn.execute(*asked, prepare=False)
    rows = await cursor.fetchall()
    # A page behind the last one is a single row that has only the total.
    return [record(*row[1:]) for row in rows if row[1] is not None], cast(int, rows[0][0])


@lru_cache(maxsize=256)
def only_asked(statement: LiteralString, unasked: frozenset[str], untrue: frozenset[str]) -> LiteralString:
    """The statement without its conditions on parameters that are not set: there are dozens, all true, and parsing them
    takes the server up to half of the time of a list. `untrue`: parameters that are false, which differs from not set."""
    kept: list[LiteralString] = []
    at = 0
    for found in _IF_ASKED.finditer(statement):
        is_true = found[1] in unasked or (found[2] == "not true" and found[1] in untrue)
        if is_true and found.start() >= at:
            kept += [statement[at : found.start()], "true"]
            at = _closing(statement, found.start()) + 1
    return "".join([*kept, statement[at:]])


def _closing(statement: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(statement)):
        depth += (statement[place] == "(") - (statement[place] == ")")
        if not depth:
            return place
    raise ValueError(f"a parenthesis is not closed: {statement[opening : opening + 40]}")


def _in_order(statement: LiteralString, order: Order, never_null: frozenset[str]) -> Composed:
    """The statement with these order columns inserted at the marker, before its own, which break ties."""
    head, _, tail = statement.partition(_ORDER)
    parts = [
        SQL(("{} desc, " if is_down else "{}, ") if column in never_null else _NULLS_LAST[is_down]).format(
            Identifier(column)
        )
        for column, is_down in order
    ]
    return Composed([SQL(head), *parts, SQL(tail)] if tail else [SQL(head)])


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
    partition_key: str | None
    partition_date: datetime | None


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
    keys: list[str] | None = None
    keys_like: list[str] | None = None
    keys_heads: list[str] | None = None
    partition: Range[datetime] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)


class MatchingRuns(NamedTuple):
    """The DAGs that match, and their schedules if times matter. Indexes order times within each. `caused_ids`: the schedules
    with runs triggered by an asset, if only such runs are wanted."""

    dag_ids: list[int]
    schedule_ids: Sequence[int] = ()
    caused_ids: list[int] | None = None


async def list_runs(conn: AsyncConnection, wanted: RunFilter, asked: PageRequest) -> tuple[list[ListedRun], int]:
    """One page, and the total, up to `MOST_COUNTED`. Oldest first by default."""
    within = await _matching(conn, wanted, asked.order)
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
            await all_rows(conn, sql("listings", "runs_by_number"), {"run_ids": run_ids}, ListedRun) if run_ids else []
        )
        if len(found) == len(run_ids):
            break
    return found, total


def _may_be_rare(wanted: RunFilter, order: Order) -> bool:
    """Whether to fetch all matches and sort them: an index in the requested order might be read to its end for a few. States have
    indexes in the order of runs."""
    is_asked = any(getattr(wanted, name) is not None for name in _SELECTIVE)
    return is_asked or (wanted.states is not None and not is_by_key(order))


async def _matching(conn: AsyncConnection, wanted: RunFilter, order: Order) -> MatchingRuns:
    dag_ids = await dags_of(conn, asdict(wanted))
    is_asked = bool(wanted.due or wanted.fire) or bool(order and order[0][0] in ("due_at", "fire_at"))
    schedule_ids = await _numbers(conn, sql("listings", "schedules_of"), {"within": dag_ids}) if is_asked else []
    is_after_asset = wanted.types is not None and set(wanted.types) == {"asset_triggered"}
    caused_ids = await _numbers(conn, sql("listings", "schedules_with_causes"), {}) if is_after_asset else None
    return MatchingRuns(dag_ids, schedule_ids, caused_ids)


def question_of_runs(wanted: RunFilter, asked: PageRequest, within: MatchingRuns, *, is_few: bool = False) -> Question:
    """`is_few`: fetch all matches before sorting them."""
    meant = {"within": within.dag_ids, "schedules": list(within.schedule_ids), "causes": within.caused_ids}
    params = {**asdict(wanted), **_bounds_of(wanted), **meant, "names": Jsonb(wanted.names)}
    statement = sql("listings", "runs")
    page = sql("listings", "page_of_few") if is_few else served_page(asked.order)
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


_SERVED_PAGES = {
    "dag": sql("listings", "page_by_dag"),
    "text_id": sql("listings", "page_by_text"),
    "due_at": sql("listings", "page_by_due"),
    "fire_at": sql("listings", "page_by_fire"),
    "finished_at": sql("listings", "page_by_end"),
    "changed_at": sql("listings", "page_by_change"),
    "started_at": sql("listings", "page_by_start"),
}


def served_page(order: Order) -> LiteralString | None:
    """The page of runs in that order, if an index provides it. Runs with equal values are ordered by id."""
    if not order or list(order[1:]) not in ([], [("run_id", False)]) or order[0] == ("started_at", False):
        return None
    return _SERVED_PAGES.get(order[0][0])


async def dags_of(conn: AsyncConnection, asked: Mapping[str, object]) -> list[int]:
    """The DAGs that pass a filter of runs or of tasks, by its fields."""
    if asked["dag_id"] is not None:
        return [cast(int, asked["dag_id"])]
    params = {name: asked[name] for name in ("dag_ids", "dags", "dag_like", "dag_heads")}
    return await _numbers(conn, sql("listings", "dags_of_runs"), params)


async def numbers_of(conn: AsyncConnection, text_ids: Sequence[str], asked: Mapping[str, object]) -> list[int]:
    """The ids of the runs with these texts, in the DAGs that pass a filter."""
    params = {"within": await dags_of(conn, asked), "text_ids": list(text_ids)}
    return await _numbers(conn, sql("listings", "runs_of_texts"), params)


async def _numbers(conn: AsyncConnection, statement: LiteralString, params: Mapping[str, object]) -> list[int]:
    cursor = await conn.execute(statement, params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


K = TypeVar("K", datetime, Decimal)


def between_instants(
    gte: datetime | None, gt: datetime | None, lte: datetime | None, lt: datetime | None
) -> Range[datetime] | None:
    """None: everything. An instant without a time zone is in UTC."""
    return _between(*(None if each is None else with_zone(each) for each in (gte, gt, lte, lt)))


def between_numbers(gte: float | None, gt: float | None, lte: float | None, lt: float | None) -> Range[Decimal] | None:
    return _between(*(None if each is None else Decimal(repr(each)) for each in (gte, gt, lte, lt)))


def _between(gte: K | None, gt: K | None, lte: K | None, lt: K | None) -> Range[K] | None:
    """The narrower of two bounds on one side applies."""
    if gte is gt is lte is lt is None:
        return None
    is_open_below = gt is not None and (gte is None or gt >= gte)
    is_open_above = lt is not None and (lte is None or lt <= lte)
    lower, upper = (gt if is_open_below else gte), (lt if is_open_above else lte)
    if lower is not None and upper is not None and lower > upper:
        return Range(empty=True)
    return Range(lower, upper, ("(" if is_open_below else "[") + (")" if is_open_above else "]"))
