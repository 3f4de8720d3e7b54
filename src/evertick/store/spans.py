"""Ranges of time or of numbers: one value from four optional bounds."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeVar

from psycopg.types.range import Range

T = TypeVar("T", datetime, Decimal)


def between_instants(
    gte: datetime | None, gt: datetime | None, lte: datetime | None, lt: datetime | None
) -> Range[datetime] | None:
    """None: everything. An instant without a time zone is in UTC."""
    return _between(*(None if each is None else _aware(each) for each in (gte, gt, lte, lt)))


def between_numbers(gte: float | None, gt: float | None, lte: float | None, lt: float | None) -> Range[Decimal] | None:
    return _between(*(None if each is None else Decimal(repr(each)) for each in (gte, gt, lte, lt)))


def _between(gte: T | None, gt: T | None, lte: T | None, lt: T | None) -> Range[T] | None:
    """The narrower of two bounds on one side applies."""
    if gte is gt is lte is lt is None:
        return None
    is_open_below = gt is not None and (gte is None or gt >= gte)
    is_open_above = lt is not None and (lte is None or lt <= lte)
    lower, upper = (gt if is_open_below else gte), (lt if is_open_above else lte)
    if lower is not None and upper is not None and lower > upper:
        return Range(empty=True)
    return Range(lower, upper, ("(" if is_open_below else "[") + (")" if is_open_above else "]"))


def _aware(instant: datetime) -> datetime:
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
