"""The order that a runner executes and the outcome that it reports. Plain values that cross process boundaries."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

# A variable in the environment of every process that a fork server starts: the prefix of its spool, with the session in it.
FORK_SERVER_MARK = "EVERTICK_WARM_PARENT"
# Marks a value that JSON lacks in a stored result; see `attempts/typed_json`.
RESULT_TAG = "$evertick"
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class TaskKey(NamedTuple):
    """One task in one run. `map_index` is -1 unless the task is mapped."""

    run_id: int
    idx: int
    map_index: int


class AttemptRef(NamedTuple):
    """One attempt at a task, which its epoch identifies."""

    key: TaskKey
    epoch: int


class Usage(NamedTuple):
    """What an attempt used, with all processes that it started and waited for, as the operating system counted it."""

    cpu_seconds: float
    peak_memory_bytes: int


class RunnerRequest(StrEnum):
    """An operator's request to a runner: claim no new tasks, or exit as soon as it has none."""

    DRAIN = "drain"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The answer to a heartbeat: attempts that the runner no longer holds, attempts that it must stop, and attempts
    recorded as its own that its list lacked. `is_gone`: the runner was declared dead; it must stop everything and
    register again. `has_triggers`: triggers of its queues wait for a session that runs them."""

    is_gone: bool
    lost: list[AttemptRef]
    stop: list[AttemptRef]
    unknown: list[AttemptRef]
    request: RunnerRequest | None = None
    has_triggers: bool = False


def session_text(session: int) -> str:
    """A runner's session id as shown to people and used in file names: 16 hex digits. The database may store it signed."""
    return f"{session & 0xFFFFFFFFFFFFFFFF:016x}"


class Isolation(StrEnum):
    PROCESS = "process"
    WARM = "warm"


class OutcomeKind(StrEnum):
    """How an attempt ended, by cause. `engine/finish` turns it into a task state."""

    SUCCESS = "success"
    SKIPPED = "skipped"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    GIVEN_BACK = "given_back"
    LOST = "lost"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOrder:
    """Everything an executor needs to run one attempt; or the trigger of a deferred one, whose `inputs_json` describes
    it. `stop_grace_seconds`: how long it may take to stop when it is asked to, or exceeds its time limit."""

    key: TaskKey
    epoch: int
    session: int
    attempt: int
    dag: str
    task: str
    version_id: int
    bundle: str
    file: str
    fire_at: str
    params_json: str
    inputs_json: str
    timeout_seconds: float | None
    isolation: Isolation
    command: str | None = None
    stop_grace_seconds: float | None = None
    stops_on_lost_contact: bool = False
    asks: bool = False
    is_trigger: bool = False
    granted_json: str = field(default="", repr=False)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this task, so that a repeated side effect can be recognized."""
        key = self.key
        return f"evertick-{key.run_id}-{key.idx}-{key.map_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one attempt ended. `reason` is for people; `result_json` is the task's return value; `skips` are the
    tasks that a branch did not choose; `skip_names` are the same, by the task itself and not yet looked up.

    `start_seconds` is the time until the body began, set only if it was noticeable. `usage` is None where
    several attempts shared a process.
    `log` is the part of the attempt's log that was not shipped during the run: it covers the spool's bytes from
    `log_offset` to `log_end`, counted like those of a `LogChunk`, so that a part shipped twice is recognized.
    """

    key: TaskKey
    epoch: int
    kind: OutcomeKind
    reason: str | None = None
    result_json: str | None = None
    exit_code: int | None = None
    no_retry: bool = False
    retry_after_seconds: float | None = None
    skips: tuple[int, ...] = ()
    skip_names: tuple[str, ...] = ()
    start_seconds: float | None = None
    usage: Usage | None = None
    log: bytes = b""
    log_offset: int = 0
    log_end: int = 0


def storable_text(text: str) -> str:
    """Return the text as PostgreSQL can store it: NUL and lone surrogates become U+FFFD."""
    if text.isascii() and "\x00" not in text:
        return text
    return UNSTORABLE.sub("\ufffd", text)
