"""`evertick schedules next`, `explain` and `simulate`: when a schedule fires, what it means, and what a stretch of time holds.

An expression that is not saved needs no database.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated

import typer

from evertick.cli.calendar_picture import calendar_picture
from evertick.cli.clock_words import effect_in_words, note_of, wall
from evertick.cli.dag_page import schedule_document
from evertick.cli.documents import print_json
from evertick.cli.journey import Asked, Party, Traveller, find_party, read_moment, read_range
from evertick.cli.options import Json, noun
from evertick.cli.tables import heading, hint, line, show, state, table
from evertick.domain.durations import relative
from evertick.domain.schedules.cron_text import cron_in_words, rule_in_words
from evertick.domain.schedules.preview import (
    ChangeOutcome,
    DayCount,
    clock_changes,
    count_fires,
    days_between,
    fires_between,
    outcome_of,
)
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe
from evertick.domain.schedules.time_zones import find_zone
from evertick.engine.fire_schedules import fires_of

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Look at this DAG's schedules.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Only this one of the DAG's schedules.")]
CronOption = Annotated[
    str | None, typer.Option("--cron", metavar="EXPR", help="An expression to try: '30 6 * * MON-FRI', '@every 90s'.")
]
EveryOption = Annotated[str | None, typer.Option("--every", metavar="LENGTH", help="An interval to try: 90s, 1h30m.")]
ZoneOption = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Its time zone, such as Europe/Berlin.")]
FromOption = Annotated[
    str | None,
    typer.Option("--from", metavar="TIME", help="From when: 2025-03-30, 2025-03-30T02:30, …Z. Now if left out."),
]
ToOption = Annotated[
    str | None,
    typer.Option("--to", metavar="TIME", help="Until when; a day means all of it. A year later if left out."),
]
Count = Annotated[int, typer.Option("-n", "--count", min=1, max=1000, help="How many fires to show.")]
Most = Annotated[
    int, typer.Option("-n", "--count", min=1, max=100_000, help="How many fires to list; all are counted.")
]

_LONGEST_CALENDAR = 24
_FAR = datetime.max.replace(tzinfo=find_zone("UTC")) - timedelta(days=365)


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
    """Show the next fires of a DAG's schedules, or of an expression that you want to try."""
    party = find_party(Asked(dag=dag, name=name, cron=cron, every=every, tz=tz))
    now = party.now
    told = [(each, _next_of(each, since, now, count)) for each in party.travellers]
    if as_json:
        _print_next(dag, told, party)
        return
    _show_rest(dag, party)
    for each, fires in told:
        _show_head(each)
        if each.row is not None and each.row.error:
            show(state("failed", each.row.error))
        elif each.row is not None and each.row.paused and since is None:
            show(state("paused", "paused: it fires nothing until it is unpaused"))
        elif not fires and each.spec.after:
            show(hint("It waits for other work, not for a time."))
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
    """Say in words what a schedule means, and what happens to it at every change of the clock."""
    party = find_party(Asked(dag=dag, name=name, cron=cron, every=every, tz=tz))
    told = []
    for each in party.travellers:
        first, last = read_range(each.spec.timezone, since, until, party.now)
        told.append((each, first, last, _outcomes(each.spec, first, last)))
    if as_json:
        documents = [
            {**_head(each), **_range(first, last), "clock_changes": [_change_document(out) for out in outcomes]}
            for each, first, last, outcomes in told
        ]
        _print_all(dag, documents, party)
        return
    _show_rest(dag, party)
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
    """Show everything that a schedule fires between two instants: a calendar, the changes of the clock, and a table."""
    party = find_party(Asked(dag=dag, name=name, cron=cron, every=every, tz=tz))
    documents = []
    for each in party.travellers:
        first, last = read_range(each.spec.timezone, since, until, party.now)
        outcomes = _outcomes(each.spec, first, last)
        days = list(days_between(each.spec, first, last))
        fires, total = fires_between(each.spec, first, last, count), count_fires(each.spec, first, last)
        if as_json:
            documents.append(
                {
                    **_head(each),
                    **_range(first, last),
                    "count": total,
                    "fires": [_fire_document(each.spec, fire, outcomes) for fire in fires],
                    "days": [{"day": day.day.isoformat(), "count": day.count} for day in days if day.count],
                    "clock_changes": [_change_document(out) for out in outcomes],
                }
            )
            continue
        _show_head(each)
        show(line(f"{noun(total, 'fire')} from {wall(first, each.spec)} to {wall(last, each.spec)}", "bold"))
        _show_calendar(each.spec, days, outcomes)
        _show_changes(each.spec, first, last, outcomes)
        if fires:
            show(heading("Fires"))
            _show_fires(each.spec, fires, party.now, outcomes)
        if total > len(fires):
            show(hint(f"and {total - len(fires):,} more; see more with --count"))
    if as_json:
        _print_all(dag, documents, party)
    else:
        _show_rest(dag, party)


def _next_of(each: Traveller, since: str | None, now: datetime, count: int) -> list[datetime]:
    """A saved schedule goes on from where it stands, unless another beginning is asked for."""
    if since is None and each.row is not None:
        return fires_of(each.row, count)
    after = now + timedelta(microseconds=1) if since is None else read_moment("--from", since, each.spec.timezone)
    return fires_between(each.spec, after, _FAR, count)


def _show_rest(dag: str | None, party: Party) -> None:
    """What there is to say besides the schedules that can be looked at."""
    if not party.travellers and not party.unreadable:
        show(hint(f"{dag} has no schedule: it runs by hand, with `evertick dags trigger {dag}`."))
    for row in party.unreadable:
        show(heading(row.name), state("failed", f"cannot be read: {row.error or 'publish a corrected one'}"))


def _print_all(dag: str | None, documents: list[dict[str, object]], party: Party) -> None:
    rest = [{"name": row.name, "error": row.error or "cannot be read"} for row in party.unreadable]
    print_json({"dag": dag, "schedules": [*documents, *rest]} if dag is not None else documents[0])


def _print_next(dag: str | None, told: Sequence[tuple[Traveller, list[datetime]]], party: Party) -> None:
    if dag is not None:
        rows = [schedule_document(each.row, fires) for each, fires in told if each.row is not None]
        print_json({"dag": dag, "schedules": [*rows, *(schedule_document(row, []) for row in party.unreadable)]})
    else:
        (each, fires), *_ = told
        print_json({"schedule": describe(each.spec), "next_fires": fires})


def _outcomes(spec: ScheduleSpec, first: datetime, last: datetime) -> list[ChangeOutcome]:
    return [outcome_of(spec, change) for change in clock_changes(spec.timezone, first, last)]


def _show_head(each: Traveller) -> None:
    if each.name is not None:
        show(heading(each.name))
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


def _show_calendar(spec: ScheduleSpec, days: list[DayCount], outcomes: list[ChangeOutcome]) -> None:
    months = sorted({(each.day.year, each.day.month) for each in days})
    kept = set(months[:_LONGEST_CALENDAR])
    shown = [each for each in days if (each.day.year, each.day.month) in kept]
    forward = {out.change.wall_before.date() for out in outcomes if out.change.is_gap}
    back = {out.change.wall_before.date() for out in outcomes if not out.change.is_gap}
    show(line(""), *calendar_picture(shown, forward=forward, back=back))
    if len(months) > len(kept):
        show(hint(f"and {noun(len(months) - len(kept), 'month')} more; look at a part with --from and --to"))


def _show_changes(spec: ScheduleSpec, first: datetime, last: datetime, outcomes: list[ChangeOutcome]) -> None:
    show(heading("Changes of the clock"))
    if not outcomes:
        show(hint(f"None in {spec.timezone} from {wall(first, spec)} to {wall(last, spec)}."))
        return
    rows = [
        [
            f"{out.change.wall_before:%Y-%m-%d %H:%M}",
            f"{out.change.wall_after:%Y-%m-%d %H:%M}",
            effect_in_words(spec, out),
        ]
        for out in outcomes
    ]
    show(table(("AT", "BECOMES", "WHAT HAPPENS"), rows))


def _meaning(spec: ScheduleSpec) -> str:
    words = cron_in_words(spec.cron) if spec.kind is ScheduleKind.CRON else describe(spec)
    return f"{words[0].upper()}{words[1:]}."


def _head(each: Traveller) -> dict[str, object]:
    named: dict[str, object] = {} if each.name is None else {"name": each.name}
    return {**named, "schedule": describe(each.spec), "in_words": _meaning(each.spec), "timezone": each.spec.timezone}


def _range(first: datetime, last: datetime) -> dict[str, object]:
    return {"from": first, "to": last}


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
    """With the offset, so that a change of the clocks is seen; with fractions only where there are some."""
    return instant.isoformat(sep=" ", timespec="milliseconds" if instant.microsecond else "seconds")
