"""How many tasks a runner claims in advance: none nearby, none of long tasks, and twice as many as end within a round trip."""

from __future__ import annotations

import pytest

from evertick.runner.round_trips import MOST_HELD, RoundTrips

SLOTS = 32


def settled(ended: int, every_seconds: float, took_seconds: float) -> int:
    """After many exchanges like that."""
    trips, now, ahead = RoundTrips(SLOTS), 100.0, 0
    for _ in range(50):
        now += every_seconds
        ahead = trips.note(ended, now - took_seconds, now)
    return ahead


@pytest.mark.requirement("K8")
def test_it_is_twice_what_ends_within_a_round_trip() -> None:
    assert settled(32, 0.005, 0.005) == 0, "nearby a claim in advance gains nothing"
    assert settled(1, 10.0, 0.2) == 0, "no long task ends within a round trip"
    assert settled(32, 0.4, 0.2) == pytest.approx(32, abs=1)
    assert settled(32, 0.21, 0.2) == pytest.approx(60, abs=2)
    assert settled(500, 0.2, 0.2) == (MOST_HELD - 1) * SLOTS


def test_a_pause_ends_it() -> None:
    trips = RoundTrips(SLOTS)
    for number in range(20):
        trips.note(32, number * 0.21, number * 0.21 + 0.2)
    for number in range(1, 15):
        ahead = trips.note(0, 10.0 + 30 * number, 10.2 + 30 * number)
    assert ahead == 0
