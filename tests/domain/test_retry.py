"""Retry policies: the delays they give, and what they refuse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertick.domain.errors import InvalidDag
from evertick.domain.retry import Backoff, RetryPolicy, delay_before


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (Backoff.FIXED, [10, 10, 10, 10, 10]),
        (Backoff.LINEAR, [10, 20, 30, 40, 45]),
        (Backoff.EXPONENTIAL, [10, 20, 40, 45, 45]),
    ],
)
def test_delays_grow_by_the_policy_up_to_its_cap(backoff: Backoff, delays: list[float]) -> None:
    policy = RetryPolicy(retries=5, delay_seconds=10, backoff=backoff, max_delay_seconds=45)
    assert [delay_before(policy, failures, 0.5) for failures in range(1, 6)] == delays


def test_a_fixed_delay_does_not_heed_the_cap_on_growth() -> None:
    assert delay_before(RetryPolicy(delay_seconds=7200), 3, 0.0) == 7200


@pytest.mark.parametrize(
    ("jitter", "unit_random", "delay"), [(0.0, 0.9, 100), (0.2, 0.0, 100), (0.2, 0.5, 90), (1.0, 0.75, 25)]
)
def test_jitter_only_shortens(jitter: float, unit_random: float, delay: float) -> None:
    policy = RetryPolicy(delay_seconds=100, jitter=jitter)
    assert delay_before(policy, 1, unit_random) == pytest.approx(delay)


@given(
    backoff=st.sampled_from(Backoff),
    delay_seconds=st.floats(0, 365 * 86_400),
    has_cap=st.booleans(),
    jitter=st.floats(0, 1),
    failures=st.integers(1, 10**30),
    unit_random=st.floats(0, 1, exclude_max=True),
)
def test_any_delay_is_finite_and_within_its_cap(
    backoff: Backoff, delay_seconds: float, has_cap: bool, jitter: float, failures: int, unit_random: float
) -> None:
    cap = delay_seconds * 1.5 if has_cap and delay_seconds * 1.5 <= 365 * 86_400 else None
    policy = RetryPolicy(delay_seconds=delay_seconds, backoff=backoff, max_delay_seconds=cap, jitter=jitter)
    longest = delay_before(policy, failures, 0.0)
    assert delay_seconds <= longest <= (cap if cap is not None and backoff is not Backoff.FIXED else 365 * 86_400)
    delay = delay_before(policy, failures, unit_random)
    assert math.isfinite(delay)
    assert longest * (1 - jitter) * (1 - 1e-9) <= delay <= longest
    assert longest <= delay_before(policy, failures + 1, 0.0)


def test_a_policy_reads_back_as_it_was_and_in_one_spelling() -> None:
    policy = RetryPolicy(retries=3, delay_seconds=5, backoff=Backoff.EXPONENTIAL, max_delay_seconds=None, jitter=1)
    text = '{"backoff":"exponential","delay_seconds":5.0,"jitter":1.0,"max_delay_seconds":null,"retries":3}'
    assert policy.to_json() == text
    assert RetryPolicy.from_json(text) == policy
    assert RetryPolicy.from_json("{}") == RetryPolicy()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"retries": -1}, "retries is -1"),
        ({"retries": 1.5}, "retries is 1.5"),
        ({"retries": True}, "retries is True"),
        ({"retries": 10**9}, "from 0 to 10000"),
        ({"delay_seconds": -1}, "delay_seconds is -1"),
        ({"delay_seconds": None}, "delay_seconds is None"),
        ({"delay_seconds": float("nan")}, "delay_seconds is nan"),
        ({"delay_seconds": float("inf")}, "delay_seconds is inf"),
        ({"delay_seconds": "5"}, "delay_seconds is '5'"),
        ({"max_delay_seconds": -1}, "max_delay_seconds is -1"),
        ({"jitter": 1.1}, "jitter is 1.1"),
        ({"jitter": -0.1}, "jitter is -0.1"),
        ({"backoff": "random"}, "fixed, linear, exponential"),
        ({"delay_seconds": 7200, "backoff": Backoff.LINEAR}, "less than delay_seconds 7200"),
    ],
)
def test_an_impossible_policy_is_refused_by_name(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidDag) as refusal:
        RetryPolicy(**fields)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[]", "5", '"x"', '{"colour":1}', '{"backoff":"random"}', '{"retries":-1}'])
def test_stored_text_that_is_not_a_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidDag):
        RetryPolicy.from_json(text)


def test_a_delay_without_a_failure_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least one"):
        delay_before(RetryPolicy(), 0, 0.0)
