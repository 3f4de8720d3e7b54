"""One page of a list, and the list's total: by an offset, in the requested order.

Reads only what the page needs. An order without an index is refused if too many rows would have to be sorted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, LiteralString, TypeVar, cast

from psycopg import AsyncConnection
from psycopg.sql import SQL, Composed, Identifier

from evertick.domain.errors import UserError

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
class Asked:
    """One page: the offset, the size, the order (columns, True for descending); missing values come last. `is_counted`:
    also return the total."""

    limit: int
    offset: int = 0
    order: Order = ()
    is_counted: bool = True


# No rows of the page: only the total.
COUNT_ONLY = Asked(limit=0)


async def read_page(
    conn: AsyncConnection,
    statement: LiteralString,
    params: Mapping[str, Any],
    asked: Asked,
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


def question(statement: LiteralString, params: Mapping[str, Any], asked: Asked, never_null: frozenset[str]) -> Question:
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
