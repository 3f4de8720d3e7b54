"""Output for people, with tables, facts and times, and for programs, as one JSON document.

Wide and plain if the output is no terminal. Text from elsewhere is made safe for a terminal on its way into a cell: colours
may stay, all other control characters go.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from evertick.domain.durations import NEVER

Cell: TypeAlias = "str | int | Text | None"

T = TypeVar("T")

# Nothing is cut or folded in a pipe: another program reads it.
_PIPE_WIDTH = 20_000

# Escape sequences whole, so that their letters do not stay behind: CSI, OSC and its kin up to their end, then single ones.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Marks that turn the reading direction of a line, and so make it lie about its content.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")

STATE_STYLES: Mapping[str, str] = {
    "success": "green",
    "failed": "bold red",
    "upstream_failed": "red",
    "canceled": "magenta",
    "skipped": "magenta",
    "running": "bold cyan",
    "queued": "cyan",
    "available": "yellow",
    "pending": "yellow",
    "deferred": "yellow",
    "waiting": "dim",
    "paused": "yellow",
    "broken": "bold red",
}


NAMES = {"DAG", "TASK", "NAME", "USER", "RUNNER", "QUEUE"}


def console() -> Console:
    """The standard output of this moment."""
    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)


def show(*parts: RenderableType) -> None:
    """Print, without blanks at the ends of lines where the output is no terminal."""
    out = console()
    for part in parts:
        if out.is_terminal:
            out.print(part)
            continue
        with out.capture() as captured:
            out.print(part)
        out.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    out.file.flush()


def state(name: str, shown: str | None = None) -> Text:
    return line(shown or name, STATE_STYLES.get(name, ""))


def line(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style)


def hint(text: str) -> Text:
    """What to do next."""
    return line(text, "dim")


def heading(text: str) -> Text:
    return line(f"\n{text}", "bold")


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A column whose title starts with `#` holds numbers, and is shown without that sign."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        is_number = column.startswith("#")
        # A name stays whole, so that it can be copied; other columns share what is left.
        is_name = not is_number and column in NAMES
        name = column.removeprefix("#")
        made.add_column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_name)
    for row in rows:
        made.add_row(*(_cell(one_line(each) if isinstance(each, str) else each) for each in row))
    return made


def show_list(
    name: str,
    found: Sequence[T],
    columns: Sequence[str],
    cells: Callable[[T], Sequence[Cell]],
    *,
    as_json: bool,
    empty: str,
    to_json: Callable[[T], object] = lambda each: each,
) -> None:
    """A JSON document with the list under its name, or a table, or a hint if the list is empty."""
    if as_json:
        print_json({name: [to_json(each) for each in found]})
    elif found:
        show(table(columns, map(cells, found)))
    else:
        show(hint(empty))


def facts(rows: Mapping[str, Cell]) -> Table:
    """Names and values, one per line; what is None is left out."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            made.add_row(name, _cell(value))
    return made


def _cell(value: Cell) -> Text:
    return value if isinstance(value, Text) else line("-" if value is None else str(value))


# Text from elsewhere -------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Without any control but newline and tab."""
    return _DIRECTION.sub("", _CONTROL.sub("", _SEQUENCE.sub("", text)))


def coloured(text: str) -> str:
    """Like `plain`, but colours stay, and end where the text ends."""
    if "\x1b" not in text:
        return plain(text)
    parts = []
    start = 0
    for colour in _COLOUR.finditer(text):
        parts += [plain(text[start : colour.start()]), colour[0]]
        start = colour.end()
    return "".join([*parts, plain(text[start:])]) + ("\x1b[0m" if parts else "")


def one_line(text: str) -> str:
    return " ".join(plain(text).split())


# JSON -----------------------------------------------------------------------------------------------------------------


def print_json(document: object) -> None:
    """ASCII only, so that any terminal and any encoding can take it."""
    sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")
    sys.stdout.flush()


def document(record: Any, *, without: Collection[str] = ()) -> dict[str, object]:
    """A record's fields under their own names, except those in `without`."""
    return {name: value for name, value in asdict(record).items() if name not in without}


def iso(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return iso(value)
    if is_dataclass(value) and not isinstance(value, type):
        return document(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON document")


# Times ----------------------------------------------------------------------------------------------------------------


def clock(instant: datetime | None) -> str:
    """The date and time in the time zone of this terminal (TZ), to the second, with the zone."""
    return NEVER if instant is None else f"{instant.astimezone():%Y-%m-%d %H:%M:%S %Z}"
