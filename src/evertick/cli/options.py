"""Arguments and options that several commands share, how their text is read, and the question before a change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

import typer

from evertick.domain.dags.params import ParamSpec, parse_param
from evertick.domain.durations import parse_duration
from evertick.domain.errors import InvalidParams, NotFound, UserError
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.time_zones import first_instant

_LARGEST_RUN = 2**63 - 1
_LARGEST_INDEX = 2**31 - 1
_MOMENTS = "write 2025-03-30, 2025-03-30T02:30 (in the schedule's zone) or 2025-03-30T01:00:00Z"

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
CronOption = Annotated[
    str | None, typer.Option("--cron", metavar="EXPR", help="An expression to try: '30 6 * * MON-FRI', '@every 90s'.")
]
EveryOption = Annotated[str | None, typer.Option("--every", metavar="LENGTH", help="An interval to try: 90s, 1h30m.")]
ZoneOption = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Its time zone, such as Europe/Berlin.")]
ParamOption = Annotated[
    list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="One parameter; repeat it for more.")
]
ParamsOption = Annotated[
    str | None,
    typer.Option("--params", metavar="JSON", help="Parameters as one JSON object; --param takes precedence."),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="Idempotency key: the same key makes a repeated command safe.")
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


def task_instance(text: str) -> tuple[str, int | None]:
    """The task and the map index: `train[3]` is instance 3 of `train`. No index: the task, or all instances of it."""
    name, _, index = text.removesuffix("]").rpartition("[")
    is_instance = name and text.endswith("]") and index.isdecimal() and index.isascii() and int(index) <= _LARGEST_INDEX
    return (name, int(index)) if is_instance else (text, None)


def seconds_of(text: str | None, option: str = "--timeout") -> float | None:
    """A length as people type it; a bare number is seconds."""
    if text is None:
        return None
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text).total_seconds()
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}.") from None


def read_catch_up(policy: MisfirePolicy, window: str | None) -> float | None:
    """How far back an unpause catches up, in seconds."""
    if window is not None and policy is MisfirePolicy.SKIP:
        raise UserError("--window limits what is caught up: add --catch-up latest, or --catch-up all.")
    return seconds_of(window, "--window")


def read_object(text: str | None) -> dict[str, object]:
    """`--params`."""
    if text is None:
        return {}
    advice = """Write an object such as --params '{"rows": 5}'."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParams(f"--params is not JSON: {error}. {advice}") from None
    except RecursionError:
        raise InvalidParams(f"--params is nested too deeply. {advice}") from None
    if not isinstance(found, dict):
        raise InvalidParams(f"--params is a JSON {type(found).__name__}, not an object. {advice}")
    return found


def read_pairs(specs: Sequence[ParamSpec], pairs: Sequence[str]) -> dict[str, object]:
    """`--param name=value`, each value converted to its parameter's type."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidParams(f"--param {pair!r} has no name and value. Write --param name=value.")
        found[name] = parse_param(specs, name, text)
    return found


def noun(count: int, singular: str) -> str:
    """`1 task`, `3 tasks`."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def read_moment(option: str, text: str, zone: str, *, is_end: bool = False) -> datetime:
    """An instant as people write it. Without an offset it is a wall time in the zone: the first copy of a repeated one,
    the first instant after the gap for one that never was. With `is_end` a bare day means its last instant."""
    try:
        moment = datetime.fromisoformat(text.strip())
        if is_end and _is_day(text):
            following = first_instant(zone, moment + timedelta(days=1))
            instant = None if following is None else following - timedelta(microseconds=1)
        else:
            instant = first_instant(zone, moment) if moment.tzinfo is None else moment.astimezone(UTC)
        if instant is None or not 1900 <= instant.year <= 9998:
            raise ValueError
    except (ValueError, OverflowError):
        raise UserError(f"{option} {text!r} is not a date and time from 1900 to 9998: {_MOMENTS}.") from None
    return instant


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


# Questions ------------------------------------------------------------------------------------------------------------


def confirm(question: str, *, yes: bool) -> None:
    """Return if the answer is yes. Without a terminal the option is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} There is no terminal to answer at: add --yes to continue.")
    if not typer.confirm(question):
        typer.echo("Nothing was changed.")
        raise typer.Exit(1)
