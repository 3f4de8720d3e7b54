"""Durations as authors and operators write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from evertick.domain.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("5 minutes", timedelta(minutes=5)),
        ("5min", timedelta(minutes=5)),
        ("1 Minute", timedelta(minutes=1)),
        ("10 mins", timedelta(minutes=10)),
        ("2 days", timedelta(days=2)),
        ("1 day 12 hours", timedelta(days=1, hours=12)),
        ("1.5 hrs", timedelta(minutes=90)),
        ("90 seconds", timedelta(seconds=90)),
        ("30 sec", timedelta(seconds=30)),
        ("2 weeks", timedelta(weeks=2)),
        ("250 milliseconds", timedelta(milliseconds=250)),
        ("1w2d3h4m5s6ms", timedelta(weeks=1, days=2, hours=3, minutes=4, seconds=5, milliseconds=6)),
        ("5m 30s", timedelta(minutes=5, seconds=30)),
        ("PT5M", timedelta(minutes=5)),
        ("P1DT2H", timedelta(days=1, hours=2)),
    ],
)
def test_a_length_may_be_written_with_letters_or_words(text: str, length: timedelta) -> None:
    assert parse_duration(text) == length


@pytest.mark.parametrize("text", ["2 months", "1mo", "1y", "3 years", "P1M", "P1Y2D"])
def test_a_length_without_a_fixed_number_of_days_is_refused_with_advice(text: str) -> None:
    with pytest.raises(ValueError, match="months and years have no fixed length"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "soon", "5", "m", "5 x", "5 minutess", "days", "2 days ago", "many"])
def test_what_is_no_length_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write a length such as 30s, 1h30m, 5 minutes"):
        parse_duration(text)
