"""What a schedule will do, told by the arithmetic that fires: ranges, days, and every change of the clock."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from evertick.domain.schedules.preview import (
    ChangeEffect,
    clock_changes,
    count_fires,
    days_between,
    fires_between,
    last_fires_between,
    outcome_of,
)
from evertick.domain.schedules.spec import parse_schedule
from tests.domain.cron_oracle import transitions

NEW_YORK, BERLIN, LORD_HOWE, APIA = "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.requirement("I7")
@pytest.mark.parametrize(
    ("raw", "zone", "day", "effect", "fires"),
    [
        ("30 2 * * *", BERLIN, "2025-03-30", "runs_after", ["2025-03-30T01:00"]),
        ("30 2 * * *", BERLIN, "2025-10-26", "first_only", ["2025-10-26T00:30"]),
        ("30 2 * * *", NEW_YORK, "2025-03-09", "runs_after", ["2025-03-09T07:00"]),
        ("*/30 2 * * *", NEW_YORK, "2025-03-09", "runs_after", ["2025-03-09T07:00"]),
        ("30 2 * * *", NEW_YORK, "2025-11-02", "nothing_due", []),
        ("30 1 * * *", NEW_YORK, "2025-11-02", "first_only", ["2025-11-02T05:30"]),
        ("0 * * * *", NEW_YORK, "2025-11-02", "both", ["2025-11-02T05:00", "2025-11-02T06:00"]),
        ("0 * * * *", NEW_YORK, "2025-03-09", "skipped", []),
        ("0 */2 * * *", NEW_YORK, "2025-03-09", "skipped", []),
        ("15 2 * * *", LORD_HOWE, "2025-10-05", "runs_after", ["2025-10-04T15:30"]),
        ("30 2 * * *", LORD_HOWE, "2025-10-05", "nothing_due", []),
        ("0 12 * * *", APIA, "2011-12-30", "skipped", []),
        # Midnight of the day that never was is skipped, though that of the next day is the very instant after the gap.
        ("0 0 * * *", APIA, "2011-12-30", "skipped", []),
        ("@every 1h", BERLIN, "2025-03-30", "real_time", []),
    ],
)
def test_each_kind_of_clock_change_is_told(raw: str, zone: str, day: str, effect: str, fires: list[str]) -> None:
    around = utc(day)
    (change,) = clock_changes(zone, around - timedelta(days=1), around + timedelta(days=1))
    out = outcome_of(parse_schedule(raw, timezone=zone), change)
    assert (out.effect, list(out.fires)) == (ChangeEffect(effect), [utc(each) for each in fires])
    assert bool(out.walls) is (effect not in ("nothing_due", "real_time"))


@pytest.mark.parametrize("zone", [BERLIN, LORD_HOWE, APIA, "Africa/Casablanca", "Europe/Dublin", "Asia/Kolkata"])
def test_every_change_of_a_zone_is_found_where_the_oracle_finds_it(zone: str) -> None:
    found = [change.at for change in clock_changes(zone, utc("2005-01-01"), utc("2020-01-01"))]
    assert found == list(transitions(zone, range(2005, 2020)))


def test_a_change_at_the_edge_belongs_to_the_range() -> None:
    at = utc("2025-03-30T01:00")
    second = timedelta(seconds=1)
    assert [each.at for each in clock_changes(BERLIN, at, at)] == [at]
    assert list(clock_changes(BERLIN, at + second, at + timedelta(days=30))) == []
    assert list(clock_changes(BERLIN, at - timedelta(days=30), at - second)) == []


@pytest.mark.parametrize("raw", ["30 2 * * *", "0 * * * *", "*/7 1-3 * * SUN", "@every 25h", "@once 2025-03-30"])
@pytest.mark.parametrize("zone", [BERLIN, LORD_HOWE])
def test_the_days_of_a_range_add_up_to_its_fires_from_both_ends(raw: str, zone: str) -> None:
    spec, first, last = parse_schedule(raw, timezone=zone), utc("2025-03-01T07:13"), utc("2025-11-05T13:00")
    fires = fires_between(spec, first, last, 10_000)
    assert len(fires) == count_fires(spec, first, last) == sum(day.count for day in days_between(spec, first, last))
    assert last_fires_between(spec, first, last, 10_000) == fires[::-1]
    assert last_fires_between(spec, first, last, 3) == fires[::-1][:3]


def test_the_edges_of_a_range_belong_to_it() -> None:
    spec = parse_schedule("@daily")
    first, last = utc("2025-01-01"), utc("2025-01-03")
    assert fires_between(spec, first, last, 10) == [first, utc("2025-01-02"), last]
    assert count_fires(spec, first, last) == 3
    assert last_fires_between(spec, first, last, 10)[-1] == first


def test_a_day_that_never_was_is_marked() -> None:
    spec = parse_schedule("0 12 * * *", timezone=APIA)
    days = {day.day: day for day in days_between(spec, utc("2011-12-29T12:00"), utc("2011-12-31T09:00"))}
    assert [day for day in days if days[day].is_missing] == [date(2011, 12, 30)]
    assert [days[date(2011, 12, number)].count for number in (29, 30, 31)] == [1, 0, 1]
