"""Arguments and options that several commands share, how their text is read, and confirmation of a change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import typer

from evertick.domain.dags.params import ParamSpec, parse_param
from evertick.domain.durations import parse_duration
from evertick.domain.errors import InvalidParams, NotFound, UserError
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.time_zones import first_instant

LARGEST_RUN = 2**63 - 1
_LARGEST_INDEX = 2**31 - 1
_MOMENTS = "write 2025-03-30, 2025-03-30T02:30 (in the schedule's zone) or 2025-03-30T01:00:00Z"


def seconds_of(text: str, option: str) -> float:
    """A duration as users write it; a bare number is seconds."""
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text).total_seconds()
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}.") from None


def duration(option: str, help: str) -> Any:
    """An option with a duration; its command receives seconds."""
    return typer.Option(option, metavar="DURATION", parser=lambda text: seconds_of(text, option), help=help)


def number(name: str, largest: int) -> Any:
    """An argument with the number of a run or a backfill."""
    help = f"The {name}'s number, as `evertick {name}s list` shows it."
    return typer.Argument(metavar=name.upper(), parser=lambda text: read_number(text, name, largest), help=help)


def read_number(text: str, name: str = "run", largest: int = LARGEST_RUN) -> int:
    advice = f"List {name}s with `evertick {name}s list`."
    if not text.isdecimal() or not text.isascii():
        raise UserError(f"{text!r} is not a {name}'s number. {advice}")
    if len(text) > len(str(largest)) or int(text) > largest:
        raise NotFound(f"There is no {name} {text[:40]}. {advice}")
    return int(text)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="Maximum number of rows.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect without changing anything.")]
Downstream = Annotated[bool, typer.Option("--downstream", help="Also all downstream tasks.")]
ScheduleName = Annotated[
    str, typer.Argument(metavar="NAME", help="The schedule's name; a DAG's only one is `default`.")
]
ExpectVersion = Annotated[
    int | None,
    typer.Option("--expect-version", min=0, help="Refuse if it is not at this version; 0: it must not exist yet."),
]
CatchUpOption = Annotated[
    MisfirePolicy | None,
    typer.Option(
        "--catch-up",
        help="Which missed fires run now: none, the last, or all. Default: none; of schedules with catchup, all.",
    ),
]
WindowOption = Annotated[float | None, duration("--window", "Maximum age of fires to catch up, as 3d.")]
CronOption = Annotated[
    str | None,
    typer.Option("--cron", metavar="EXPR", help="An expression: '30 6 * * MON-FRI', '@daily', '@every 90s'."),
]
EveryOption = Annotated[str | None, typer.Option("--every", metavar="DURATION", help="An interval: 90s, 1h30m.")]
ZoneOption = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Its time zone, such as Europe/Berlin.")]
ParamOption = Annotated[
    list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="A parameter; repeat for several.")
]
ParamsOption = Annotated[
    str | None,
    typer.Option("--params", metavar="JSON", help="Parameters as one JSON object; --param takes precedence."),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="Idempotency key: the same key never starts a second run.")
]
DagName = Annotated[str, typer.Argument(metavar="DAG", help="The DAG's name.")]
DagFilter = Annotated[str | None, typer.Argument(metavar="DAG", help="Only this DAG.")]
Run = Annotated[int, number("run", LARGEST_RUN)]
Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name in that run.")]
Timeout = Annotated[float | None, duration("--timeout", "Stop waiting after this time: 90, 30s, 5m.")]


def task_instance(text: str) -> tuple[str, int | None]:
    """The task and the map index: `train[3]` is instance 3 of `train`. No index: the task, or all instances of it."""
    name, _, index = text.removesuffix("]").rpartition("[")
    is_instance = name and text.endswith("]") and index.isdecimal() and index.isascii() and int(index) <= _LARGEST_INDEX
    return (name, int(index)) if is_instance else (text, None)


def check_catch_up(policy: MisfirePolicy | None, window_seconds: float | None) -> None:
    if window_seconds is not None and policy in (None, MisfirePolicy.SKIP):
        raise UserError("--window limits what is caught up: add --catch-up latest, or --catch-up all.")


def read_object(text: str | None, option: str = "--params") -> dict[str, object]:
    """An option with a JSON object."""
    if text is None:
        return {}
    advice = f"""Write an object such as {option} '{{"rows": 5}}'."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParams(f"{option} is not JSON: {error}. {advice}") from None
    except RecursionError:
        raise InvalidParams(f"{option} is nested too deeply. {advice}") from None
    if not isinstance(found, dict):
        raise InvalidParams(f"{option} is a JSON {type(found).__name__}, not an object. {advice}")
    return found


def read_pairs(specs: Sequence[ParamSpec], pairs: Sequence[str], option: str = "--param") -> dict[str, object]:
    """Options `name=value`, each value converted to its parameter's type."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidParams(f"{option} {pair!r} needs a name and a value: write {option} name=value.")
        found[name] = parse_param(specs, name, text)
    return found


def noun(count: int, singular: str) -> str:
    """`1 task`, `3 tasks`."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def read_moment(option: str, text: str, zone: str, *, is_end: bool = False) -> datetime:
    """An instant as users write it. Without an offset it is a wall time in the zone: the first copy of a repeated one,
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
    with suppress(ValueError):
        return bool(date.fromisoformat(text.strip()))
    return False


def moment(option: str, help: str, *, is_end: bool = False) -> Any:
    """An option with a time here or an age; its command receives an instant."""
    return typer.Option(option, metavar="TIME", parser=lambda text: _instant(option, text, is_end=is_end), help=help)


def _instant(option: str, text: str, *, is_end: bool) -> datetime:
    """`2025-03-30`, `2025-03-30T02:30` or `2h`: so long ago. With `is_end` a bare day means its end."""
    with suppress(ValueError, OverflowError):
        return datetime.now(UTC) - parse_duration(text)
    with suppress(ValueError, OverflowError):
        days = timedelta(days=1 if is_end and _is_day(text) else 0)
        return (datetime.fromisoformat(text.strip()) + days).astimezone(UTC)
    raise UserError(f"{option} {text!r} is not a time: write 2025-03-30, 2025-03-30T02:30, or an age such as 2h or 7d.")


Tag = Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Only DAGs with this tag.")]
Contains = Annotated[
    str | None, typer.Option("--contains", metavar="TEXT", help="Only DAGs with this text in their name.")
]


# Confirmation ---------------------------------------------------------------------------------------------------------


def confirm(question: str, *, yes: bool) -> None:
    """Return if the answer is yes. Without a terminal the option is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} No terminal for confirmation; use --yes.")
    if not typer.confirm(question):
        typer.echo("Nothing was changed.")
        raise typer.Exit(1)
