"""Writes the events of OpenLineage into the outbox, from which the leader sends them."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.engine.verbs import leader_verb


@dataclass(frozen=True, slots=True)
class EnqueuedLineage:
    """How many events were written, and for how many runs."""

    events: int
    runs: int


@leader_verb
async def enqueue_lineage(
    conn: AsyncConnection, *, shard: int, epoch: int, sink: str, limit: int, settle_seconds: float
) -> EnqueuedLineage:
    """Write the events of the next runs that ended, each once. A new leader continues after the last one."""
