"""The interface of a remote executor: submit an attempt, list attempts, end one. Everything else is done by the runner.

An attempt's name is its key at the executor: submitting a name twice is the same as once. An executor decides nothing
about tasks. Its listing may be stale; `find` must not be.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from evertick.config import Settings
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable, SubmissionRefused

__all__ = [
    "ExecutorBusy",
    "ExecutorUnavailable",
    "Observed",
    "Order",
    "Phase",
    "RemoteExecutor",
    "RemoteOrder",
    "RunnerOrder",
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

    @property
    def what(self) -> str:
        return f"task {self.task!r}"

    @property
    def labels(self) -> dict[str, str]:
        return {"dag": self.dag, "task": self.task, "run": str(self.key.run_id), "queue": self.queue}

    def command(self, settings: Settings) -> list[str]:
        return shlex.split(settings.agent_command)

    def variables(self, *, token_file: str | None = None, outcome_file: str | None = None) -> dict[str, str]:
        """Without a file for it the token itself is one."""
        token = {"TOKEN_FILE": token_file} if token_file else {"TOKEN": self.token}
        outcome = {"OUTCOME_FILE": outcome_file} if outcome_file else {}
        ours = {f"EVERTICK_AGENT_{name}": value for name, value in {**token, **outcome}.items()}
        return {"EVERTICK_SERVER": self.api_url, **ours}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOrder:
    """The order for a whole runner, which joins over HTTPS. `session`: the mark in its name; `given`: its settings."""

    name: str
    session: int
    fleet: str
    queue: str
    token: str = field(repr=False)
    api_url: str
    place: Mapping[str, object] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def what(self) -> str:
        return f"a runner of fleet {self.fleet!r}"

    @property
    def labels(self) -> dict[str, str]:
        return {"fleet": self.fleet, "queue": self.queue}

    def command(self, settings: Settings) -> list[str]:
        return shlex.split(settings.launched_command)

    def variables(self, *, token_file: str | None = None, outcome_file: str | None = None) -> dict[str, str]:
        """It leaves no outcome: the database knows everything about a runner."""
        token = {"EVERTICK_RUNNER_TOKEN_FILE": token_file} if token_file else {"EVERTICK_RUNNER_TOKEN": self.token}
        return {**self.given, "EVERTICK_RUNNER_SERVER": self.api_url, "EVERTICK_RUNNER_ID": self.name, **token}


# What an executor starts. It treats both alike.
Order = RemoteOrder | RunnerOrder


class RemoteExecutor(Protocol):
    """Every method may raise `ExecutorBusy` or `ExecutorUnavailable`; `submit` also `SubmissionRefused`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def submit(self, order: Order) -> None:
        """Idempotent by `order.name`. After an error it may have been accepted nevertheless."""

    async def observe(self) -> Mapping[str, Observed]:
        """Every attempt of this installation, by name."""

    async def find(self, name: str) -> Observed | None:
        """The current state under that name. None must be certain: it decides whether an attempt is lost."""

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """End it if it is running, and delete it. Idempotent; returns before it is gone. A missing one is a success."""

    def hints(self) -> AsyncIterator[None]:
        """A signal that something has changed. Only a hint: the runner also lists periodically."""
