"""The interface of a remote executor: submit an attempt, list attempts, end one. Everything else is done by the runner.

An attempt's name is its key at the executor: submitting a name twice is the same as once. An executor decides nothing
about tasks. Its listing may be stale; `find` must not be.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable, SubmissionRefused

__all__ = [
    "ExecutorBusy",
    "ExecutorUnavailable",
    "Observed",
    "Phase",
    "RemoteExecutor",
    "RemoteOrder",
    "SubmissionRefused",
]


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The state of an attempt at the executor. `outcome` is the file that its agent left (domain/agent_protocol.py), also
    while the agent runs, if the executor can read it then; `reason` is the executor's own description;
    `is_being_deleted`: its deletion was requested and is not complete."""

    phase: Phase
    reason: str | None = None
    exit_code: int | None = None
    outcome: bytes | None = None
    since: datetime | None = None
    is_being_deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOrder:
    """The order for an executor. The agent fetches the rest with the token. `place`: the executor options of the DAG
    and the task."""

    name: str
    key: TaskKey
    epoch: int
    session: int
    dag: str
    task: str
    queue: str
    bundle: str
    token: str = field(repr=False)
    api_url: str
    place: Mapping[str, object] = field(default_factory=dict)


class RemoteExecutor(Protocol):
    """Every method may raise `ExecutorBusy` or `ExecutorUnavailable`; `submit` also `SubmissionRefused`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def submit(self, order: RemoteOrder) -> None:
        """Idempotent by `order.name`. After an error it may have been accepted nevertheless."""

    async def observe(self) -> Mapping[str, Observed]:
        """Every attempt of this installation, by name."""

    async def find(self, name: str) -> Observed | None:
        """The current state under that name. None must be certain: it decides whether an attempt is lost."""

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """End it if it is running, and delete it. Idempotent; returns before it is gone. A missing one is a success."""

    def hints(self) -> AsyncIterator[None]:
        """A signal that something has changed. Only a hint: the runner also lists periodically."""
