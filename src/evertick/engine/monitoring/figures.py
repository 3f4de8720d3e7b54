"""Adds up the figures of DAGs and tasks from the runs that ended."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.engine.verbs import leader_verb


@dataclass(frozen=True, slots=True)
class AddedFigures:
    """What some ended runs added to the figures of one task, or of a DAG (`task` is empty). `runs`: how many runs were
    counted in this step, over all DAGs."""

    dag: str
    task: str
    succeeded: int
    failed: int
    other: int
    retries: int
    duration_seconds: float
    wait_seconds: float
    landed: int
    landing_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int | None
    runs: int


@leader_verb
async def count_figures(
    conn: AsyncConnection, *, shard: int, epoch: int, limit: int, settle_seconds: float
) -> list[AddedFigures]:
    """Count the next runs that ended, each once. A new leader continues after the last one that was counted."""
