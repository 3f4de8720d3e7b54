"""Runs and schedules as the native API shows them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from evertick.db.queries.runs import RunRow
from evertick.db.queries.schedules import ListedSchedule
from evertick.engine.fire_schedules import in_words


# Not one of the framework's models: a page of these is what is polled, and a model takes five times as long to make.
@dataclass(slots=True, kw_only=True)
class Run:
    run_id: int
    dag: str
    version: int
    kind: str
    key: str | None
    fire_at: datetime | None
    params: dict[str, Any]
    triggered_by: str
    created_at: datetime
    state: str
    is_canceling: bool
    open_tasks: int
    task_count: int
    retried: int
    started_at: datetime | None
    finished_at: datetime | None
    reason: str | None


class Schedule(BaseModel):
    dag: str
    name: str
    version: int
    when: str
    spec: dict[str, Any]
    params: dict[str, Any]
    misfire: str
    catchup_window_seconds: float
    catchup_limit: int | None
    overlap: str
    start_within_seconds: float | None
    finish_within_seconds: float | None
    delay_seconds: float
    is_paused: bool
    is_paused_itself: bool
    origin: str
    error: str | None
    next_due: datetime | None
    last_fired: datetime | None
    changed_by: str
    changed_at: datetime


def run_of(row: RunRow) -> Run:
    return Run(
        run_id=row.run_id,
        dag=row.dag,
        version=row.version,
        kind=row.kind,
        key=row.key,
        fire_at=row.fire_at,
        params=row.params,
        triggered_by=row.triggered_by,
        created_at=row.created_at,
        state=row.state,
        is_canceling=row.cancel_requested and row.finished_at is None,
        open_tasks=row.open_tasks,
        task_count=row.task_count,
        retried=row.retried,
        started_at=row.started_at,
        finished_at=row.finished_at,
        reason=row.reason,
    )


def schedule_of(row: ListedSchedule) -> Schedule:
    return Schedule(
        dag=row.dag,
        name=row.name,
        version=row.version,
        when=in_words(row.spec),
        spec=row.spec,
        params=row.params,
        misfire=row.misfire,
        catchup_window_seconds=row.window_seconds,
        catchup_limit=row.catchup_limit,
        overlap=row.overlap,
        start_within_seconds=row.start_within,
        finish_within_seconds=row.finish_within,
        delay_seconds=row.delay_seconds,
        is_paused=row.paused,
        is_paused_itself=row.is_held,
        origin=row.origin,
        error=row.error,
        next_due=row.next_due,
        last_fired=row.last_fired,
        changed_by=row.changed_by,
        changed_at=row.changed_at,
    )
