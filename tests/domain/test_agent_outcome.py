"""What an agent leaves behind says how its attempt ended, in 4,096 bytes, and nothing about another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evertick.domain.agent_protocol import MOST_BYTES, parse, parse_refusal, refusal_to_bytes, to_bytes
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey

KEY = TaskKey(5, 1, -1)
WHOLE = Outcome(key=KEY, epoch=2, kind=OutcomeKind.SUCCESS, result_json='{"rows": [1, 2], "é": "\\u0000"}', exit_code=0)


def back(raw: bytes, key: TaskKey = KEY, epoch: int = 2, session: int = 9) -> Outcome | None:
    return parse(raw, key=key, epoch=epoch, session=session)


@pytest.mark.parametrize(
    "outcome",
    [
        WHOLE,
        replace(WHOLE, result_json=None),
        Outcome(key=KEY, epoch=2, kind=OutcomeKind.FAILED, reason="ValueError: é\n", exit_code=1, no_retry=True),
        Outcome(key=KEY, epoch=2, kind=OutcomeKind.FAILED, reason="later", retry_after_seconds=2.5),
        Outcome(key=KEY, epoch=2, kind=OutcomeKind.GIVEN_BACK, reason="the pod was deleted"),
    ],
)
def test_it_comes_back_as_it_was(outcome: Outcome) -> None:
    assert back(to_bytes(outcome, session=9)) == outcome


def test_a_log_stays_out_of_it() -> None:
    assert back(to_bytes(replace(WHOLE, log=b"secret", log_end=6), session=9)) == WHOLE


def test_a_result_that_does_not_fit_is_recorded_as_lost_and_never_as_a_success_without_it() -> None:
    raw = to_bytes(replace(WHOLE, result_json=json.dumps("x" * MOST_BYTES)), session=9)
    found = back(raw)
    assert found is not None and found.kind is OutcomeKind.LOST and found.result_json is None
    assert found.reason is not None and found.reason.startswith("result_lost: ") and len(raw) <= MOST_BYTES


@pytest.mark.parametrize("letter", ["x", "é", "\x00", "\ud800", '"', "😀"])
def test_a_reason_of_any_length_and_letter_is_cut(letter: str) -> None:
    raw = to_bytes(Outcome(key=KEY, epoch=2, kind=OutcomeKind.FAILED, reason=letter * 10_000), session=9)
    found = back(raw)
    assert len(raw) <= MOST_BYTES
    assert found is not None and found.reason is not None and found.reason.endswith("…") and len(found.reason) > 400


def test_another_attempts_outcome_says_nothing() -> None:
    raw = to_bytes(WHOLE, session=9)
    assert back(raw) is not None
    assert back(raw, session=8) is None
    assert back(raw, epoch=3) is None
    assert back(raw, key=TaskKey(5, 2, -1)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "excellent"},
        {"reason": 5},
        {"result": [1]},
        {"result": "{"},
        {"exit_code": "0"},
        {"evertick": 2},
        {"retry_after_seconds": "soon"},
    ],
)
def test_what_nobody_of_ours_wrote_says_nothing(change: dict[str, object]) -> None:
    fields = json.loads(to_bytes(WHOLE, session=9))
    assert back(json.dumps(fields).encode()) == WHOLE
    assert back(json.dumps(fields | change).encode()) is None


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff", b"{}", b"[" * 4000, b" " * 5000, b"OOMKilled"])
def test_what_is_no_outcome_says_nothing(raw: bytes) -> None:
    assert back(raw) is None


def test_why_an_agent_never_began_comes_back_and_is_no_outcome() -> None:
    raw = refusal_to_bytes("no token\nof an attempt: é")
    assert parse_refusal(raw) == "no token of an attempt: é" and back(raw) is None
    long = refusal_to_bytes("é" * MOST_BYTES)
    assert len(long) <= MOST_BYTES and (parse_refusal(long) or "").endswith("é…")


@pytest.mark.parametrize("raw", [None, b"", b"[]", b'{"not_begun": 1}', b"x" * 5000, to_bytes(WHOLE, session=9)])
def test_what_is_no_refusal_says_nothing(raw: bytes | None) -> None:
    assert parse_refusal(raw) is None
