"""Arguments and options that several commands share, and how their text is read."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.domain.durations import parse_duration
from evertick.domain.errors import NotFound, UserError
from evertick.domain.schedules.misfire import MisfirePolicy

_LARGEST_RUN = 2**63 - 1

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="Show at most so many.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")]
Downstream = Annotated[bool, typer.Option("--downstream", help="Also everything that comes after these tasks.")]
ScheduleName = Annotated[
    str, typer.Argument(metavar="NAME", help="The schedule's name; a DAG's only one is `default`.")
]
ExpectVersion = Annotated[
    int | None,
    typer.Option("--expect-version", min=0, help="Refuse if it is not at this version; 0: it must not exist yet."),
]
CatchUpOption = Annotated[
    MisfirePolicy, typer.Option("--catch-up", help="What of the missed fires runs now: none, the last, or all.")
]
WindowOption = Annotated[
    str | None,
    typer.Option("--window", metavar="LENGTH", help="How far back to catch up, instead of its own window: 3d."),
]
DagName = Annotated[str, typer.Argument(metavar="DAG", help="The DAG's name.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's number, as `evertick runs list` shows it.")]
Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name in that run.")]
Timeout = Annotated[
    str | None, typer.Option("--timeout", metavar="LENGTH", help="Give up waiting after this long: 90, 30s, 5m.")
]


def run_number(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise UserError(f"{text!r} is not a run's number. `evertick runs list` shows them.")
    if len(text) > len(str(_LARGEST_RUN)) or int(text) > _LARGEST_RUN:
        raise NotFound(f"There is no run {text[:40]}. `evertick runs list` shows what there is.")
    return int(text)


def seconds_of(text: str | None, option: str = "--timeout") -> float | None:
    """A length as people type it; a bare number is seconds."""
    if text is None:
        return None
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text).total_seconds()
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}.") from None


def noun(count: int, singular: str) -> str:
    """`1 task`, `3 tasks`."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"
