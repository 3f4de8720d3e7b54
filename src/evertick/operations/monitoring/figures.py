"""The figures of DAGs and tasks: durations, waits, landing times, results, retries, CPU time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from evertick.db.queries.monitoring import figures
from evertick.db.queries.monitoring.figures import FigureRow
from evertick.domain.monitoring.quantiles import quantile
from evertick.operations.caller import Caller
from evertick.operations.dags import DagName
from evertick.operations.paging import USUAL_ITEMS, Cursor, Limit, Page, page_of, read_cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """The figures of a task, or of the runs of a DAG (`task` is empty), since its first run. Means are of successful
    ones, the median and the 90th percentile of the latest 50 of them. `wait_seconds`: for a slot or a gate;
    `landing_seconds`: from when the run was due to the end. Without a value there was none."""

    dag: str
    task: str
    succeeded: int
    failed: int
    other: int
    retries: int
    success_rate: float | None
    duration_seconds: float | None
    median_seconds: float | None
    p90_seconds: float | None
    wait_seconds: float | None
    landing_seconds: float | None
    cpu_seconds: float | None
    peak_memory_bytes: int | None
    counted_at: datetime


async def list_figures(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[TaskFigures]:
    """List the figures of the runs of each DAG."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        found = await figures.of_dags(conn, after=after, dag_ids=visible, limit=limit)
    return page_of(found, limit, lambda row: (row.dag,), figures_of)


async def show_figures(
    caller: Caller, *, dag: DagName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[TaskFigures]:
    """Show the figures of a DAG: first of its runs as a whole, then of each task by its name."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        (after,) = read_cursor(cursor, "")
        found = await figures.of_tasks(conn, dag_id=row.dag_id, after=after, is_first=cursor is None, limit=limit)
    return page_of(found, limit, lambda row: (row.task,), figures_of)


def figures_of(row: FigureRow) -> TaskFigures:
    ended = row.succeeded + row.failed + row.other
    judged = row.succeeded + row.failed
    recent = sorted(row.durations)
    return TaskFigures(
        dag=row.dag,
        task=row.task,
        succeeded=row.succeeded,
        failed=row.failed,
        other=row.other,
        retries=row.retries,
        success_rate=row.succeeded / judged if judged else None,
        duration_seconds=row.duration_seconds / row.succeeded if row.succeeded else None,
        median_seconds=quantile(recent, 0.5) if recent else None,
        p90_seconds=quantile(recent, 0.9) if recent else None,
        wait_seconds=row.wait_seconds / row.succeeded if row.succeeded else None,
        landing_seconds=row.landing_seconds / row.landed if row.landed else None,
        cpu_seconds=row.cpu_seconds / ended if ended and row.task else None,
        peak_memory_bytes=row.peak_memory_bytes,
        counted_at=row.counted_at,
    )
