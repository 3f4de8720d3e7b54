"""The second reckoning of schedules and retries agrees with two others that it shares no code with."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from evertick.domain.retry import Backoff, RetryPolicy, delay_before
from evertick.domain.schedules.spec import next_after, parse_schedule
from tests.chaos.expected import fires, shortest_delay
from tests.domain import cron_oracle

DAY = timedelta(days=1)
NOW = datetime(2025, 10, 26, tzinfo=UTC)


def of(text: object, after: datetime, through: datetime, **options: str) -> list[datetime]:
    spec = json.loads(parse_schedule(text, **options).to_json())  # type: ignore[arg-type]
    return list(fires(spec, after, through))


@st.composite
def expressions(draw: st.DrawFn) -> str:
    def part(low: int, high: int) -> str:
        first = draw(st.integers(low, high))
        last = draw(st.integers(first, high))
        return draw(st.sampled_from(["*", f"*/{max(first, 1)}", f"{first}", f"{first}-{last}", f"{first},{last}"]))

    return f"{part(0, 59)} {part(0, 23)} {part(1, 28)} {part(1, 12)} {part(0, 6)}"


@settings(max_examples=60)
@given(expressions(), st.datetimes(datetime(2024, 1, 1), datetime(2026, 1, 1)))
def test_cron_in_utc_is_what_cronsim_says(expression: str, begin: datetime) -> None:
    after = begin.replace(tzinfo=UTC)
    through = after + DAY
    theirs = []
    for instant in CronSim(expression, after):
        if instant > through:
            break
        theirs.append(instant)
    assert of(expression, after, through) == theirs


@pytest.mark.parametrize("expression", [*cron_oracle.EXPRESSIONS, "*/20 30 1 * * *", "15 */10 2 * * *"])
@pytest.mark.parametrize(
    ("zone", "begin"),
    [
        ("Europe/Berlin", datetime(2025, 3, 29, 12)),
        ("Europe/Berlin", datetime(2025, 10, 25, 12)),
        ("America/New_York", datetime(2025, 3, 8, 18)),
        ("America/New_York", datetime(2025, 11, 1, 18)),
        ("Australia/Lord_Howe", datetime(2025, 10, 4)),
        ("Australia/Lord_Howe", datetime(2025, 4, 5)),
        ("Pacific/Apia", datetime(2011, 12, 29)),
        ("Asia/Kolkata", datetime(2025, 5, 5)),
    ],
)
def test_cron_over_a_change_of_the_clocks_is_what_the_slow_oracle_says(
    expression: str, zone: str, begin: datetime
) -> None:
    step = timedelta(seconds=1 if len(expression.split()) == 6 else 60)
    after, through = begin.replace(tzinfo=UTC), begin.replace(tzinfo=UTC) + DAY
    if step.seconds == 1:
        after, through = after + timedelta(hours=10), after + timedelta(hours=18)
    ticks = cron_oracle.ticks_between(zone, after, through, step)
    assert of(expression, after, through, timezone=zone) == cron_oracle.fires(expression, ticks)


@settings(max_examples=50)
@given(
    st.one_of(
        st.integers(500, 100_000).map(lambda ms: timedelta(milliseconds=ms)),
        st.datetimes(datetime(2025, 10, 26), datetime(2025, 10, 27)).map(lambda at: at.replace(tzinfo=UTC)),
        st.sampled_from(["@hourly", "*/7 * * * * *", "5,10 0 */3 * * *", "0 0 * * SUN", "@daily"]),
    ),
    st.timedeltas(timedelta(0), timedelta(hours=3)),
)
def test_every_kind_is_what_the_program_says(raw: object, shift: timedelta) -> None:
    """The three reckonings differ in everything but the rule, so it is the rule that they agree on."""
    schedule = parse_schedule(raw, start_at=NOW - DAY + shift, end_at=NOW + 8 * DAY + shift)
    mine = list(fires(json.loads(schedule.to_json()), NOW, NOW + timedelta(minutes=150)))
    theirs, at = [], next_after(schedule, NOW)
    while at is not None and at <= NOW + timedelta(minutes=150):
        theirs.append(at)
        at = next_after(schedule, at)
    assert mine == theirs


def test_what_it_cannot_reckon_it_refuses() -> None:
    with pytest.raises(ValueError, match="teach expected"):
        of("0 0 L * *", NOW, NOW + DAY)
    with pytest.raises(ValueError, match="teach expected"):
        list(fires({"kind": "moon"}, NOW, NOW + DAY))


@given(
    st.integers(1, 12),
    st.sampled_from(list(Backoff)),
    st.floats(0, 100),
    st.one_of(st.none(), st.floats(100, 500)),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_no_retry_comes_sooner_than_the_shortest_delay(
    failures: int, backoff: Backoff, delay: float, cap: float | None, jitter: float, luck: float
) -> None:
    policy = RetryPolicy(delay_seconds=delay, backoff=backoff, max_delay_seconds=cap, jitter=jitter)
    retry = json.loads(policy.to_json())
    shortest = shortest_delay(retry, failures)
    assert shortest <= delay_before(policy, failures, luck) + 1e-6
    assert shortest == pytest.approx(delay_before(policy, failures, 1.0))
