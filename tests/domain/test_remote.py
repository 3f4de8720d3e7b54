"""Names of attempts in remote places."""

from __future__ import annotations

import re

import pytest

from evertick.domain.agent_protocol import LONGEST_NAME, NamedAttempt, attempt_name, parse_name
from evertick.domain.attempt import TaskKey

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@pytest.mark.requirement("A11")
@pytest.mark.parametrize(
    ("key", "epoch", "session"),
    [
        (TaskKey(7, 0, -1), 1, 5),
        (TaskKey(7, 3, 0), 1, 2**63 - 1),
        (TaskKey(2**40, 9_999, 12_345), 678, 0xFEDCBA9876543210),
    ],
)
def test_a_name_says_which_attempt_it_is(key: TaskKey, epoch: int, session: int) -> None:
    name = attempt_name(key, epoch, session)
    assert LABEL.fullmatch(name) and len(name) <= LONGEST_NAME
    assert parse_name(name) == NamedAttempt(key=key, epoch=epoch, session=session)
    assert attempt_name(key, epoch, session) == name


def test_a_name_that_would_be_too_long_is_shortened_and_still_tells_attempts_apart() -> None:
    key = TaskKey(2**63 - 1, 2**31 - 1, 2**31 - 1)
    first, second = attempt_name(key, 2**31 - 1, 1), attempt_name(key, 2**31 - 2, 1)
    assert first != second
    for name in (first, second):
        assert LABEL.fullmatch(name) and len(name) <= LONGEST_NAME
        assert parse_name(name) == NamedAttempt(session=1)


@pytest.mark.parametrize("name", ["", "et-", "web-1", "et-1-2-3", "et-1-2-x-1-abc", "et-a-2-x-1-0000000000000001"])
def test_what_others_have_named_is_not_ours(name: str) -> None:
    assert parse_name(name) is None
