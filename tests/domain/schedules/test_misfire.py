"""Every due instant becomes a run or is skipped on record, exactly once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertick.domain.schedules.misfire import (
    ON_TIME_SECONDS,
    FirePlan,
    MisfirePolicy,
    SkipRange,
    SkipReason,
    count_between,
    latest_between,
    plan_fires,
)
from evertick.domain.schedules.simulation import Policies, simulate_schedule
from evertick.domain.schedules.spec import ScheduleSpec, next_after, parse_schedule

DAY = 86_400.0
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
HOURLY = parse_schedule("@hourly")


def plan(
    spec: ScheduleSpec, due: datetime, now: datetime, policy: str, window: float | None = DAY, limit: int = 100
) -> FirePlan:
    return plan_fires(spec, next_due=due, now=now, policy=MisfirePolicy(policy), window_seconds=window, limit=limit)


def hours(count: float) -> timedelta:
    return timedelta(hours=count)


@pytest.mark.parametrize("policy", MisfirePolicy)
def test_nothing_happens_before_the_cursor(policy: str) -> None:
    assert plan(HOURLY, NOON, NOON - timedelta(microseconds=1), policy) == FirePlan(
        fires=(), skipped=None, next_due=NOON
    )


@pytest.mark.parametrize("late", [timedelta(0), timedelta(milliseconds=3), timedelta(minutes=59)])
@pytest.mark.parametrize("policy", MisfirePolicy)
def test_a_lone_due_instant_fires_under_every_policy(policy: str, late: timedelta) -> None:
    assert plan(HOURLY, NOON, NOON + late, policy) == FirePlan(fires=(NOON,), skipped=None, next_due=NOON + hours(1))


def test_latest_fires_the_last_missed_and_skips_the_others_on_record() -> None:
    found = plan(HOURLY, NOON, NOON + hours(5.5), "latest")
    assert found.fires == (NOON + hours(5),)
    assert found.skipped == SkipRange(first=NOON, last=NOON + hours(4), count=5, reason=SkipReason.MISFIRE_LATEST)
    assert found.next_due == NOON + hours(6)


def test_skip_waits_for_the_next_time_once_it_fell_behind() -> None:
    found = plan(HOURLY, NOON, NOON + hours(5.5), "skip")
    assert found.fires == ()
    assert found.skipped == SkipRange(first=NOON, last=NOON + hours(5), count=6, reason=SkipReason.MISFIRE_SKIP)
    assert found.next_due == NOON + hours(6)


def test_skip_still_fires_what_is_on_time_so_that_a_fast_schedule_never_starves() -> None:
    spec = parse_schedule("@every 250ms")
    found = plan(spec, NOON, NOON + timedelta(seconds=11.1), "skip")
    first = NOON + timedelta(seconds=1.25)
    assert found.fires == tuple(first + n * timedelta(seconds=0.25) for n in range(40))
    assert found.skipped == SkipRange(
        first=NOON, last=NOON + timedelta(seconds=1), count=5, reason=SkipReason.MISFIRE_SKIP
    )


@pytest.mark.parametrize("policy", MisfirePolicy)
@pytest.mark.parametrize("most", [None, 1])
def test_a_takeover_within_the_tolerance_drops_no_fire_whatever_the_policy(policy: str, most: int | None) -> None:
    """A frozen leader's successor takes over up to 6 s late; what is older than 10 s is missed, and the policy decides."""
    spec = parse_schedule("@every 1s")
    late = {"spec": spec, "policy": MisfirePolicy(policy), "window_seconds": 0, "limit": 100, "most_missed": most}
    takeover = plan_fires(next_due=NOON, now=NOON + timedelta(seconds=6.5), **late)  # type: ignore[arg-type]
    assert takeover.fires == tuple(NOON + timedelta(seconds=n) for n in range(7))
    assert takeover.skipped is None and takeover.next_due == NOON + timedelta(seconds=7)
    outage = plan_fires(next_due=NOON, now=NOON + timedelta(seconds=60), **late)  # type: ignore[arg-type]
    assert outage.fires == tuple(NOON + timedelta(seconds=n) for n in range(50, 61))
    assert outage.skipped is not None and outage.skipped.count == 50


def test_all_fires_in_order_and_goes_on_in_the_next_call() -> None:
    now = NOON + hours(5.5)
    first = plan(HOURLY, NOON, now, "all", limit=4)
    assert first == FirePlan(fires=tuple(NOON + hours(n) for n in range(4)), skipped=None, next_due=NOON + hours(4))
    second = plan(HOURLY, first.next_due, now, "all", limit=4)
    assert second == FirePlan(fires=(NOON + hours(4), NOON + hours(5)), skipped=None, next_due=NOON + hours(6))


def test_all_skips_what_is_older_than_the_window() -> None:
    found = plan(HOURLY, NOON, NOON + hours(5.5), "all", window=1.5 * 3600)
    assert found.fires == (NOON + hours(4), NOON + hours(5))
    assert found.skipped == SkipRange(first=NOON, last=NOON + hours(3), count=4, reason=SkipReason.OUTSIDE_WINDOW)


@pytest.mark.parametrize("policy", MisfirePolicy)
def test_a_last_due_instant_older_than_the_window_is_skipped(policy: str) -> None:
    spec = parse_schedule("0 12 1 * *")
    found = plan(spec, NOON, NOON + hours(25), policy)
    assert found.fires == ()
    assert found.skipped == SkipRange(first=NOON, last=NOON, count=1, reason=SkipReason.OUTSIDE_WINDOW)
    assert found.next_due == datetime(2025, 7, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("policy", MisfirePolicy)
def test_the_window_includes_its_edge(policy: str) -> None:
    spec = parse_schedule("0 12 1 * *")
    assert plan(spec, NOON, NOON + hours(24), policy).fires == (NOON,)


@pytest.mark.parametrize("policy", MisfirePolicy)
@pytest.mark.parametrize("window", [0, -5, None, 1e300])
def test_what_is_on_time_fires_whatever_the_window(policy: str, window: float | None) -> None:
    now = NOON + timedelta(seconds=ON_TIME_SECONDS)
    assert plan(HOURLY, NOON, now, policy, window=window).fires == (NOON,)


@pytest.mark.parametrize("policy", MisfirePolicy)
def test_a_schedule_that_has_ended_leaves_no_cursor(policy: str) -> None:
    once = parse_schedule(NOON)
    assert plan(once, NOON, NOON + hours(1), policy) == FirePlan(fires=(NOON,), skipped=None, next_due=None)
    ended = parse_schedule("@hourly", end_at=NOON + hours(2))
    found = plan(ended, NOON, NOON + hours(9), policy, window=None)
    assert found.next_due is None
    assert len(found.fires) + (found.skipped.count if found.skipped else 0) == 3


def test_a_cursor_that_the_spec_no_longer_gives_is_still_settled_once() -> None:
    """After a change of zone rules the stored cursor may be no fire any more; it was promised, so it counts."""
    odd = NOON + timedelta(minutes=17)
    assert plan(HOURLY, odd, odd, "latest") == FirePlan(fires=(odd,), skipped=None, next_due=NOON + hours(1))
    found = plan(HOURLY, odd, NOON + hours(2), "latest")
    assert found.fires == (NOON + hours(2),)
    assert found.skipped == SkipRange(first=odd, last=NOON + hours(1), count=2, reason=SkipReason.MISFIRE_LATEST)


@pytest.mark.parametrize(
    ("raw", "days", "count"),
    [
        ("@every 50ms", 7, 7 * 86_400 * 20),
        ("* * * * *", 365, 525_600),
        ("* * * * * *", 3650, 3650 * 86_400),
        ("@daily", 3650, 3650),
    ],
)
def test_a_long_downtime_is_counted_and_not_walked(raw: str, days: int, count: int) -> None:
    spec = parse_schedule(raw, timezone="Europe/Berlin")
    due = next_after(spec, NOON)
    assert due is not None
    now = due + timedelta(days=days)
    found = plan(spec, due, now, "latest", limit=1000)
    assert found.fires == tuple(due_instants(spec, found.fires[0], now)) and found.fires[-1] == now
    assert found.fires[0] >= now - timedelta(seconds=ON_TIME_SECONDS)
    assert found.skipped is not None and found.skipped.count == count - len(found.fires) + 1
    assert found.next_due == next_after(spec, now)


def test_a_call_that_may_not_fire_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least one fire"):
        plan(HOURLY, NOON, NOON, "all", limit=0)


BERLIN_CHANGES = [datetime(2025, 3, 29, 20, tzinfo=UTC), datetime(2025, 10, 25, 20, tzinfo=UTC), NOON]
RAWS = (
    "@every 7s",
    "@every 1h",
    "* * * * *",
    "*/20 * * * * *",
    "30 2 * * *",
    "*/30 2 * * *",
    "0 0-23 * * *",
    "0 */2 * * *",
    "0 0 1 * *",
    "@once 2025-06-01T13:00:00",
)


def due_instants(spec: ScheduleSpec, due: datetime | None, now: datetime) -> list[datetime]:
    found = []
    while due is not None and due <= now:
        found.append(due)
        due = next_after(spec, due)
    return found


@pytest.mark.requirement("I7")
@given(
    raw=st.sampled_from(RAWS),
    policy=st.sampled_from(MisfirePolicy),
    begin=st.sampled_from(BERLIN_CHANGES),
    steps=st.lists(st.floats(0, 15_000), min_size=1, max_size=4),
    window=st.none() | st.floats(0, 30_000),
    limit=st.integers(1, 50),
    ends_after=st.none() | st.integers(3600, 30_000),
)
@settings(max_examples=150)
def test_every_due_instant_fires_or_is_skipped_exactly_once(
    raw: str,
    policy: MisfirePolicy,
    begin: datetime,
    steps: list[float],
    window: float | None,
    limit: int,
    ends_after: int | None,
) -> None:
    end = None if ends_after is None or raw.startswith("@once") else begin + timedelta(seconds=ends_after)
    spec = parse_schedule(raw, timezone="Europe/Berlin", end_at=end)
    first = cursor = next_after(spec, begin)
    now, settled, total = begin, [], 0
    for step in steps:
        now += timedelta(seconds=step)
        while cursor is not None and cursor <= now:
            found = plan(spec, cursor, now, policy, window=window, limit=limit)
            if found.skipped is not None:
                covered = due_instants(spec, found.skipped.first, found.skipped.last)
                assert len(covered) == found.skipped.count
                assert covered[-1] == found.skipped.last
                settled += covered
            settled += found.fires
            total += len(found.fires) + (found.skipped.count if found.skipped else 0)
            assert found.next_due is None or found.next_due > cursor
            cursor = found.next_due
    assert settled == due_instants(spec, first, now)
    assert total == len(settled)


@given(
    raw=st.sampled_from(RAWS),
    begin=st.sampled_from(BERLIN_CHANGES),
    offset=st.floats(0, 30_000),
    length=st.floats(0, 30_000),
)
@settings(max_examples=200)
def test_counting_and_finding_the_last_agree_with_walking(
    raw: str, begin: datetime, offset: float, length: float
) -> None:
    spec = parse_schedule(raw, timezone="Europe/Berlin")
    after = begin + timedelta(seconds=offset)
    through = after + timedelta(seconds=length)
    walked = due_instants(spec, next_after(spec, after), through)
    assert count_between(spec, after, through) == len(walked)
    assert latest_between(spec, after, through) == (walked[-1] if walked else None)


@pytest.mark.parametrize(
    ("raw", "last"),
    [
        ("* * * * JAN *", datetime(2025, 1, 31, 23, 59, 59, tzinfo=UTC)),
        ("* * * JAN *", datetime(2025, 1, 31, 23, 59, tzinfo=UTC)),
        ("0 0 29 2 *", datetime(2024, 2, 29, tzinfo=UTC)),
    ],
)
def test_the_last_fire_is_found_far_back(raw: str, last: datetime) -> None:
    found = latest_between(parse_schedule(raw), datetime(2000, 1, 1, tzinfo=UTC), datetime(2025, 12, 1, tzinfo=UTC))
    assert found == last


def test_the_last_fire_is_found_where_a_stride_back_lands_on_it() -> None:
    midnight = datetime(2025, 12, 1, tzinfo=UTC)
    found = latest_between(parse_schedule("1,4 0 0 * * *"), midnight - hours(1), midnight + timedelta(seconds=8))
    assert found == midnight + timedelta(seconds=4)


@pytest.mark.parametrize(
    ("most", "window", "first", "count", "reason"),
    [(3, None, 3, 4, SkipReason.OVER_LIMIT), (7, None, 0, 0, None), (7, 3, 3, 3, SkipReason.OUTSIDE_WINDOW)],
)
def test_all_runs_at_most_as_many_as_the_limit_the_newest(
    most: int, window: float | None, first: int, count: int, reason: SkipReason | None
) -> None:
    found = plan_fires(
        HOURLY,
        next_due=NOON,
        now=NOON + hours(6),
        policy=MisfirePolicy.ALL,
        window_seconds=None if window is None else window * 3600,
        limit=100,
        most_missed=most,
    )
    skipped = found.skipped
    assert (skipped.count if skipped else 0, skipped.reason if skipped else None) == (count, reason)
    assert found.fires == tuple(
        NOON + hours(n) for n in range(first if reason is not SkipReason.OVER_LIMIT else 7 - most, 7)
    )


APIA = {"kind": "cron", "timezone": "Pacific/Apia"}


@pytest.mark.parametrize(
    ("expression", "count"),
    [("0 12 * * *", 1), ("0 0,12 * * *", 2), ("0 12 30 12 *", 1), ("0 */2 * * *", None), ("0 12 29 12 *", None)],
)
def test_a_day_that_never_was_is_skipped_on_record(expression: str, count: int | None) -> None:
    """Samoa left out the 30th of December 2011: fired, caught up with, or taken through, it is the same record."""
    spec = parse_schedule(APIA | {"expression": expression})
    begin, end = datetime(2010, 12, 20, tzinfo=UTC), datetime(2012, 1, 5, tzinfo=UTC)
    at = datetime(2011, 12, 30, 10, tzinfo=UTC) - timedelta(microseconds=1)
    expected = [] if count is None else [SkipRange(first=at, last=at, count=count, reason=SkipReason.NEVER_WAS)]
    first = due = next_after(spec, begin)
    assert first is not None
    found: list[SkipRange] = []
    while due is not None and due <= end:
        step = plan(spec, due, due, "all")
        found += [step.missing] if step.missing else []
        due = step.next_due
    assert found == expected
    for policy in MisfirePolicy:
        assert [plan(spec, first, end, policy, None, 10_000).missing] == (expected or [None])
    policies = Policies(misfire=MisfirePolicy.ALL, window_seconds=None)
    for paused in ([], [(begin, end)]):
        course = simulate_schedule(spec, policies, first=begin, last=end, paused=paused)
        assert [skip for skip in course.skips if skip.reason is SkipReason.NEVER_WAS] == expected
