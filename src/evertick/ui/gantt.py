"""When the tasks of a run waited and ran, as bars on one line of time. Pure.

What is on record: when each attempt began and ended, and that a task may begin when the last one before it has ended. What lies
between is told by its cause: a retry's delay, a gate (for a task that has gates: with the queue behind it), or the queue. A
queue's wait ends when a runner takes the task, which is when the attempt begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from evertick.store.charts import RunAttempt
from evertick.store.tasks import TaskRow

WAITS = {
    "gate": "waited for a gate, and then for a runner",
    "queue": "waited for a runner",
    "retry": "waited to be tried again",
}
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`kind` is one of WAITS, or `run`. `is_open`: it is still so."""

    kind: str
    state: str
    begin: datetime
    end: datetime
    is_open: bool = False
    attempt: int = 0
    reason: str | None = None
    # In per cent of the chart's width.
    x: float = 0.0
    width: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.end - self.begin).total_seconds()


@dataclass(frozen=True, slots=True)
class Line:
    idx: int
    map_index: int
    task: str
    state: str
    bars: Sequence[Bar]

    def seconds(self, kind: str) -> float:
        return sum(bar.seconds for bar in self.bars if bar.kind == kind)


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Gantt:
    begin: datetime
    seconds: float
    lines: Sequence[Line]
    ticks: Sequence[Tick]
    left_out: int


def draw(
    rows: Sequence[TaskRow],
    attempts: Iterable[RunAttempt],
    edges: Iterable[tuple[int, int]],
    *,
    begin: datetime,
    now: datetime,
    most: int,
) -> Gantt:
    """`begin` is when the run began; what has not ended is drawn until `now`."""
    tries: dict[tuple[int, int], list[RunAttempt]] = defaultdict(list)
    for each in attempts:
        tries[each.idx, each.map_index].append(each)
    ready = _ready_at(rows, edges, begin)
    lines = [_line(row, tries[row.idx, row.map_index], ready.get(row.idx), now) for row in rows]
    shown = [line for line in lines if line.bars]
    shown.sort(key=lambda line: (line.bars[0].begin, line.idx, line.map_index))
    left_out = max(len(shown) - most, 0)
    shown = shown[:most]
    first = min((line.bars[0].begin for line in shown), default=begin)
    first = min(first, begin)
    last = max((bar.end for line in shown for bar in line.bars), default=now)
    seconds = max((last - first).total_seconds(), 0.001)
    return Gantt(first, seconds, [_scaled(line, first, seconds) for line in shown], _ticks(seconds), left_out)


def _ready_at(
    rows: Sequence[TaskRow], edges: Iterable[tuple[int, int]], begin: datetime
) -> Mapping[int, datetime | None]:
    """When the last task before each had ended; None where one has not."""
    ended: dict[int, datetime | None] = {}
    for row in rows:
        earlier = ended.get(row.idx, begin)
        ended[row.idx] = None if earlier is None or row.finished_at is None else max(earlier, row.finished_at)
    ready: dict[int, datetime | None] = {row.idx: begin for row in rows}
    for src, dst in edges:
        one, other = ready.get(dst), ended.get(src)
        ready[dst] = None if one is None or other is None else max(one, other)
    return ready


def _line(row: TaskRow, tries: Sequence[RunAttempt], ready: datetime | None, now: datetime) -> Line:
    bars: list[Bar] = []
    is_gated = any(each.is_gated for each in tries)
    free_at = ready
    for each in tries:
        if each.started_at is None:
            continue
        if free_at is not None and free_at < each.started_at:
            kind = "retry" if bars else "gate" if is_gated else "queue"
            bars.append(Bar(kind=kind, state="pending", begin=free_at, end=each.started_at))
        free_at = each.finished_at or now
        is_open = each.finished_at is None
        end = max(free_at, each.started_at)
        bars.append(
            Bar(
                kind="run",
                state=each.outcome,
                begin=each.started_at,
                end=end,
                is_open=is_open,
                attempt=each.attempt,
                reason=each.reason,
            )
        )
    if row.state in ("pending", "available") and free_at is not None and free_at < now:
        kind = "queue" if row.state == "available" else "retry" if row.not_before else "gate"
        bars.append(Bar(kind=kind, state=row.state, begin=free_at, end=now, is_open=True))
    return Line(row.idx, row.map_index, row.task, row.state, bars)


def _scaled(line: Line, begin: datetime, seconds: float) -> Line:
    def scaled(bar: Bar) -> Bar:
        x = 100 * (bar.begin - begin).total_seconds() / seconds
        # A bar that is too short to be seen is still there.
        width = max(100 * bar.seconds / seconds, 0.15 if bar.kind == "run" else 0.0)
        return replace(bar, x=round(min(x, 99.85), 3), width=round(min(width, 100 - x) if x < 99.85 else 0.15, 3))

    return replace(line, bars=[scaled(bar) for bar in line.bars])


def _ticks(seconds: float) -> list[Tick]:
    step = next((step for step in _STEPS if seconds / step <= _MOST_TICKS), None)
    if step is None:
        step = 86400 * math.ceil(seconds / 86400 / _MOST_TICKS)
    if seconds < 1:
        return [Tick(0.0, 0.0)]
    return [Tick(round(100 * at / seconds, 3), float(at)) for at in range(0, math.floor(seconds) + 1, step)]


def ends_at(chart: Gantt) -> datetime:
    return chart.begin + timedelta(seconds=chart.seconds)
