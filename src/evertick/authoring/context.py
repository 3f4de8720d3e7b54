"""The context of a running task. Set by the process that runs it; read-only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from evertick.domain.errors import NotDeclared, UserError
from evertick.domain.misfire import latest_between
from evertick.domain.schedule import ScheduleSpec
from evertick.domain.schedule_fields import EARLIEST
from evertick.domain.stored_values import Connection

_running: ContextVar[TaskContext] = ContextVar("evertick_task")


class Declared(dict[str, Any]):
    """A task's declared values by name. The error for another name says how to declare it."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._kind = kind

    def __missing__(self, name: str) -> Any:
        if self._kind == "params":
            raise NotDeclared(f"the DAG declares no param {name!r}; it has: {', '.join(sorted(self)) or 'none'}.")
        raise NotDeclared(f"the task does not declare {name!r}; write @task({self._kind}=[{name!r}]).")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """One attempt of one task.

    `idempotency_key` is the same for every attempt: pass it to other systems, so that they recognize a repeated call.
    `epoch` rises with every attempt: a store that keeps the highest can refuse a writer that was replaced.
    `variables`, `connections` and `secrets` contain the values that the task declares.
    `pushed` contains the values that `push(name, value)` has named so far.
    """

    run_id: int
    dag: str
    task: str
    map_index: int = -1
    attempt: int = 1
    epoch: int = 1
    idempotency_key: str = ""
    fire_at: datetime | None = None
    schedule: ScheduleSpec | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("evertick.task"))
    cancelled: threading.Event = field(default_factory=threading.Event)
    variables: Mapping[str, Any] = field(default_factory=dict)
    connections: Mapping[str, Connection] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    pushed: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in ("params", "variables", "connections", "secrets"):
            object.__setattr__(self, kind, Declared(kind, getattr(self, kind)))

    @property
    def data_interval_start(self) -> datetime | None:
        """The fire before `fire_at`, if the DAG's file has one schedule; `fire_at` is the end of that interval."""
        if self.fire_at is None or self.schedule is None:
            return None
        return latest_between(self.schedule, EARLIEST, self.fire_at - timedelta(microseconds=1))

    def is_cancelled(self) -> bool:
        """Whether a stop was requested for this task; long loops should check it from time to time, and return."""
        return self.cancelled.is_set()


def current_context() -> TaskContext:
    """The context of the task that is running in this thread or coroutine."""
    try:
        return _running.get()
    except LookupError:
        raise UserError(
            "no task is running here: current_context() works only inside a running task. "
            "To test a task's function on its own, wrap the call in `with entered(TaskContext(...)):`."
        ) from None


def enter(context: TaskContext) -> None:
    """Make `context` the current one, until it is replaced."""
    _running.set(context)


@contextmanager
def entered(context: TaskContext) -> Iterator[TaskContext]:
    """Make `context` the current one within the block."""
    token = _running.set(context)
    try:
        yield context
    finally:
        _running.reset(token)
