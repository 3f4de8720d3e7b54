"""One page of a list, and how long the list is: by an offset, in the order that somebody asks for.

Reads what the page needs and no more. An order that no index knows is refused where too much would have to be sorted for it.
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

# A total is counted so far and no further: counting must not read a million rows for a page of fifty.
MOST_COUNTED = 10_000
# So many are sorted for a page where no index knows the order. A million runs took a second.
MOST_SORTED = 50_000
# An index is read backwards only for columns of which nothing is said about nulls.
NEVER_NULL = frozenset({"run_id", "idx", "map_index", "dag", "entry_id"})
_KEYS = frozenset({"run_id", "entry_id", "occurred_at"})
_ORDER = "/* order */"
# How a condition begins that is true where nothing is asked of it.
_IF_ASKED = re.compile(r"\(%\((\w+)\)s::\w+(?:\[\])? is (null|not true)\s+or\b")
_NULLS_LAST: dict[bool, LiteralString] = {True: "{} desc nulls last, ", False: "{} nulls last, "}

Order = Sequence[tuple[str, bool]]
Question = tuple[Composed, dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One page: from where, how many, in which order (columns, True for descending); what has no value comes last. `is_counted`:
    also how many there are in all."""

    limit: int
    offset: int = 0
    order: Order = ()
    is_counted: bool = True


# Nothing of the page: only how many there are.
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
    """One page and a total, of a statement that says where its order goes. `is_small`: what fits is never too much to sort."""
    if not (is_small or is_by_key(asked.order)):
        await refuse_endless(conn, question(statement, params, COUNT_ONLY, never_null))
    return await answer(conn, question(statement, params, asked, never_null), record)


def is_by_key(order: Order) -> bool:
    """Whether rows are read in that order one after the other."""
    return not order or order[0][0] in _KEYS


async def count(conn: AsyncConnection, asked: Question, most: int) -> int:
    """How many there are, so far and no further. The question is for no page (COUNT_ONLY)."""
    statement, params = asked
    cursor = await conn.execute(statement, {**params, "most": most}, prepare=False)
    rows = await cursor.fetchall()
    return cast(int, rows[0][0])


async def refuse_endless(conn: AsyncConnection, asked: Question) -> None:
    """No index knows the order that is wanted, so that all that fits would have to be read and sorted for one page."""
    if await count(conn, asked, MOST_SORTED + 1) > MOST_SORTED:
        raise UserError(
            f"More than {MOST_SORTED:,} fit, too many to put in this order. Narrow the list with a filter, or order it by id."
        )


def question(statement: LiteralString, params: Mapping[str, Any], asked: Asked, never_null: frozenset[str]) -> Question:
    most = MOST_COUNTED if asked.is_counted else 0
    unasked = frozenset(name for name, each in params.items() if each is None)
    statement = only_asked(statement, unasked, frozenset(name for name, each in params.items() if each is False))
    page = {"limit": asked.limit, "offset": asked.offset, "reach": asked.limit + asked.offset, "most": most}
    return _in_order(statement, asked.order, never_null), {**params, **page}


async def answer(conn: AsyncConnection, asked: Question, record: Callable[..., T]) -> tuple[list[T], int]:
    """Never prepared: a plan for all filters at once would be right for none of them."""
    cursor = await conn.execute(*asked, prepare=False)
    rows = await cursor.fetchall()
    # A page behind the last one is a single row that has only the total.
    return [record(*row[1:]) for row in rows if row[1] is not None], cast(int, rows[0][0])


@lru_cache(maxsize=256)
def only_asked(statement: LiteralString, unasked: frozenset[str], untrue: frozenset[str]) -> LiteralString:
    """The statement without its conditions on parameters of which nothing is asked: there are dozens, all true, and to read them
    takes the server up to half of the time of a list. `untrue`: those that are false, which is something else than nothing."""
    kept: list[LiteralString] = []
    at = 0
    for found in _IF_ASKED.finditer(statement):
        is_true = found[1] in unasked or (found[2] == "not true" and found[1] in untrue)
        if is_true and found.start() >= at:
            kept += [statement[at : found.start()], "true"]
            at = _closing(statement, found.start()) + 1
    return "".join([*kept, statement[at:]])


def _closing(statement: str, opening: int) -> int:
    """Where the parenthesis ends that opens there."""
    depth = 0
    for place in range(opening, len(statement)):
        depth += (statement[place] == "(") - (statement[place] == ")")
        if not depth:
            return place
    raise ValueError(f"a parenthesis is not closed: {statement[opening : opening + 40]}")


def _in_order(statement: LiteralString, order: Order, never_null: frozenset[str]) -> Composed:
    """The statement with the columns put where it says so, before its own, which break ties."""
    head, _, tail = statement.partition(_ORDER)
    parts = [
        SQL(("{} desc, " if is_down else "{}, ") if column in never_null else _NULLS_LAST[is_down]).format(
            Identifier(column)
        )
        for column, is_down in order
    ]
    return Composed([SQL(head), *parts, SQL(tail)] if tail else [SQL(head)])
