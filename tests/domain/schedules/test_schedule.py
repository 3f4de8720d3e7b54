"""Reading, checking, storing and describing schedules, and the arithmetic of their fires."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.misfire import delay_of
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe, next_after, parse_schedule

BERLIN = "Europe/Berlin"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.requirement("R1")
@pytest.mark.parametrize(
    ("raw", "every_seconds"),
    [
        ("@every 30s", 30),
        ("@every 1h30m", 5400),
        ("@every 1h 30m", 5400),
        ("@EVERY 250ms", 0.25),
        ("@every 1.5s", 1.5),
        ("@every 2d", 172_800),
        ("@every PT0.25S", 0.25),
        ("PT5M", 300),
        ("pt1h", 3600),
        ("P1D", 86_400),
        ("P1W", 604_800),
        ("P1DT12H", 129_600),
        ("PT0.05S", 0.05),
        (timedelta(minutes=5), 300),
        (timedelta(milliseconds=250), 0.25),
    ],
)
def test_an_interval_can_be_written_in_several_ways(raw: object, every_seconds: float) -> None:
    spec = parse_schedule(raw)
    assert (spec.kind, spec.every_seconds) == (ScheduleKind.INTERVAL, every_seconds)


@pytest.mark.requirement("R1")
@pytest.mark.parametrize(
    ("raw", "zone", "at"),
    [
        ("@once 2026-01-01T00:00:00Z", "UTC", "2026-01-01T00:00"),
        ("@once 2026-01-01T00:00:00", BERLIN, "2025-12-31T23:00"),
        ("@once 2026-07-01", BERLIN, "2026-06-30T22:00"),
        (datetime(2026, 1, 1), "+05:30", "2025-12-31T18:30"),
        (datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2))), BERLIN, "2025-12-31T22:00"),
        (datetime(2025, 10, 26, 2, 30), BERLIN, "2025-10-26T00:30"),
        (datetime(2025, 10, 26, 2, 30, tzinfo=ZoneInfo(BERLIN), fold=1), BERLIN, "2025-10-26T01:30"),
        (datetime(2025, 3, 30, 2, 30), BERLIN, "2025-03-30T01:00"),
        (datetime(2025, 3, 30, 3, 0), BERLIN, "2025-03-30T01:00"),
        (datetime(2025, 3, 30, 1, 59, 59, 999_999), BERLIN, "2025-03-30T00:59:59.999999"),
    ],
)
def test_a_one_time_schedule_is_an_instant_read_in_the_schedules_zone(raw: object, zone: str, at: str) -> None:
    spec = parse_schedule(raw, timezone=zone)
    assert (spec.kind, spec.at) == (ScheduleKind.ONCE, utc(at))
    assert next_after(spec, utc(at) - timedelta(microseconds=1)) == utc(at)
    assert next_after(spec, utc(at)) is None


@pytest.mark.requirement("R1")
def test_a_cron_is_stored_in_one_spelling() -> None:
    spec = parse_schedule("  30   2 * * mon ", timezone=BERLIN)
    assert spec == ScheduleSpec(kind=ScheduleKind.CRON, expression="30 2 * * MON", timezone=BERLIN)
    assert next_after(spec, utc("2025-03-30T00:00")) == utc("2025-03-31T00:30")
    assert parse_schedule("@Daily").expression == "@daily"


@pytest.mark.parametrize(
    "every", [timedelta(milliseconds=50), timedelta(seconds=0.1), timedelta(seconds=7), timedelta(days=3)]
)
def test_an_interval_never_drifts_from_its_anchor(every: timedelta) -> None:
    anchor = utc("2020-02-03T04:05:06.000007")
    spec = parse_schedule(every, anchor_at=anchor)
    far = anchor + 123_456_789 * every if every < timedelta(days=1) else anchor + 1000 * every
    assert next_after(spec, far) == far + every
    assert next_after(spec, far - timedelta(microseconds=1)) == far
    assert next_after(spec, anchor - every) == anchor


def test_an_interval_without_an_anchor_counts_from_1970() -> None:
    assert next_after(parse_schedule("@every 7d"), utc("2025-06-01T00:00")) == utc("2025-06-05T00:00")
    assert next_after(parse_schedule("@every 1h"), utc("2025-06-01T00:00:01")) == utc("2025-06-01T01:00")


def test_an_interval_is_elapsed_time_across_a_clock_change() -> None:
    spec = parse_schedule("@every 30m", timezone=BERLIN)
    fire, found = utc("2025-10-25T23:59"), []
    for _ in range(5):
        fire = next_after(spec, fire)
        found.append(fire)
    assert found == [utc("2025-10-26T00:00") + timedelta(minutes=30 * n) for n in range(5)]


@pytest.mark.parametrize("raw", ["0 * * * *", "@every 1h"])
def test_the_bounds_belong_to_the_schedule(raw: str) -> None:
    start, end = utc("2025-03-30T01:00"), utc("2025-03-30T03:00")
    spec = parse_schedule(raw, timezone=BERLIN, start_at=start, end_at=end)
    assert next_after(spec, utc("2001-01-01T00:00")) == start
    assert next_after(spec, end - timedelta(microseconds=1)) == end
    assert next_after(spec, end) is None


def test_naive_bounds_are_read_in_the_schedules_zone() -> None:
    spec = parse_schedule(
        "30 2 * * *", timezone=BERLIN, start_at=datetime(2025, 3, 30, 2, 30), end_at=datetime(2025, 4, 1)
    )
    assert (spec.start_at, spec.end_at) == (utc("2025-03-30T01:00"), utc("2025-03-31T22:00"))
    assert next_after(spec, utc("2000-01-01T00:00")) == utc("2025-03-30T01:00")


def test_a_schedule_ends_with_the_year_9999_and_not_with_an_error() -> None:
    end = datetime.max.replace(tzinfo=UTC)
    for raw in ("@every 100d", "@daily", "@once 9999-12-31T23:59:59Z"):
        assert next_after(parse_schedule(raw), end) is None


SPECS = [
    parse_schedule("30 2 * * *", timezone=BERLIN),
    parse_schedule("@hourly", start_at=utc("2025-01-01T00:00"), end_at=utc("2026-01-01T00:00")),
    parse_schedule("@every 250ms", anchor_at=utc("2025-01-01T00:00:00.123456")),
    parse_schedule("@every 5s"),
    parse_schedule(datetime(2030, 1, 1, 12), timezone="+05:30"),
]


@pytest.mark.requirement("R1")
@pytest.mark.parametrize("spec", SPECS)
def test_a_stored_schedule_reads_back_as_it_was(spec: ScheduleSpec) -> None:
    text = spec.to_json()
    assert ScheduleSpec.from_json(text) == spec == parse_schedule(json.loads(text)) == parse_schedule(spec)
    assert ScheduleSpec.from_json(text).to_json() == text


def test_the_stored_text_is_canonical() -> None:
    assert SPECS[0].to_json() == '{"expression":"30 2 * * *","kind":"cron","timezone":"Europe/Berlin"}'
    assert SPECS[3].to_json() == '{"every_seconds":5.0,"kind":"interval","timezone":"UTC"}'
    assert SPECS[4].to_json() == '{"at":"2030-01-01T06:30:00Z","kind":"once","timezone":"+05:30"}'
    assert parse_schedule({"kind": "interval", "every_seconds": 5, "at": None}).to_json() == SPECS[3].to_json()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (parse_schedule("@every 5s"), "every 5 seconds"),
        (parse_schedule("@every 250ms"), "every 0.25 seconds"),
        (parse_schedule("@every 1s"), "every second"),
        (parse_schedule("@every 90s"), "every 1 minute 30 seconds"),
        (parse_schedule("PT1H"), "every hour"),
        (parse_schedule("@every 2d"), "every 2 days"),
        (parse_schedule("@every 10s"), "every 10 seconds"),
        (parse_schedule("30 2 * * *", timezone=BERLIN), "cron 30 2 * * * (Europe/Berlin)"),
        (parse_schedule("@once 2026-07-01", timezone=BERLIN), "once at 2026-07-01 00:00:00+02:00 (Europe/Berlin)"),
        (
            parse_schedule("@daily", start_at=utc("2025-01-01T00:00"), end_at=utc("2026-01-01T00:00")),
            "cron @daily (UTC), from 2025-01-01 00:00:00+00:00, until 2026-01-01 00:00:00+00:00",
        ),
    ],
)
def test_a_schedule_is_described_in_words(spec: ScheduleSpec, words: str) -> None:
    assert describe(spec) == words


REFUSED = [
    ("", "empty"),
    ("   ", "empty"),
    ("60 * * * *", "minute field '60'"),
    ("2026-01-01T00:00:00Z", "@once"),
    ("@once", "2030-01-01T00:00:00Z"),
    ("@once soon", "at 'soon'"),
    ("@once 1066-10-14", "from 1900"),
    (datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5))), "to 9999"),
    ("@every", "30s"),
    ("@every -5s", "30s"),
    ("@every 0s", "between 0.05 s"),
    ("@every 49ms", "between 0.05 s"),
    ("@every 999999999d", "100 years"),
    ("@every 5", "30s"),
    ("P1M", "no fixed length"),
    ("P1Y", "no fixed length"),
    ("P", "30s"),
    ("PT", "30s"),
    ("P1DT", "30s"),
    ("@every " + "1s" * 200, "at most 256"),
    (timedelta(0), "between 0.05 s"),
    (timedelta(seconds=-1), "between 0.05 s"),
    (30, "cannot be a int"),
    (None, "cannot be a NoneType"),
    (date(2026, 1, 1), "cannot be a date"),
    ({}, "kind None is unknown"),
    ({"kind": "weekly"}, "kind 'weekly' is unknown: use cron, interval, once"),
    ({"kind": "cron"}, "needs 'expression'"),
    ({"kind": "cron", "expression": 5}, "is not text"),
    ({"kind": "cron", "expression": "@daily", "every_seconds": 5}, "cannot have every_seconds"),
    ({"kind": "cron", "expression": "@daily", "anchor_at": "2026-01-01"}, "cannot have anchor_at"),
    ({"kind": "cron", "expression": "@daily", "timezone": 5}, "time zone 5 is not text"),
    ({"kind": "cron", "expression": "@daily", "colour": "red"}, "cannot have colour"),
    ({"kind": "interval", "every_seconds": "5"}, "is not a number"),
    ({"kind": "interval", "every_seconds": True}, "is not a number"),
    ({"kind": "interval", "every_seconds": float("nan")}, "between 0.05 s"),
    ({"kind": "interval", "every_seconds": float("inf")}, "between 0.05 s"),
    ({"kind": "once", "at": 5}, "at '5' is not a date and time"),
    ({"kind": "x" * 10_000}, "is unknown"),
    ({"kind": "cron", "expression": "@daily", "x" * 10_000: 5}, "cannot have xxx"),
    ({"kind": "cron", "expression": ["x"] * 10_000}, "is not text"),
]


@pytest.mark.requirement("R1")
@pytest.mark.parametrize(("raw", "reason"), REFUSED)
def test_a_bad_schedule_is_refused_with_what_is_wrong(raw: object, reason: str) -> None:
    with pytest.raises(InvalidSchedule) as refusal:
        parse_schedule(raw)
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_bounds_that_leave_no_fire_are_refused() -> None:
    new_year, later = utc("2026-01-01T00:00"), utc("2026-02-01T00:00")
    with pytest.raises(InvalidSchedule, match="before it starts"):
        parse_schedule("@daily", start_at=later, end_at=new_year)
    with pytest.raises(InvalidSchedule, match="never fires within its bounds"):
        parse_schedule("0 0 29 2 *", start_at=new_year, end_at=later)
    with pytest.raises(InvalidSchedule, match="never fires within its bounds"):
        parse_schedule("@once 2025-12-31", start_at=new_year)
    with pytest.raises(InvalidSchedule, match="did you mean 'Europe/Berlin'"):
        parse_schedule("@every 5s", timezone="Europe/Berln")


@pytest.mark.parametrize("text", ["", "[]", "5", '"@daily"', "{", '{"kind":"cron"}', "[" * 100_000])
def test_stored_text_that_is_not_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(InvalidSchedule):
        ScheduleSpec.from_json(text)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.datetimes()
NAMES = ("expression", "every_seconds", "at", "timezone", "start_at", "end_at", "anchor_at", "other")
RAW_FIELDS = st.fixed_dictionaries(
    {"kind": st.sampled_from(("cron", "interval", "once")) | VALUES}, optional=dict.fromkeys(NAMES, VALUES)
)


@given(raw=RAW_FIELDS | st.text("@everyoncPT0123456789smhd .:-Z+", max_size=30) | st.datetimes() | st.timedeltas())
@settings(max_examples=400)
def test_whatever_comes_in_is_a_schedule_that_fires_or_is_refused(raw: object) -> None:
    try:
        spec = parse_schedule(raw)
    except InvalidSchedule as refusal:
        assert len(str(refusal)) < 1000
        return
    assert next_after(spec, datetime(1800, 1, 1, tzinfo=UTC)) is not None
    assert ScheduleSpec.from_json(spec.to_json()) == spec
    assert describe(spec)


@given(
    every=st.integers(50_000, 10**13),
    anchor=st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)),
    asked=st.datetimes(datetime(1990, 1, 1), datetime(2060, 1, 1), timezones=st.just(UTC)),
)
@settings(max_examples=300)
def test_an_interval_fires_at_whole_multiples_and_leaves_none_out(
    every: int, anchor: datetime, asked: datetime
) -> None:
    length = timedelta(microseconds=every)
    spec = parse_schedule(length, anchor_at=anchor)
    fire = next_after(spec, asked)
    assert fire is not None
    assert timedelta(0) < fire - asked <= length
    assert (fire - anchor) % length == timedelta(0)
    assert spec.every == length


# Lists and jitter ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R1")
def test_a_list_of_instants_fires_at_each_once_in_order() -> None:
    days = [datetime(2030, 1, day) for day in (5, 2, 2, 9)]
    spec = parse_schedule(days, timezone=BERLIN, start_at=datetime(2030, 1, 3))
    assert ScheduleSpec.from_json(spec.to_json()) == spec
    found, after = [], utc("2029-01-01T00:00")
    while (following := next_after(spec, after)) is not None:
        found.append(after := following)
    assert found == [utc("2030-01-04T23:00"), utc("2030-01-08T23:00")]
    assert describe(spec).startswith("3 times from 2030-01-02 00:00:00+01:00 to 2030-01-09")
    with pytest.raises(InvalidSchedule, match="never fires within its bounds"):
        parse_schedule(days, start_at=datetime(2031, 1, 1))
    with pytest.raises(InvalidSchedule, match="1 to 1,000"):
        parse_schedule([days[0]] * 1001)


def test_jitter_is_fixed_by_the_names_and_spreads_evenly() -> None:
    spec = parse_schedule("@hourly", jitter_seconds=60)
    delays = [delay_of(spec, dag=f"d{number}", name="main").total_seconds() for number in range(2000)]
    assert delays[7] == delay_of(spec, dag="d7", name="main").total_seconds()
    assert delays[7] != delay_of(spec, dag="d7", name="other").total_seconds()
    assert min(delays) >= 0 and max(delays) < 60
    quarters = [sum(15 * part <= each < 15 * (part + 1) for each in delays) for part in range(4)]
    assert all(400 < count < 600 for count in quarters)
    assert delay_of(parse_schedule("@hourly"), dag="d", name="n") == timedelta(0)
    assert parse_schedule("@hourly", jitter_seconds=0) == parse_schedule("@hourly")
    assert describe(spec).endswith("up to 1 minute later")
