"""The outcome file: how an attempt ended, written by its agent for the executor. It fits in a pod's termination message.

It holds everything to record if only this file survives. If the result does not fit, the attempt is recorded as lost and
runs again. An unreadable file, or one of another attempt, is ignored: user code can write to the same place.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey

MOST_BYTES = 4096
_FORMAT = 1
_TOO_LARGE = "result_lost: the result is too large for the agent's outcome file and did not reach the API"


def to_bytes(outcome: Outcome, *, session: int) -> bytes:
    """At most MOST_BYTES. The log is not included: the agent ships it separately."""
    text = _text(outcome, session)
    if len(text) > MOST_BYTES and outcome.result_json is not None:
        outcome = replace(outcome, kind=OutcomeKind.LOST, reason=_TOO_LARGE, result_json=None, exit_code=None)
        text = _text(outcome, session)
    reason = outcome.reason or ""
    while len(text) > MOST_BYTES:
        reason = reason[: len(reason) * 3 // 4]
        text = _text(replace(outcome, reason=f"{reason}…"), session)
    return text


def parse(raw: bytes, *, key: TaskKey, epoch: int, session: int) -> Outcome | None:
    """The outcome written by exactly that attempt; None for anything else."""
    if len(raw) > MOST_BYTES:
        return None
    try:
        found = json.loads(raw)
        whose = [found["run_id"], found["idx"], found["map_index"], found["epoch"], found["session"]]
        if found["evertick"] != _FORMAT or whose != [*key, epoch, session]:
            return None
        return _outcome(found, key, epoch)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def refusal_to_bytes(why: str) -> bytes:
    """The file of an agent that could not begin its attempt: the reason, for people. It records no outcome."""
    while len(text := json.dumps({"evertick": _FORMAT, "not_begun": why}, ensure_ascii=False).encode()) > MOST_BYTES:
        why = f"{why[: len(why) * 3 // 4]}…"
    return text


def parse_refusal(raw: bytes | None) -> str | None:
    if raw is None or len(raw) > MOST_BYTES:
        return None
    try:
        found = json.loads(raw)["not_begun"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return " ".join(found.split()) if isinstance(found, str) else None


def _text(outcome: Outcome, session: int) -> bytes:
    key = outcome.key
    fields: dict[str, Any] = {"evertick": _FORMAT, **key._asdict(), "epoch": outcome.epoch, "session": session}
    fields["kind"] = outcome.kind.value
    if outcome.reason is not None:
        fields["reason"] = outcome.reason
    if outcome.exit_code is not None:
        fields["exit_code"] = outcome.exit_code
    if outcome.no_retry:
        fields["no_retry"] = True
    if outcome.retry_after_seconds is not None:
        fields["retry_after_seconds"] = outcome.retry_after_seconds
    if outcome.result_json is not None:
        fields["result"] = outcome.result_json
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _outcome(found: dict[str, Any], key: TaskKey, epoch: int) -> Outcome:
    reason, result, code = found.get("reason"), found.get("result"), found.get("exit_code")
    after = found.get("retry_after_seconds")
    if not isinstance(reason, str | None) or not isinstance(result, str | None) or not isinstance(code, int | None):
        raise TypeError
    if result is not None:
        json.loads(result)
    return Outcome(
        key=key,
        epoch=epoch,
        kind=OutcomeKind(found["kind"]),
        reason=reason,
        result_json=result,
        exit_code=code,
        no_retry=found.get("no_retry") is True,
        retry_after_seconds=None if after is None else float(after),
    )
