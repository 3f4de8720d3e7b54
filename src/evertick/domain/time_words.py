"""Durations and distances from now in readable form. Takes `now` as an argument: it is the database's."""

from __future__ import annotations

from datetime import datetime

NEVER = "-"
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def relative(instant: datetime | None, now: datetime) -> str:
    """`12 s ago`, `in 5 min`, `now`."""
    if instant is None:
        return NEVER
    seconds = (instant - now).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {_rough(seconds)}" if seconds > 0 else f"{_rough(-seconds)} ago"


def took(started_at: datetime | None, finished_at: datetime | None, now: datetime) -> str:
    """How long it took, or has taken until now."""
    if started_at is None:
        return NEVER
    return length(max((finished_at or now).timestamp() - started_at.timestamp(), 0.0))


def length(seconds: float) -> str:
    """`350 ms`, `1.2 s`, `30 s`, `5 min 3 s`, `2 d 4 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    place = next(place for place, (size, _) in enumerate(_UNITS) if whole >= size)
    (size, unit), (next_size, next_unit) = _UNITS[place], _UNITS[place + 1]
    rest = whole % size // next_size
    return f"{whole // size} {unit}" + (f" {rest} {next_unit}" if rest else "")


def _rough(seconds: float) -> str:
    size, unit = next(each for each in _UNITS if seconds >= each[0])
    return f"{int(seconds // size)} {unit}"
