"""Months as rows, days as columns, how often a schedule fires as a character: a year on one screen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import date
from itertools import groupby

from rich.text import Text

from evertick.domain.schedules.preview import DayCount

_INDENT = 9
LEGEND = "· none  1-9 fires  # more  > clock put forward  < clock put back  x a day that never was"


def calendar_picture(days: Iterable[DayCount], *, forward: Collection[date], back: Collection[date]) -> list[Text]:
    """One line per month, with a mark after each day on which the clock is changed."""
    lines = [Text(_ruler(), style="dim")]
    for month, found in groupby(days, key=lambda each: (each.day.year, each.day.month)):
        row = list(found)
        line = Text(f"{month[0]}-{month[1]:02}".ljust(_INDENT))
        line.append("  " * (row[0].day.day - 1))
        for each in row:
            line.append(*_cell(each))
            line.append(*_mark(each.day, forward, back))
        lines.append(line)
    lines.append(Text(LEGEND, style="dim"))
    return lines


def _ruler() -> str:
    ticks: Sequence[int] = (1, 5, 10, 15, 20, 25, 30)
    line = " " * (_INDENT + 62)
    for tick in ticks:
        place = _INDENT + 2 * (tick - 1)
        line = line[:place] + str(tick) + line[place + len(str(tick)) :]
    return line.rstrip()


def _cell(day: DayCount) -> tuple[str, str]:
    if day.is_missing:
        return "x", "bold red"
    if day.count == 0:
        return "·", "dim"
    return (str(day.count), "green") if day.count < 10 else ("#", "bold green")


def _mark(day: date, forward: Collection[date], back: Collection[date]) -> tuple[str, str]:
    if day in forward:
        return ">", "bold yellow"
    return ("<", "bold yellow") if day in back else (" ", "")
