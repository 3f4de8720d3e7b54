"""Where one bundle's attempts run: its warm parent, the children waiting in stock, and the orders waiting for a child.

Decides who runs where; what became of an attempt is told to its `Host`. Never starts two bodies for one order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.execution.child_link import Attempt, ChildLink
from evertick.execution.parent_link import ParentEvents, ParentLink
from evertick.execution.protocol import Report, read_report, start_frame
from evertick.execution.seat import ReuseLimits
from evertick.execution.spool import AttemptLog, LogCap

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 15.0


class BundlePlace(NamedTuple):
    """Where a bundle's code lies. One whose import starts threads is imported anew in each process, never forked."""

    path: Path
    uses_threads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """Every number of the local executor."""

    max_parents: int = 8
    parent_age_seconds: float = 3600.0
    min_stock: int = 2
    max_stock: int = 32
    stock_decay_seconds: float = 5.0
    load_seconds: float = 60.0
    kill_confirm_seconds: float = 3.0
    coroutine_grace_seconds: float = 1.0
    log_cap: LogCap = field(default_factory=LogCap)
    inline_log_bytes: int = 64 * 1024
    reuse: ReuseLimits = field(default_factory=ReuseLimits)


class Host(Protocol):
    """Who is told how attempts go."""

    def started(self, attempt: Attempt) -> None: ...
    def reported(self, attempt: Attempt, report: Report) -> None: ...
    def died(self, attempt: Attempt, wait_status: int) -> None: ...
    def lost(self, attempt: Attempt, kind: OutcomeKind, reason: str, log_text: str = "") -> None: ...


class BundleHome:
    def __init__(self, host: Host, place: BundlePlace, file: str, spool: Path, limits: ExecutorLimits) -> None:
        self._host = host
        self._place = place
        self._file = file
        self._spool = spool
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._events = ParentEvents(
            ready=self._parent_ready,
            broken=self._parent_broken,
            unforkable=self._parent_unforkable,
            born=self._child_born,
            message=self._child_said,
            dead=self._child_dead,
            gone=self._parent_gone,
        )
        self._imports_in_child = place.uses_threads
        self._parents: set[ParentLink] = set()
        self._parent: ParentLink | None = None
        self._waiting: deque[Attempt] = deque()
        self._idle: deque[ChildLink] = deque()
        self._warm: list[ChildLink] = []
        self._shared: ChildLink | None = None
        self._coroutine_tasks: set[tuple[str, str]] = set()
        self._stock = limits.min_stock
        self._last_miss_at = 0.0
        self._failure: tuple[str, str] | None = None
        self._backoff_seconds = 0.0
        self._retry_at = 0.0
        self.last_used_at = self._loop.time()
'''
