"""Durations as text: parsed from `30s`, `1h30m`, `5 minutes`, `250ms` or `PT5M`, exact to the microsecond; and written.

Sizes in bytes as text, too.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import compress

_MICROSECONDS = {
    "w": 604_800_000_000,
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
}


_NAMES = {"w": "week", "d": "day", "h": "hour", "m": "minute"}


_NUMBER = r"(\d{1,12}(?:\.\d{1,12})?)"


# By unit, longest spelling first: "5min" is not "5m" and a rest.
_SPELLINGS = {
    "ms": "milliseconds?|millis|ms",
    "w": "weeks?|w",
    "d": "days?|d",
    "h": "hours?|hrs?|h",
    "m": "minutes?|mins?|m",
    "s": "seconds?|secs?|s",
}


_PLAIN_PART = re.compile(_NUMBER + f"(?:{'|'.join(f'({words})' for words in _SPELLINGS.values())})", re.ASCII)


_PLAIN = re.compile(rf"(?:{_PLAIN_PART.pattern})+", re.ASCII)


_ISO = re.compile(
    rf"P(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=\d)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?", re.ASCII
)


def parse_duration(text: str) -> timedelta:
    """Parse a duration; the `ValueError` for an invalid one says what is wrong."""
    compact = "".join(text.split())
    if iso := _ISO.fullmatch(compact.upper()):
        parts = [(number, unit) for number, unit in zip(iso.groups(), "wdhms", strict=True) if number is not None]
    elif _PLAIN.fullmatch(compact.lower()):
        found = _PLAIN_PART.findall(compact.lower())
        parts = [(number, next(compress(_SPELLINGS, words))) for number, *words in found]
    else:
        parts = []
    if not parts:
        if re.search(r"\d(y|mo)|^P\d+M", compact, re.IGNORECASE):
            raise ValueError("months and years have no fixed length: use a cron instead")
        raise ValueError("write a length such as 30s, 1h30m, 5 minutes, 250ms, PT5M or P1D")
    return timedelta(microseconds=int(sum(Decimal(number) * _MICROSECONDS[unit] for number, unit in parts)))


def describe_duration(length: timedelta) -> str:
    """In words: "5 seconds", "hour", "1 day 12 hours", "0.25 seconds". A single unit of one omits its number."""
    rest = length // timedelta(microseconds=1)
    counts: list[tuple[str, str]] = []
    for unit, name in _NAMES.items():
        count, rest = divmod(rest, _MICROSECONDS[unit])
        if count:
            counts.append((str(count), name))
    if rest:
        counts.append((f"{Decimal(rest) / _MICROSECONDS['s']:f}", "second"))
    if len(counts) == 1 and counts[0][0] == "1":
        return counts[0][1]
    return " ".join(f"{count} {name}" + "s" * (count != "1") for count, name in counts)


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


def size(count: float) -> str:
    """Bytes as `340 B`, `12 KiB`, `1.5 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1023.5 and len(units) > 1:
        count /= 1024
        units.pop(0)
    number = f"{count:.0f}" if count >= 9.95 or units[0] == "B" else f"{count:.1f}".removesuffix(".0")
    return f"{number} {units[0]}"


def _rough(seconds: float) -> str:
    size, unit = next(each for each in _UNITS if seconds >= each[0])
    return f"{int(seconds // size)} {unit}"
