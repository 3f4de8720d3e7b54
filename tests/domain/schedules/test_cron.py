"""Cron expressions against the written rule, a brute-force oracle and a second implementation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

import pytest
from cronsim import CronSim
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules import time_zones
from evertick.domain.schedules.cron import Cron, parse_cron
from tests.domain import cron_sweep
from tests.domain.cron_oracle import EXPRESSIONS, fires, sweep, ticks_between

NEW_YORK, BERLIN, LORD_HOWE, APIA = "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def fires_after(cron: Cron, after: datetime, count: int) -> list[datetime]:
    def walk():
        fire = cron.next_after(after)
        while fire is not None:
            yield fire
            fire = cron.next_after(fire)

    return list(islice(walk(), count))


def fires_between(cron: Cron, after: datetime, through: datetime) -> list[datetime]:
    found, fire = [], cron.next_after(after)
    while fire is not None and fire <= through:
        found.append(fire)
        fire = cron.next_after(fire)
    return found


# The table of the written daylight-saving rule: expression, zone, asked at, the next fires exactly (all UTC).
RULE = [
    ("30 2 * * *", NEW_YORK, "2025-03-09T05:00", ["2025-03-09T07:00", "2025-03-10T06:30"]),
    ("30 2 * * *", NEW_YORK, "2025-11-02T04:00", ["2025-11-02T07:30", "2025-11-03T07:30"]),
    ("30 1 * * *", NEW_YORK, "2025-11-02T04:00", ["2025-11-02T05:30", "2025-11-03T06:30"]),
    ("0 * * * *", NEW_YORK, "2025-11-02T03:59", [f"2025-11-02T{hour:02}:00" for hour in (4, 5, 6, 7, 8)]),
    ("0 * * * *", NEW_YORK, "2025-03-09T04:59", [f"2025-03-09T{hour:02}:00" for hour in (5, 6, 7, 8, 9)]),
    ("0 */2 * * *", NEW_YORK, "2025-03-09T04:59", [f"2025-03-09T{hour:02}:00" for hour in (5, 8, 10)]),
    ("*/30 2 * * *", NEW_YORK, "2025-03-09T05:00", ["2025-03-09T07:00", "2025-03-10T06:00"]),
    ("30 2 * * *", BERLIN, "2025-03-30T00:00", ["2025-03-30T01:00", "2025-03-31T00:30"]),
    ("30 2 * * *", BERLIN, "2025-10-26T00:00", ["2025-10-26T00:30", "2025-10-27T01:30"]),
    ("15 2 * * *", LORD_HOWE, "2025-10-04T12:00", ["2025-10-04T15:30", "2025-10-05T15:15"]),
    ("30 2 * * *", LORD_HOWE, "2025-10-04T12:00", ["2025-10-04T15:30", "2025-10-05T15:30"]),
    ("0 * * * *", LORD_HOWE, "2025-04-05T13:30", ["2025-04-05T14:00", "2025-04-05T15:30", "2025-04-05T16:30"]),
    ("30 2 * * *", "Asia/Kolkata", "2025-06-01T12:00", ["2025-06-01T21:00", "2025-06-02T21:00"]),
    ("0 * * * *", "Asia/Kolkata", "2025-06-01T12:00", ["2025-06-01T12:30", "2025-06-01T13:30"]),
    ("0 12 * * *", APIA, "2011-12-29T12:00", ["2011-12-29T22:00", "2011-12-30T22:00", "2011-12-31T22:00"]),
    ("30 3 * * *", "Antarctica/Casey", "2009-10-17T12:00", ["2009-10-17T18:00", "2009-10-18T16:30"]),
    ("0 0 29 2 *", "UTC", "2025-01-01T00:00", ["2028-02-29T00:00", "2032-02-29T00:00"]),
    ("0 0 29 2 *", "UTC", "2097-01-01T00:00", ["2104-02-29T00:00"]),
    ("0 0 31 * *", "UTC", "2025-01-01T00:00", ["2025-01-31T00:00", "2025-03-31T00:00", "2025-05-31T00:00"]),
    ("0 0 L * *", "UTC", "2025-01-01T00:00", [f"2025-{day}T00:00" for day in ("01-31", "02-28", "03-31", "04-30")]),
    ("14 3 19 1 *", "UTC", "2037-06-01T00:00", [f"{year}-01-19T03:14" for year in (2038, 2039, 2040)]),
    ("0 0 13 * 5", "UTC", "2025-06-01T00:00", [f"2025-06-{day:02}T00:00" for day in (6, 13, 20, 27)]),
    ("0 0 13 * +5", "UTC", "2025-06-01T00:00", ["2025-06-13T00:00", "2026-02-13T00:00"]),
    ("59 59 23 31 12 *", "UTC", "2016-12-31T12:00", ["2016-12-31T23:59:59", "2017-12-31T23:59:59"]),
    ("0 0 0 1 1 *", "UTC", "2016-12-31T23:59:59", ["2017-01-01T00:00"]),
]


@pytest.mark.requirement("I7")
@pytest.mark.parametrize(("expression", "zone", "asked", "expected"), RULE)
def test_the_written_rule_holds_exactly(expression: str, zone: str, asked: str, expected: list[str]) -> None:
    cron = parse_cron(expression, zone)
    assert fires_after(cron, utc(asked), len(expected)) == [utc(text) for text in expected]


@pytest.mark.parametrize(("day", "count"), [("2025-11-02T04:00", 25), ("2025-03-09T05:00", 23)])
def test_an_hourly_cron_fires_once_in_each_real_hour_of_a_long_and_a_short_day(day: str, count: int) -> None:
    begin = utc(day) - timedelta(seconds=1)
    assert len(fires_between(parse_cron("0 * * * *", NEW_YORK), begin, begin + timedelta(hours=count))) == count


MEANING = [
    ("0 0 * * 5L", "2025-01-01T00:00", ["2025-01-31T00:00", "2025-02-28T00:00", "2025-03-28T00:00"]),
    ("0 0 * * FRI#5", "2025-01-01T00:00", ["2025-01-31T00:00", "2025-05-30T00:00"]),
    ("0 0 * * MON#1,3#2", "2025-01-01T00:00", ["2025-01-06T00:00", "2025-01-08T00:00", "2025-02-03T00:00"]),
    (
        "0 0 LW * *",
        "2025-05-01T00:00",
        ["2025-05-30T00:00", "2025-06-30T00:00", "2025-07-31T00:00", "2025-08-29T00:00"],
    ),
    ("0 0 L 2 *", "2023-12-01T00:00", ["2024-02-29T00:00", "2025-02-28T00:00"]),
    ("0 0 15,L * *", "2025-02-01T00:00", ["2025-02-15T00:00", "2025-02-28T00:00", "2025-03-15T00:00"]),
    ("0 0 * * MON", "2020-12-26T00:00", ["2020-12-28T00:00", "2021-01-04T00:00"]),
    ("0 0 * * 7", "2025-06-01T12:00", ["2025-06-08T00:00"]),
    ("0 0 * * sat-sun", "2025-06-02T00:00", ["2025-06-07T00:00", "2025-06-08T00:00", "2025-06-14T00:00"]),
    ("0 0 1 jan,JUL *", "2025-01-15T00:00", ["2025-07-01T00:00", "2026-01-01T00:00"]),
    ("0 0 */2 * MON", "2025-06-01T12:00", ["2025-06-09T00:00", "2025-06-23T00:00"]),
    ("5/20 8-10/2 * * *", "2025-06-01T00:00", [f"2025-06-01T{time}" for time in ("08:05", "08:25", "08:45", "10:05")]),
    ("*/20 59 23 * * *", "2025-06-01T00:00", [f"2025-06-01T23:59:{second:02}" for second in (0, 20, 40)]),
    ("@hourly", "2025-06-01T00:00", ["2025-06-01T01:00"]),
    ("@daily", "2025-06-01T00:00", ["2025-06-02T00:00"]),
    ("@midnight", "2025-06-01T00:00", ["2025-06-02T00:00"]),
    ("@weekly", "2025-06-02T00:00", ["2025-06-08T00:00"]),
    ("@Monthly", "2025-06-01T00:00", ["2025-07-01T00:00"]),
    ("@yearly", "2025-06-01T00:00", ["2026-01-01T00:00"]),
    ("@annually", "2025-06-01T00:00", ["2026-01-01T00:00"]),
]


@pytest.mark.parametrize(("expression", "asked", "expected"), MEANING)
def test_each_form_of_expression_means_what_it_says(expression: str, asked: str, expected: list[str]) -> None:
    assert fires_after(parse_cron(expression), utc(asked), len(expected)) == [utc(text) for text in expected]


@pytest.mark.parametrize(
    ("zone", "expected"), [("+05:30", "2025-06-01T18:30"), ("-03:00", "2025-06-02T03:00"), ("UTC", "2025-06-02T00:00")]
)
def test_a_zone_may_be_a_fixed_offset(zone: str, expected: str) -> None:
    assert parse_cron("@daily", zone).next_after(utc("2025-06-01T12:00")) == utc(expected)


def test_a_repeated_hour_is_not_lost_when_the_next_match_is_a_year_away() -> None:
    """In Sao Paulo 2018-02-17 had two 23:10s, and after the first the wall clock shows no new match before 2019."""
    cron = parse_cron("10 */23 17 2 *", "America/Sao_Paulo")
    found = fires_after(cron, utc("2018-02-17T12:00"), 3)
    assert found == [utc("2018-02-18T01:10"), utc("2018-02-18T02:10"), utc("2019-02-17T03:10")]


@pytest.mark.parametrize("expression", ["0 12 30 * *", "0 12 * * 5", "0 * 30 * *", "* * * * * *"])
def test_a_day_that_never_was_is_passed_without_hanging(expression: str) -> None:
    cron = parse_cron(expression, APIA)
    found = fires_after(cron, utc("2011-12-30T09:59:58"), 5)
    assert found == sorted(set(found)) and len(found) == 5
    skipped_day = [fire for fire in found if utc("2011-12-29T10:00") <= fire < utc("2011-12-30T10:00")]
    assert not skipped_day or expression == "* * * * * *"


def test_a_fire_exactly_on_a_clock_change_is_found_from_just_before_it() -> None:
    cron = parse_cron("30 2 * * *", BERLIN)
    change = utc("2025-03-30T01:00")
    assert cron.next_after(change - timedelta(microseconds=1)) == change
    assert cron.next_after(change - timedelta(seconds=1)) == change
    assert cron.next_after(change) == utc("2025-03-31T00:30")


@pytest.mark.requirement("I7")
def test_every_clock_change_of_a_sample_of_zones_agrees_with_brute_force() -> None:
    recent = sweep((NEW_YORK, BERLIN, LORD_HOWE, "Europe/Dublin", "Africa/Casablanca", "Antarctica/Troll"), [2025])
    odd = sweep((APIA, "America/Sao_Paulo", "America/Caracas", "Asia/Pyongyang"), [2007, 2011, 2015, 2018])
    old = sweep(("Africa/Monrovia", "Antarctica/Vostok", "Pacific/Kiritimati"), [1972, 1994, 1995])
    assert recent.mismatches == odd.mismatches == old.mismatches == []
    assert recent.cases + odd.cases + old.cases >= 300


def test_no_fire_depends_on_where_time_is_cut_into_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of 17 minutes: every repeated hour is cut several times."""
    monkeypatch.setattr(time_zones, "_STRETCH_BITS", 10)
    time_zones._periods.cache_clear()
    try:
        cut = sweep((BERLIN, LORD_HOWE), [2025])
    finally:
        time_zones._periods.cache_clear()
    assert cut.mismatches == [] and cut.cases == 48


def test_the_oracle_itself_notices_a_wrong_fire() -> None:
    """A sweep that compares a calendar cron with its elapsed sibling must not find them equal."""
    ticks = ticks_between(NEW_YORK, utc("2025-03-09T00:00"), utc("2025-03-09T12:00"), timedelta(minutes=1))
    assert fires("30 2 * * *", ticks) != fires("30 */1 * * *", ticks)
    assert fires("30 2 * * *", ticks) == [utc("2025-03-09T07:00")]


ZONES = st.sampled_from((NEW_YORK, BERLIN, LORD_HOWE, APIA, "UTC", "Africa/Casablanca", "America/Sao_Paulo", "+05:30"))
INSTANTS = st.datetimes(datetime(1972, 1, 1), datetime(2037, 1, 1), timezones=st.just(UTC))
# Half of the instants lie near a change of some clock, where mistakes live.
CHANGES = ("2011-12-30T10:00", "2025-03-30T01:00", "2025-10-26T01:00", "2025-03-09T07:00", "2025-11-02T06:00")
NEAR = st.builds(
    lambda change, minutes: utc(change) + timedelta(minutes=minutes), st.sampled_from(CHANGES), st.integers(-2000, 2000)
)
ASKED = INSTANTS | NEAR


def field(low: int, high: int) -> st.SearchStrategy[str]:
    value = st.integers(low, high)
    # The second implementation reads 5-5/2 as 5/2, so a range has two ends here.
    span = st.tuples(value, value).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: f"{min(pair)}-{max(pair)}")
    plain = st.just("*") | value.map(str) | span
    stepped = st.tuples(st.just("*") | span, st.integers(1, 12)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    return plain | stepped | st.lists(value.map(str) | span, min_size=1, max_size=3).map(",".join)


def can_fire(expression: str) -> bool:
    """Some days and weekdays that must both match never meet, such as */10 and the last Friday of February."""
    try:
        parse_cron(expression)
    except InvalidSchedule as refusal:
        assert "never fires" in str(refusal)
        return False
    return True


DAYS = field(1, 28) | st.sampled_from(("L", "LW", "31", "29", "1,L"))
WEEKDAYS = field(0, 7) | st.sampled_from(("MON", "5L", "0L", "2#1", "6#3", "SUN#5", "TUE-THU"))
FIVE = st.tuples(field(0, 59), field(0, 23), DAYS, field(1, 12), WEEKDAYS).map(" ".join).filter(can_fire)
SIX = st.tuples(field(0, 59), FIVE).map(" ".join)


@given(expression=FIVE | SIX | st.sampled_from(EXPRESSIONS), zone=ZONES, asked=ASKED)
@settings(max_examples=300)
def test_fires_strictly_increase_and_lie_after_the_question(expression: str, zone: str, asked: datetime) -> None:
    found = [asked, *fires_after(parse_cron(expression, zone), asked, 20)]
    assert all(earlier < later for earlier, later in pairwise(found))
    assert all(fire.utcoffset() == timedelta(0) and fire.microsecond == 0 for fire in found[1:])


@given(expression=FIVE | SIX, asked=INSTANTS)
@settings(max_examples=300)
def test_without_clock_changes_a_second_implementation_agrees(expression: str, asked: datetime) -> None:
    second = CronSim(expression, asked.replace(tzinfo=None))
    expected = [fire.replace(tzinfo=UTC) for fire in islice(second, 10)]
    # It gives up after 50 years without a fire, so it may know fewer.
    assert fires_after(parse_cron(expression), asked, len(expected)) == expected


@given(expression=st.sampled_from(EXPRESSIONS) | FIVE, zone=ZONES.filter(lambda zone: "/" in zone), asked=NEAR)
@example(expression="30 1 * * *", zone="America/New_York", asked=utc("2025-11-02T05:59"))
@settings(max_examples=40)
def test_any_expression_near_a_clock_change_agrees_with_brute_force(
    expression: str, zone: str, asked: datetime
) -> None:
    # The brute force begins earlier: it must know which times the clock showed before a repeated hour.
    ticks = ticks_between(zone, asked - timedelta(hours=26), asked + timedelta(hours=40), timedelta(minutes=1))
    expected = [fire for fire in fires(expression, ticks) if fire > asked]
    assert fires_between(parse_cron(expression, zone), asked, ticks[-1].instant) == expected


@given(
    expression=st.sampled_from(EXPRESSIONS) | FIVE,
    zone=ZONES,
    asked=ASKED,
    hours=st.integers(0, 100),
    cut=st.floats(0, 1),
)
@settings(max_examples=200)
def test_a_span_has_the_fires_of_its_parts_and_is_counted_without_visiting_them(
    expression: str, zone: str, asked: datetime, hours: int, cut: float
) -> None:
    cron, end = parse_cron(expression, zone), asked + timedelta(hours=hours)
    middle = asked + (end - asked) * cut
    whole = fires_between(cron, asked, end)
    assert whole == fires_between(cron, asked, middle) + fires_between(cron, middle, end)
    assert cron.count_between(asked, end) == len(whole)
    assert cron.count_between(asked, middle) + cron.count_between(middle, end) == len(whole)


def test_a_cron_by_the_second_is_counted_over_years() -> None:
    cron = parse_cron("* * * * * *", BERLIN)
    begin = utc("2020-01-01T00:00")
    assert cron.count_between(begin, begin + timedelta(days=3650)) == 3650 * 86_400


@given(expression=FIVE, asked=ASKED)
@settings(max_examples=50)
def test_two_names_of_one_zone_fire_alike(expression: str, asked: datetime) -> None:
    aliases = [fires_after(parse_cron(expression, zone), asked, 5) for zone in ("America/New_York", "US/Eastern")]
    assert aliases[0] == aliases[1]


@pytest.mark.parametrize("zone", ["UTC", "+14:00", "-11:00", NEW_YORK, APIA])
def test_time_ends_with_the_year_9999(zone: str) -> None:
    cron = parse_cron("0 0 31 12 *", zone)
    found = fires_after(cron, utc("9997-06-01T00:00"), 10)
    assert [fire.astimezone(UTC).year for fire in found] == [9997, 9998, 9999]
    leap_days = fires_after(parse_cron("0 0 29 2 *", zone), utc("9993-06-01T00:00"), 10)
    assert [fire.astimezone(UTC).year for fire in leap_days] == [9996]
    assert cron.next_after(datetime.max.replace(tzinfo=UTC)) is None
    assert cron.next_after(datetime.min.replace(tzinfo=UTC)) is not None


def test_an_instant_without_a_zone_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        parse_cron("@daily").next_after(datetime(2025, 1, 1))


REFUSED = [
    ("60 * * * *", "minute field '60'"),
    ("* 24 * * *", "hour field '24'"),
    ("* * 0 * *", "day-of-month field '0'"),
    ("* * * 13 *", "month field '13'"),
    ("* * * * 8", "day-of-week field '8'"),
    ("61 * * * * *", "second field '61'"),
    ("*/0 * * * *", "step"),
    ("* 22-2 * * *", "runs backwards"),
    ("1,,2 * * * *", "a value is missing"),
    ("a * * * *", "the minute field 'a' is invalid: 'a' is not a number or name"),
    ("² * * * *", "minute field"),
    ("-5 * * * *", "minute field '-5'"),
    ("1/2/3 * * * *", "minute field"),
    ("* * * Foo *", "month field 'Foo' is invalid: 'Foo' is not"),
    ("0 0 31 feb *", "cron '0 0 31 feb *' never fires"),
    ("* * * * 1#6", "#1 to #5"),
    ("* * * * L", "day-of-week field 'L'"),
    ("* * L-3 * *", "day-of-month field"),
    ("+1 * * * *", "minute field"),
    ("* * * *", "has 4 field"),
    ("* * * * * * *", "has 7 field"),
    ("", "has 0 field"),
    ("@reboot", "not a known macro"),
    ("0 0 30 2 *", "no fire in 400 years"),
    ("0 0 31 4,6,9,11 *", "no fire in 400 years"),
    ("0 0 30 2 +1", "no fire in 400 years"),
    ("1," * 200 + "2 * * * *", "at most 256"),
]


@pytest.mark.requirement("R1")
@pytest.mark.parametrize(("expression", "reason"), REFUSED)
def test_a_bad_expression_is_refused_with_its_name_and_the_fault(expression: str, reason: str) -> None:
    with pytest.raises(InvalidSchedule) as refusal:
        parse_cron(expression)
    assert reason in str(refusal.value)
    assert repr(" ".join(expression.split())[:30]).strip("'") in str(refusal.value)


@given(st.text(max_size=300) | st.text("*0123456789,-/L#W+ @JANMO", max_size=40))
@settings(max_examples=400)
def test_any_text_is_either_a_cron_that_fires_or_refused(text: str) -> None:
    try:
        cron = parse_cron(text)
    except InvalidSchedule:
        return
    assert cron.next_after(utc("2025-01-01T00:00")) is not None


@pytest.mark.parametrize(
    ("zone", "advice"),
    [
        ("Europe/Berln", "Europe/Berlin"),
        ("europe/berlin", "Europe/Berlin"),
        ("Tokyo", "Asia/Tokyo"),
        ("new york", "America/New_York"),
        ("Mars/Olympus", "IANA name"),
        ("", "IANA name"),
        ("Europe", "IANA name"),
        ("../../etc/passwd", "IANA name"),
        ("a\0b", "IANA name"),
        ("right/Europe/Berlin", "Europe/Berlin"),
        ("localtime", "IANA name"),
        ("+25:00", "'+05:30'"),
        ("x" * 5000, "IANA name"),
    ],
)
def test_an_unknown_zone_is_refused_with_a_near_name(zone: str, advice: str) -> None:
    with pytest.raises(InvalidSchedule, match="unknown time zone") as refusal:
        parse_cron("@daily", zone)
    assert advice in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_a_zone_may_be_named_by_an_old_name() -> None:
    old, new = parse_cron("30 2 * * *", "US/Eastern"), parse_cron("30 2 * * *", NEW_YORK)
    around = utc("2025-03-08T00:00"), 4
    assert fires_after(old, *around) == fires_after(new, *around)


def test_a_sweep_succeeds_only_if_there_was_something_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    year = ["--first", "2025", "--last", "2025", "--jobs", "1"]
    assert cron_sweep.main([*year, "--zone", BERLIN, "--zone", "Asia/Kolkata"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 zones, 2 changes of the clock from 2025 to 2025, 12 expressions: 24 cases, 0 mismatches" in shown
    assert cron_sweep.main([*year, "--zone", "Asia/Kolkata"]) == 1
