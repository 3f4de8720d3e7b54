"""What the API answers to an agent that starts: the whole order, and by what numbers to go. The same on both sides of the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evertick.domain.attempt import AttemptOrder, Isolation, TaskKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """`lost_after_seconds`: an agent that is not heard for so long is given up."""

    heartbeat_seconds: float
    lost_after_seconds: float
    stop_grace_seconds: float
    log_head_bytes: int
    log_tail_bytes: int
    result_spill_bytes: int
    result_max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """`token` is good for all that follows, `renewal` to ask for a new one."""

    order: AttemptOrder
    uses_threads: bool
    limits: AgentLimits
    token: str = field(repr=False)
    renewal: str = field(repr=False)


def read_order(answer: Mapping[str, Any]) -> AgentOrder:
    """Raises KeyError, TypeError or ValueError for what no API of ours answers."""
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
