"""Times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from evertick.domain.durations import length, relative, took

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "now"),
        (-12.9, "12 s ago"),
        (5 * 60, "in 5 min"),
        (-3 * 3600, "3 h ago"),
        (49 * 3600, "in 2 d"),
        (-400 * 86_400, "400 d ago"),
    ],
)
def test_a_moment_is_told_by_its_distance(seconds: float, text: str) -> None:
    assert relative(NOW + timedelta(seconds=seconds), NOW) == text


def test_what_never_was_is_a_dash() -> None:
    assert relative(None, NOW) == "-"
    assert took(None, None, NOW) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"),
        (0.35, "350 ms"),
        (0.9999, "1 s"),
        (1.25, "1.2 s"),
        (30, "30 s"),
        (59.99, "1 min"),
        (303, "5 min 3 s"),
        (3600, "1 h"),
        (7320, "2 h 2 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_length_has_at_most_two_units(seconds: float, text: str) -> None:
    assert length(seconds) == text


def test_what_runs_lasts_until_now() -> None:
    assert took(NOW - timedelta(seconds=90), None, NOW) == "1 min 30 s"
    assert took(NOW + timedelta(seconds=1), None, NOW) == "0 ms"
