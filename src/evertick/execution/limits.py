"""The limits of the local executor, each with its default."""

from __future__ import annotations

from dataclasses import dataclass, field

from evertick.execution.result_files import ResultFiles
from evertick.execution.seat import ReuseLimits
from evertick.execution.spool import LogCap


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """`min_stock` and `max_stock` bound the idle children of the process pool, per bundle."""

    max_parents: int = 8
    parent_age_seconds: float = 3600.0
    min_stock: int = 2
    max_stock: int = 32
    stock_decay_seconds: float = 5.0
    warm_idle_seconds: float = 30.0
    fetch_seconds: float = 600.0
    load_seconds: float = 60.0
    kill_confirm_seconds: float = 3.0
    coroutine_grace_seconds: float = 1.0
    inline_log_bytes: int = 64 * 1024
    log_cap: LogCap = field(default_factory=LogCap)
    reuse: ReuseLimits = field(default_factory=ReuseLimits)
    results: ResultFiles = field(default_factory=ResultFiles)
