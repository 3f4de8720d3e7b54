"""What an agent and the API exchange: the start order, the outcome file, attempt names and token identities.

Shared by the API, runners and agents, so it parses strictly and does no I/O. An unknown or missing field is an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, urlsplit

from evertick.domain.attempt import AttemptOrder, Isolation, Outcome, OutcomeKind, TaskKey, Usage, session_text
from evertick.domain.errors import InvalidSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """`lost_after_seconds`: an agent that sends no heartbeat for this long is declared lost."""

    heartbeat_seconds: float
    lost_after_seconds: float
    stop_grace_seconds: float
    log_head_bytes: int
    log_tail_bytes: int
    result_spill_bytes: int
    result_max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """`token` authenticates every later request; `renewal` is used to request a new token."""

    order: AttemptOrder
    uses_threads: bool
    limits: AgentLimits
    token: str = field(repr=False)
    renewal: str = field(repr=False)


def read_order(answer: Mapping[str, Any]) -> AgentOrder:
    """Raises KeyError, TypeError or ValueError for a reply that Evertick's API does not send."""
    told = dict(answer["order"])
    key = TaskKey(told.pop("run_id"), told.pop("idx"), told.pop("map_index"))
    order = AttemptOrder(key=key, **{**told, "isolation": Isolation(told["isolation"])})
    return AgentOrder(
        order=order,
        uses_threads=bool(answer["uses_threads"]),
        limits=AgentLimits(**answer["limits"]),
        token=answer["token"],
        renewal=answer["renewal"],
    )


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
    except (ValueError, TypeError, LookupError, RecursionError):
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
    details = {
        "reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "no_retry": outcome.no_retry or None,
        "retry_after_seconds": outcome.retry_after_seconds,
        "usage": outcome.usage,
        "result": outcome.result_json,
    }
    fields: dict[str, Any] = {"evertick": _FORMAT, **outcome.key._asdict(), "epoch": outcome.epoch, "session": session}
    fields |= {"kind": outcome.kind, **{name: value for name, value in details.items() if value is not None}}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _outcome(found: dict[str, Any], key: TaskKey, epoch: int) -> Outcome:
    reason, result, code = found.get("reason"), found.get("result"), found.get("exit_code")
    after, used = found.get("retry_after_seconds"), found.get("usage")
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
        usage=None if used is None else Usage(float(used[0]), int(used[1])),
    )


# The limit of a DNS label, which most platforms use for names.
LONGEST_NAME = 63


_PATH = re.compile(r"[A-Za-z0-9/._~%-]*")


_NAME = re.compile(r"et-(\d+)-(\d+)-(\d+|x)-(\d+)-([0-9a-f]{16})")


_HASHED = re.compile(r"et-h[0-9a-f]{40}-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAttempt:
    """The parsed name. A shortened name contains only the session, which is unique to the attempt."""

    session: int
    key: TaskKey | None = None
    epoch: int | None = None


def attempt_name(key: TaskKey, epoch: int, session: int) -> str:
    """`session` is the attempt's own."""
    instance = "x" if key.map_index < 0 else key.map_index
    mark = session_text(session)
    name = f"et-{key.run_id}-{key.idx}-{instance}-{epoch}-{mark}"
    if len(name) <= LONGEST_NAME:
        return name
    return f"et-h{hashlib.sha256(name.encode()).hexdigest()[:40]}-{mark}"


_LAUNCHED = re.compile(r"er-[a-z0-9-]{1,24}-([0-9a-f]{16})")


def launched_name(fleet: str, mark: int) -> str:
    """Of a runner that a launcher starts, and of its object. `mark` is drawn once, in the place of a session."""
    return f"er-{fleet}-{session_text(mark)}"


def is_launched_name(name: str) -> bool:
    return _LAUNCHED.fullmatch(name) is not None


def parse_name(name: str) -> NamedAttempt | None:
    """None for a name that Evertick did not create."""
    if match := _LAUNCHED.fullmatch(name):
        return NamedAttempt(session=int(match[1], 16))
    if match := _HASHED.fullmatch(name):
        return NamedAttempt(session=int(match[1], 16))
    if not (match := _NAME.fullmatch(name)):
        return None
    key = TaskKey(int(match[1]), int(match[2]), -1 if match[3] == "x" else int(match[3]))
    return NamedAttempt(session=int(match[5], 16), key=key, epoch=int(match[4]))


def read_server_url(url: str) -> SplitResult:
    """The parts of a server's address. Raises InvalidSettings for anything else."""
    parts = urlsplit(url)
    try:
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port = False
    is_plain_path = _PATH.fullmatch(parts.path) and not parts.query and not parts.fragment
    if (
        not (parts.scheme in ("http", "https") and parts.hostname and has_port and not parts.username)
        or not is_plain_path
    ):
        # Never quote a URL that may contain a password.
        shown = "A URL with a user or a password" if "@" in url else repr(url)
        raise InvalidSettings(f"{shown} is not a server address. It must look like https://evertick.example.com")
    return parts


class TokenUse(StrEnum):
    """START begins the attempt or repeats that request; ATTEMPT authenticates every later request."""

    START = "start"
    ATTEMPT = "attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """The attempt that a token was issued for."""

    use: TokenUse
    key: TaskKey
    epoch: int
    session: int
    expires_at: int
