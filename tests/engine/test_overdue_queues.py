"""Whose head goes first because it waited too long, and how often a runner asks."""

from __future__ import annotations

import pytest

from evertick.engine.finish_and_claim import LOOK_SECONDS, RANKS, AgingTurns, overdue


@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        ({}, []),
        ({9: 1e9}, []),
        ({0: 0.0, 9: 90.0}, []),
        ({0: 0.0, 9: 90.1}, [9]),
        ({0: 1e6, 9: 90.1}, [9]),
        ({4: 0.0, 9: 50.1}, [9]),
        ({4: 0.0, 5: 10.1, 9: 50.05}, [5, 9]),
        ({0: 0.0, 5: 50.1, 9: 190.0}, [9, 5]),
        ({5: 0.0, RANKS + 5: 10.1}, [RANKS + 5]),
        ({5: 0.0, RANKS: 10.0}, []),
        ({5: 0.0, RANKS + 7: 20.1}, [RANKS + 7]),
    ],
)
def test_a_head_that_waited_longer_than_its_levels_allow_goes_first(
    waited: dict[int, float], expected: list[int]
) -> None:
    assert overdue(waited, 10.0) == expected


def test_a_runner_asks_now_and_then_and_never_twice_in_a_row() -> None:
    turns = AgingTurns(60.0)
    asked = [turns.take(100 + n * LOOK_SECONDS / 4) for n in range(9)]
    assert asked == [60.0, None, None, None, 60.0, None, None, None, 60.0]
    seldom = [turns.take(200 + n * 10 * LOOK_SECONDS) for n in range(4)]
    assert seldom == [None, 60.0, None, 60.0]


def test_an_ageing_of_zero_is_strict() -> None:
    turns = AgingTurns(0.0)
    assert [turns.take(float(n)) for n in range(5)] == [None] * 5
