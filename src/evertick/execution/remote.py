"""What an executor elsewhere has to offer: take an attempt, show what there is, end it. All else is the runner's.

The name of an attempt is its key there: the same name twice is one thing. An executor decides nothing about tasks, and what it
shows may be old; `find` must not be.
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
    """What there is of an attempt. `outcome` is what its agent left (domain/agent_outcome.py); `reason` is the place's own word."""

    phase: Phase
    reason: str | None = None
    exit_code: int | None = None
    outcome: bytes | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOrder:
    """What an executor is told. The agent over there fetches the rest with the token. `place`: what DAG and task say about where
    and in what they want to run."""

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
        """Idempotent by `order.name`. After an error it may have been taken all the same."""

    async def observe(self) -> Mapping[str, Observed]:
        """Everything of ours that exists, by name."""

    async def find(self, name: str) -> Observed | None:
        """What there is under that name now. None must be certain: it is asked before something is given up."""

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """End it if it goes on, and take it away. Idempotent; returns before it is gone. Not there is success."""

    def hints(self) -> AsyncIterator[None]:
        """ "Something has changed, look again". Only a hint: whoever listens also looks by itself."""
