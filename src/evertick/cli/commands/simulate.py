"""`evertick schedules next`, `explain` and `simulate`: when a schedule fires, its meaning, and its fires in a time range.

An expression that is not saved needs no database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import groupby, pairwise
from typing import Annotated, assert_never

import typer
from rich.text import Text

from evertick.cli.dag_view import schedule_document
from evertick.cli.options import CronOption, DagFilter, EveryOption, Json, ZoneOption, noun, read_moment
from evertick.cli.output import heading, hint, iso, line, print_json, show, state, table
from evertick.client.connect import read_pages
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules import preview
from evertick.domain.schedules.cron_text import cron_in_words, rule_in_words
from evertick.domain.schedules.preview import ChangeEffect, ChangeOutcome, DayCount
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe, parse_schedule
from evertick.domain.schedules.time_zones import find_zone
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.operations.paging import MOST_LISTED
from evertick.operations.schedules import Schedule, list_schedules, upcoming_fires

NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Only this one of the DAG's schedules.")]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="Start: 2025-03-30, 2025-03-30T02:30, …Z; by default now.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="End, with all of a day; by default one year later.")
]
Count = Annotated[int, typer.Option("-n", "--count", min=1, max=1000, help="How many fires to show.")]
Most = Annotated[
    int, typer.Option("-n", "--count", min=1, max=100_000, help="How many fires to list; all are counted.")
]

_LONGEST_CALENDAR = 24
_FAR = datetime.max.replace(tzinfo=find_zone("UTC")) - timedelta(days=365)
_LONGEST_RANGE = timedelta(days=36_525)
_INDENT = 9
_LEGEND = "· none  1-9 fires  # more  > clock put forward  < clock put back  x a day that does not exist"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCase:
    """A schedule to examine. `row` is set for a saved schedule."""

    spec: ScheduleSpec
    row: Schedule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCases:
    """The schedules, and the saved ones that cannot be read. `now` is the time of the database or the server, or of this
    machine for an expression."""

    cases: Sequence[ScheduleCase]
    unreadable: Sequence[Schedule]
    now: datetime


def find_cases(dag: str | None, name: str | None, cron: str | None, every: str | None, tz: str | None) -> ScheduleCases:
    """The schedules of a DAG, one of them, or an expression."""
    if [dag, cron, every].count(None) != 2:
        raise UserError("Name a DAG, or give an expression with --cron, or a duration with --every: one of them.")
    if dag is None:
        if name is not None:
            raise UserError("--name selects one of a DAG's schedules: name the DAG, too.")
        alone = ScheduleCase(spec=parse_schedule(cron if cron is not None else f"@every {every}", timezone=tz))
        return ScheduleCases(cases=[alone], unreadable=[], now=datetime.now(UTC))
    if tz is not None:
        raise UserError("--tz goes with --cron and --every: a DAG's schedules have their own time zones.")
    listed, now = read_pages(list_schedules, MOST_LISTED, dag=dag)
    found = [each for each in listed if name in (None, each.name)]
    if name is not None and not found:
        names = ", ".join(each.name for each in listed) or "none"
        raise UserError(f"{dag} has no schedule {name!r}. It has: {names}.")
    cases, unreadable = list[ScheduleCase](), list[Schedule]()
    for row in found:
        try:
            cases.append(ScheduleCase(spec=read_spec(row.spec), row=row))
        except UNPLANNABLE:
            unreadable.append(row)
    return ScheduleCases(cases=cases, unreadable=unreadable, now=now)


def read_range(zone: str, since: str | None, until: str | None, now: datetime) -> tuple[datetime, datetime]:
    """The first and last instant; by default one year from now. A day as the end includes all of it."""
    first = now if since is None else read_moment("--from", since, zone)
    last = first + timedelta(days=365) - timedelta(microseconds=1)
    if until is not None:
        last = read_moment("--to", until, zone, is_end=True)
    if last < first:
        raise UserError(f"--to {until} is before --from {since or 'now'}: swap them.")
    if last - first > _LONGEST_RANGE:
        raise UserError("The range from --from to --to is longer than 100 years.")
    return first, last


def next_fires(
    dag: DagFilter = None,
    name: NameOption = None,
    cron: CronOption = None,
    every: EveryOption = None,
    tz: ZoneOption = None,
    since: FromOption = None,
    count: Count = 5,
    as_json: Json = False,
) -> None:
    """Show the next fires of a DAG's schedules, or of an expression."""
    found = find_cases(dag, name, cron, every, tz)
    now = found.now
    told = [(each, _next_of(each, since, now, count)) for each in found.cases]
    if as_json:
        return _print_next(dag, told, found)
    _show_rest(dag, found)
    for each, fires in told:
        _show_head(each)
        if each.row is not None and each.row.error:
            show(state("failed", each.row.error))
        elif each.row is not None and each.row.is_paused and since is None:
            show(state("paused", "paused: it does not fire until it is unpaused"))
        elif not fires and (each.spec.after or each.spec.event):
            show(hint("It waits for other DAGs, assets or events, not for a time."))
        elif not fires:
            show(hint("It has ended: no fire is left."))
        else:
            _show_fires(each.spec, fires, now, _outcomes(each.spec, fires[0] - timedelta(days=1), fires[-1]))


def explain(
    dag: DagFilter = None,
    name: NameOption = None,
    cron: CronOption = None,
    every: EveryOption = None,
    tz: ZoneOption = None,
    since: FromOption = None,
    until: ToOption = None,
    as_json: Json = False,
) -> None:
    """Describe a schedule in words, with the effect of every clock change."""
    found = find_cases(dag, name, cron, every, tz)
    told = []
    for each in found.cases:
        first, last = read_range(each.spec.timezone, since, until, found.now)
        told.append((each, first, last, _outcomes(each.spec, first, last)))
    if as_json:
        documents = [
            {**_head(each), "from": first, "to": last, "clock_changes": [_change_document(out) for out in outcomes]}
            for each, first, last, outcomes in told
        ]
        _print_all(dag, documents, found)
        return
    _show_rest(dag, found)
    for each, first, last, outcomes in told:
        _show_head(each)
        show(line(_meaning(each.spec)))
        if each.spec.kind is ScheduleKind.CRON:
            show(hint(rule_in_words(each.spec.cron)))
        _show_changes(each.spec, first, last, outcomes)


def simulate(
    dag: DagFilter = None,
    name: NameOption = None,
    cron: CronOption = None,
    every: EveryOption = None,
    tz: ZoneOption = None,
    since: FromOption = None,
    until: ToOption = None,
    count: Most = 20,
    as_json: Json = False,
) -> None:
    """Show all fires of a schedule between two instants: a calendar, the clock changes, and a table."""
    found = find_cases(dag, name, cron, every, tz)
    documents = []
    for each in found.cases:
        first, last = read_range(each.spec.timezone, since, until, found.now)
        outcomes = _outcomes(each.spec, first, last)
        days = list(preview.days_between(each.spec, first, last))
        fires, total = preview.fires_between(each.spec, first, last, count), preview.count_fires(each.spec, first, last)
        if as_json:
            documents.append(
                {
                    **_head(each),
                    "from": first,
                    "to": last,
                    "count": total,
                    "fires": [_fire_document(each.spec, fire, outcomes) for fire in fires],
                    "days": [{"day": day.day.isoformat(), "count": day.count} for day in days if day.count],
                    "clock_changes": [_change_document(out) for out in outcomes],
                }
            )
            continue
        _show_head(each)
        show(line(f"{noun(total, 'fire')} from {wall(first, each.spec)} to {wall(last, each.spec)}", "bold"))
        _show_calendar(days, outcomes)
        _show_changes(each.spec, first, last, outcomes)
        if fires:
            show(heading("Fires"))
            _show_fires(each.spec, fires, found.now, outcomes)
        if total > len(fires):
            show(hint(f"and {total - len(fires):,} more; see more with --count"))
    if as_json:
        _print_all(dag, documents, found)
    else:
        _show_rest(dag, found)


def _next_of(each: ScheduleCase, since: str | None, now: datetime, count: int) -> list[datetime]:
    """The next fires: of a saved schedule from its cursor, unless --from is given."""
    if since is None and each.row is not None:
        return upcoming_fires(each.row, count)
    after = now + timedelta(microseconds=1) if since is None else read_moment("--from", since, each.spec.timezone)
    return preview.fires_between(each.spec, after, _FAR, count)


def _show_rest(dag: str | None, found: ScheduleCases) -> None:
    """A note about schedules that are missing or cannot be read."""
    if not found.cases and not found.unreadable:
        show(hint(f"{dag} has no schedule. Start it with `evertick dags trigger {dag}`."))
    for row in found.unreadable:
        show(heading(row.name), state("failed", f"cannot be read: {row.error or 'publish a corrected one'}"))


def _print_all(dag: str | None, documents: list[dict[str, object]], found: ScheduleCases) -> None:
    rest = [{"name": row.name, "error": row.error or "cannot be read"} for row in found.unreadable]
    print_json({"dag": dag, "schedules": [*documents, *rest]} if dag is not None else documents[0])


def _print_next(dag: str | None, told: Sequence[tuple[ScheduleCase, list[datetime]]], found: ScheduleCases) -> None:
    if dag is None:
        (each, fires), *_ = told
        return print_json({"schedule": describe(each.spec), "next_fires": fires})
    rows = [schedule_document(each.row, fires) for each, fires in told if each.row is not None]
    print_json({"dag": dag, "schedules": [*rows, *(schedule_document(row, []) for row in found.unreadable)]})


def _outcomes(spec: ScheduleSpec, first: datetime, last: datetime) -> list[ChangeOutcome]:
    return [preview.outcome_of(spec, change) for change in preview.clock_changes(spec.timezone, first, last)]


def _show_head(each: ScheduleCase) -> None:
    if each.row is not None:
        show(heading(each.row.name))
    show(hint(describe(each.spec)))


def _show_fires(spec: ScheduleSpec, fires: list[datetime], now: datetime, outcomes: list[ChangeOutcome]) -> None:
    zone = find_zone(spec.timezone)
    notes = [note_of(spec, fire, outcomes) for fire in fires]
    columns = [spec.timezone if spec.timezone != "UTC" else "LOCAL (UTC)", "UTC", "WHEN"]
    rows = [[_iso(fire.astimezone(zone)), _iso(fire), relative(fire, now)] for fire in fires]
    if any(notes):
        columns.append("CLOCK CHANGE")
        rows = [[*row, note or ""] for row, note in zip(rows, notes, strict=True)]
    show(table(columns, rows))


def _show_calendar(days: list[DayCount], outcomes: list[ChangeOutcome]) -> None:
    months = sorted({(each.day.year, each.day.month) for each in days})
    kept = set(months[:_LONGEST_CALENDAR])
    shown = [each for each in days if (each.day.year, each.day.month) in kept]
    forward = {out.change.wall_before.date() for out in outcomes if out.change.is_gap}
    back = {out.change.wall_before.date() for out in outcomes if not out.change.is_gap}
    show(line(""), *calendar_picture(shown, forward=forward, back=back))
    if len(months) > len(kept):
        show(hint(f"and {noun(len(months) - len(kept), 'month')} more; select a part with --from and --to"))


def _show_changes(spec: ScheduleSpec, first: datetime, last: datetime, outcomes: list[ChangeOutcome]) -> None:
    show(heading("Clock changes"))
    if not outcomes:
        return show(hint(f"None in {spec.timezone} from {wall(first, spec)} to {wall(last, spec)}."))
    form = "%Y-%m-%d %H:%M"
    rows = [
        [out.change.wall_before.strftime(form), out.change.wall_after.strftime(form), effect_in_words(spec, out)]
        for out in outcomes
    ]
    show(table(("AT", "BECOMES", "EFFECT"), rows))


def _meaning(spec: ScheduleSpec) -> str:
    words = cron_in_words(spec.cron) if spec.kind is ScheduleKind.CRON else describe(spec)
    return f"{words[0].upper()}{words[1:]}."


def _head(each: ScheduleCase) -> dict[str, object]:
    named = {} if each.row is None else {"name": each.row.name}
    return {**named, "schedule": describe(each.spec), "in_words": _meaning(each.spec), "timezone": each.spec.timezone}


def _fire_document(spec: ScheduleSpec, fire: datetime, outcomes: list[ChangeOutcome]) -> dict[str, object]:
    local = fire.astimezone(find_zone(spec.timezone)).isoformat()
    return {"at": fire, "local": local, "clock_change": note_of(spec, fire, outcomes)}


def _change_document(out: ChangeOutcome) -> dict[str, object]:
    return {
        "at": out.change.at,
        "shift_seconds": out.change.shift.total_seconds(),
        "wall_before": out.change.wall_before.isoformat(),
        "wall_after": out.change.wall_after.isoformat(),
        "effect": out.effect,
        "wall_times": [each.isoformat() for each in out.walls],
        "wall_time_count": out.wall_count,
        "fires": list(out.fires),
    }


def _iso(instant: datetime) -> str:
    """With the offset, so that a clock change is visible; with fractions only if there are some."""
    return instant.isoformat(sep=" ", timespec="milliseconds" if instant.microsecond else "seconds")


def effect_in_words(spec: ScheduleSpec, out: ChangeOutcome) -> str:
    """The effect of a clock change on a schedule, and the reason."""
    change = out.change
    kind = "missing" if change.is_gap else "repeated"
    match out.effect:
        case ChangeEffect.REAL_TIME:
            return "nothing: it counts elapsed time, whatever the clock shows"
        case ChangeEffect.NOTHING_DUE:
            return f"nothing: none of its times is among the {kind} ones"
        case ChangeEffect.RUNS_AFTER:
            at = f"{change.at.astimezone(find_zone(spec.timezone)):%H:%M} ({iso(change.at)})"
            return f"{_walls(out)} never happens: it fires once right after the gap, at {at}"
        case ChangeEffect.SKIPPED if spec.cron.fields.is_elapsed:
            return f"{_walls(out)} never happens and does not fire: it keeps real time"
        case ChangeEffect.SKIPPED:
            gap = f"{change.shift.total_seconds() / 3600:g} hours"
            return f"{_walls(out)} never happens and is skipped: the gap of {gap} is longer than 3 hours"
        case ChangeEffect.FIRST_ONLY:
            return f"{_walls(out)} happens twice: it fires at the first, {_fires(out)}"
        case ChangeEffect.BOTH:
            return f"{_walls(out)} happens twice and fires both times, {_fires(out)}: it keeps real time"
    assert_never(out.effect)


def note_of(spec: ScheduleSpec, fire: datetime, outcomes: list[ChangeOutcome]) -> str | None:
    """A note for a fire that is next to a clock change."""
    for out in outcomes:
        change = out.change
        if out.effect is ChangeEffect.RUNS_AFTER and fire == change.at:
            return f"for {_walls(out)}, which never happens"
        if out.effect not in (ChangeEffect.FIRST_ONLY, ChangeEffect.BOTH) or abs(fire - change.at) > -change.shift:
            continue
        if change.at + change.shift <= fire < change.at - change.shift:
            copy = "first" if fire < change.at else "second"
            return f"the {copy} {fire.astimezone(find_zone(spec.timezone)):%H:%M} of that day"
    return None


def wall(instant: datetime, spec: ScheduleSpec) -> str:
    return f"{instant.astimezone(find_zone(spec.timezone)):%Y-%m-%d %H:%M}"


def _walls(out: ChangeOutcome) -> str:
    is_long = abs(out.change.shift) > timedelta(hours=3)
    form = "%Y-%m-%d %H:%M" if is_long else "%H:%M:%S" if any(each.second for each in out.walls) else "%H:%M"
    shown = ", ".join(each.strftime(form) for each in out.walls)
    rest = out.wall_count - len(out.walls)
    return f"{shown} and {rest:,} more" if rest > 0 else shown


def _fires(out: ChangeOutcome) -> str:
    return " and ".join(iso(each) for each in out.fires) if len(out.fires) < 3 else f"from {iso(out.fires[0])} on"


def calendar_picture(days: Iterable[DayCount], *, forward: Collection[date], back: Collection[date]) -> list[Text]:
    """Months as rows, days as columns, the number of fires as a character; a mark follows each day with a clock change."""
    lines = [Text(_ruler(), style="dim")]
    for month, found in groupby(days, key=lambda each: (each.day.year, each.day.month)):
        row = list(found)
        line = Text(f"{month[0]}-{month[1]:02}".ljust(_INDENT))
        line.append("  " * (row[0].day.day - 1))
        for each in row:
            line.append(*_cell(each))
            line.append(*_mark(each.day, forward, back))
        lines.append(line)
    lines.append(Text(_LEGEND, style="dim"))
    return lines


def _ruler() -> str:
    ticks = (1, 5, 10, 15, 20, 25, 30)
    return " " * _INDENT + "".join(str(tick).ljust(2 * (after - tick)) for tick, after in pairwise((*ticks, 31)))


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
