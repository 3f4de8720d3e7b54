"""The API's reply to an agent that starts: the complete order and the limits to apply. Shared by the API and the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evertick.domain.attempt import AttemptOrder, Isolation, TaskKey


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
