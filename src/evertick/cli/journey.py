"""What `evertick schedules next`, `explain` and `simulate` look at: schedules, saved or only tried, and a stretch of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from psycopg import AsyncConnection

from evertick.cli import far_plans
from evertick.cli.connection import ask
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.errors import UserError
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.domain.schedules.time_zones import first_instant
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.engine.runs import find_dag_row

LONGEST_RANGE = timedelta(days=36_525)
_EXAMPLE = "write 2025-03-30, 2025-03-30T02:30 (in the schedule's zone) or 2025-03-30T01:00:00Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traveller:
    """A schedule to look at. `row` is where a saved one stands."""

    spec: ScheduleSpec
    name: str | None = None
    row: ListedSchedule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How somebody named what to look at: a DAG, perhaps one of its schedules, or an expression."""

    dag: str | None
    name: str | None = None
    cron: str | None = None
    every: str | None = None
    tz: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """The schedules, those that cannot be read, and what time it is: the database's for saved ones, this machine's for an
    expression."""

    travellers: Sequence[Traveller]
    unreadable: Sequence[ListedSchedule]
    now: datetime


def find_party(asked: Asked) -> Party:
    if len([each for each in (asked.dag, asked.cron, asked.every) if each is not None]) != 1:
        raise UserError("Name a DAG, or give an expression with --cron, or a length with --every: one of them.")
    if asked.dag is None:
        if asked.name is not None:
            raise UserError("--name picks one of a DAG's schedules: name the DAG, too.")
        text = asked.cron if asked.cron is not None else f"@every {asked.every}"
        alone = Traveller(spec=parse_schedule(text, timezone=asked.tz))
        return Party(travellers=[alone], unreadable=[], now=datetime.now(UTC))
    if asked.tz is not None:
        raise UserError("--tz goes with --cron and --every: a DAG's schedules have their own time zones.")
    dag = asked.dag
    found, now = ask(lambda conn: _of_dag(conn, dag), far=lambda server: far_plans.schedules_of(server, dag))
    if asked.name is not None:
        names = ", ".join(each.name for each in found) or "none"
        found = [each for each in found if each.name == asked.name]
        if not found:
            raise UserError(f"{asked.dag} has no schedule {asked.name!r}. It has: {names}.")
    read = [(each, _traveller(each)) for each in found]
    return Party(
        travellers=[traveller for _, traveller in read if traveller is not None],
        unreadable=[each for each, traveller in read if traveller is None],
        now=now,
    )


async def _of_dag(conn: AsyncConnection, dag: str) -> list[ListedSchedule]:
    await find_dag_row(conn, dag)
    return await schedules.list_all(conn, dag=dag)


def _traveller(row: ListedSchedule) -> Traveller | None:
    try:
        return Traveller(spec=read_spec(row.spec), name=row.name, row=row)
    except UNPLANNABLE:
        return None


def read_range(zone: str, since: str | None, until: str | None, now: datetime) -> tuple[datetime, datetime]:
    """From when to when, with both: a year from now unless told. A day as the end is meant with all of it."""
    first = now if since is None else read_moment("--from", since, zone)
    last = _end_of_year(first) if until is None else read_moment("--to", until, zone, is_end=True)
    if last < first:
        raise UserError(f"--to {until} is before --from {since or 'now'}: swap them.")
    if last - first > LONGEST_RANGE:
        raise UserError("From --from to --to it may be at most 100 years: look at a part of it.")
    return first, last


def _end_of_year(first: datetime) -> datetime:
    return first + timedelta(days=365) - timedelta(microseconds=1)


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
        raise UserError(f"{option} {text!r} is not a date and time from 1900 to 9998: {_EXAMPLE}.") from None
    return instant


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text.strip())
    except ValueError:
        return False
    return True
