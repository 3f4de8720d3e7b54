"""Schedules on open days: rolled forward, back or left out, the nth open day, and calendars of holidays and files."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evertick import calendar, calendar_from_ics, country, dag, exchange, on_calendar, task
from evertick.domain.errors import InvalidDag, InvalidSchedule
from evertick.domain.schedules.calendars import Calendar, CalendarSchedule, Roll
from evertick.domain.schedules.spec import describe, parse_schedule
from evertick.sdk.timetables import computed_fields, instants

START = datetime(2029, 12, 20, tzinfo=UTC)
FEASTS = calendar("feasts", ["2029-12-25", "2029-12-26", "2030-01-01"])


def days_of(schedule: CalendarSchedule, count: int, zone: str = "UTC", since: datetime = START) -> list[str]:
    found, at = [], since
    for _ in range(count):
        following = schedule.next_after(at, zone)
        assert following is not None and following > at
        at = following
        found.append(at.strftime("%m-%d"))
    return found


def test_a_fire_on_a_closed_day_is_moved_or_left_out() -> None:
    # 20 December is a Thursday; 22 and 23 are a weekend.
    assert days_of(on_calendar("0 9 20-28 12 *", FEASTS), 5) == ["12-20", "12-21", "12-24", "12-27", "12-28"]
    assert days_of(on_calendar("0 9 22,25 12 *", FEASTS, roll="forward"), 2) == ["12-24", "12-27"]
    assert days_of(on_calendar("0 9 23,26 12 *", FEASTS, roll="back"), 2) == ["12-21", "12-24"]


def test_fires_that_are_moved_to_the_same_time_are_one() -> None:
    assert days_of(on_calendar("0 9 22-27 12 *", FEASTS, roll="forward"), 2) == ["12-24", "12-27"]
    assert days_of(on_calendar("0 9 21-26 12 *", FEASTS, roll="back"), 2) == ["12-21", "12-24"]


def test_the_nth_open_day_of_a_month() -> None:
    assert days_of(on_calendar("0 9 * * *", FEASTS, nth=1), 3) == ["01-02", "02-01", "03-01"]
    assert days_of(on_calendar("0 9 * * *", FEASTS, nth=-1), 3) == ["12-31", "01-31", "02-28"]
    assert on_calendar("0 9 * * *", FEASTS, nth=23).next_after(START, "UTC") is not None
    never = calendar("never", ["2030-01-01"], weekend=range(6))
    assert on_calendar("0 9 * * *", never, nth=9).next_after(START, "UTC") is None


def test_a_moved_fire_keeps_the_time_of_the_clock() -> None:
    # Clocks go forward on Sunday 31 March 2030; Saturday is closed, and Monday is in summer time.
    schedule = on_calendar("30 2 30 3 *", FEASTS, roll="forward")
    assert schedule.next_after(START, "Europe/Berlin") == datetime(2030, 4, 1, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize("roll", Roll)
def test_fires_equal_those_of_each_day_by_itself(roll: Roll) -> None:
    dice = random.Random(3)
    for _ in range(40):
        first = START.date()
        closed = {first + timedelta(days=dice.randint(0, 90)) for _ in range(dice.randint(0, 30))}
        there = Calendar(name="x", closed=frozenset(closed))
        planned = sorted(dice.sample(range(1, 29), dice.randint(1, 6)))
        schedule = on_calendar(f"0 12 {','.join(map(str, planned))} * *", there, roll=roll)
        fires = [first + timedelta(days=n) for n in range(-40, 130)]
        expected = {there.roll(day, roll) for day in fires if day.day in planned} - {None}
        wanted = sorted(day for day in expected if day and first < day < first + timedelta(days=80))
        found, at = [], datetime.combine(first, datetime.max.time(), UTC)
        while (following := schedule.next_after(at, "UTC")) is not None and following.date() < first + timedelta(
            days=80
        ):
            found.append(following.date())
            at = following
        assert found == wanted


def test_a_dag_on_a_calendar_has_its_instants_stored_ahead() -> None:
    @task
    def work() -> None: ...

    @dag(schedule=on_calendar("0 9 * * *", FEASTS, roll="forward"), timezone="Europe/Berlin")
    def report() -> None:
        work()

    (schedule,) = report.build().spec.schedules
    assert describe(schedule.spec).startswith(
        "timetable 0 9 * * * on open days of feasts, closed days moved to the next"
    )
    given = on_calendar("0 9 * * *", FEASTS, roll="forward")
    found = instants(given, parse_schedule(computed_fields(given), timezone="Europe/Berlin"), START)
    assert len(found) == 500 and found[0].at == datetime(2029, 12, 20, 8, tzinfo=UTC)
    other = on_calendar("0 9 * * *", calendar("feasts", ["2029-12-24"]), roll="forward")
    assert computed_fields(given) != computed_fields(other), "an edited calendar is another schedule"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"roll": "up"}, "use forward, back, skip"),
        ({"nth": 0}, "use 1 to 23"),
        ({"nth": 1, "roll": "back"}, "leave roll out"),
        ({"calendar": "DE"}, "is not a calendar"),
        ({"calendar": calendar("x", weekend=range(7))}, "must leave a day open"),
        ({"expression": "0 25 * * *"}, "25"),
    ],
)
def test_a_wrong_schedule_says_what_is_wrong(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((InvalidSchedule, InvalidDag), match=problem):
        on_calendar(**{"expression": "0 9 * * *", "calendar": FEASTS, **options})


def test_a_calendar_that_never_opens_is_refused_when_it_is_asked() -> None:
    closed = calendar("shut", [date(2029, 12, 1) + timedelta(days=n) for n in range(60)])
    with pytest.raises(InvalidSchedule, match="closed for more than 31 days"):
        on_calendar("0 9 5 12 *", closed, roll="forward").next_after(datetime(2029, 12, 1, tzinfo=UTC), "UTC")
    with pytest.raises(InvalidSchedule, match="not a date"):
        calendar("x", ["2030-13-01"])
    assert not (FEASTS | calendar("more", ["2029-12-20"])).is_open(date(2029, 12, 20))


def test_holidays_of_countries_and_exchanges() -> None:
    pytest.importorskip("holidays")
    germany, bavaria, nyse = country("DE"), country("DE", "BY"), exchange("XNYS")
    assert (
        not germany.is_open(date(2026, 10, 3))
        and germany.is_open(date(2026, 1, 6))
        and not bavaria.is_open(date(2026, 1, 6))
    )
    assert not nyse.is_open(date(2026, 11, 26)) and nyse.is_open(date(2026, 11, 25))
    for wrong in (lambda: country("XX"), lambda: exchange("NONE")):
        with pytest.raises(InvalidSchedule, match="has no calendar"):
            wrong()


def test_a_calendar_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("icalendar")
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:x"]
    for each in (
        "DTSTART;VALUE=DATE:20291224\nDTEND;VALUE=DATE:20291227",
        "DTSTART;VALUE=DATE:20200501\nRRULE:FREQ=YEARLY;UNTIL=20310601",
        "DTSTART:20300202T230000Z\nDTEND:20300203T010000Z",
    ):
        lines += ["BEGIN:VEVENT", "UID:1", *each.split("\n"), "END:VEVENT"]
    file = tmp_path / "works.ics"
    file.write_text("\r\n".join([*lines, "END:VCALENDAR", ""]))
    found = calendar_from_ics(file, timezone="Europe/Berlin")
    assert found.name == "works" and {date(2029, 12, n) for n in (24, 25, 26)} <= found.closed
    assert (
        date(2029, 12, 27) not in found.closed
        and date(2030, 2, 3) in found.closed
        and date(2030, 2, 2) not in found.closed
    )
    assert [day.year for day in sorted(found.closed) if (day.month, day.day) == (5, 1)] == list(range(2020, 2032))
    for bad in (tmp_path / "none.ics", tmp_path):
        with pytest.raises(InvalidSchedule, match="not a readable iCalendar file"):
            calendar_from_ics(bad)
