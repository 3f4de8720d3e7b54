"""Gantt chart of a run: when its tasks waited and ran. Pure.

A task is ready when its last upstream task has ended, or when its retry delay is over. The time from then until its body starts
is split by cause, each up to the timestamp that ends it: retry delay (`retry_at`), gates (`let_in_at`), queue (`taken_at` or
`started_at`) and the start (`start_seconds`). Timestamps that are missing or belong to an earlier attempt are ignored.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby

from evertick.db.queries.overview import OpenTask, RunAttempt
from evertick.db.queries.tasks import TaskRow
from evertick.ui.charts.grid import PRECEDENCE, shown_state

# Labels of the waiting times, in the order in which a task passes through them.
WAITS = {
    "retry": "waited for its retry",
    "gate": "waited for its gates",
    "queue": "waited for a runner",
    "outside": "deferred, waited for an external event",
    "start": "process was starting",
}
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_MOST_TICKS = 6
MOST_LINES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`kind` is one of WAITS, or `run`. `is_open`: it has not ended."""

    kind: str
    state: str
    begin: datetime
    end: datetime
    is_open: bool = False
    attempt: int = 0
    reason: str | None = None
    # As percentages of the chart's width.
    x: float = 0.0
    width: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.end - self.begin).total_seconds()


@dataclass(frozen=True, slots=True)
class GanttRow:
    """A task, or all `instances` of a mapped one."""

    idx: int
    map_index: int
    task: str
    state: str
    bars: Sequence[Bar]
    instances: int = 1

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
    lines: Sequence[GanttRow]
    ticks: Sequence[Tick]
    left_out: int

    @property
    def waits(self) -> dict[str, str]:
        """The kinds of waiting time in the chart, with their labels."""
        found = {bar.kind for line in self.lines for bar in line.bars}
        return {kind: words for kind, words in WAITS.items() if kind in found}


def draw(
    rows: Sequence[TaskRow],
    attempts: Iterable[RunAttempt],
    edges: Iterable[tuple[int, int]],
    *,
    open_tasks: Iterable[OpenTask] = (),
    begin: datetime,
    now: datetime,
    unfolded: str | None = None,
) -> Gantt:
    """Draw the chart from `begin`, the start of the run. Attempts that have not ended are drawn until `now`. A mapped task is
    one line; of the task `unfolded`, only the instances are drawn."""
    tries: dict[tuple[int, int], list[RunAttempt]] = defaultdict(list)
    for each in attempts:
        tries[each.idx, each.map_index].append(each)
    stamps = {(each.idx, each.map_index): each for each in open_tasks}
    ready = _ready_at(rows, edges, begin)
    lines = [
        _line(row, tries[row.idx, row.map_index], stamps.get((row.idx, row.map_index)), ready.get(row.idx), now)
        for row in rows
        if unfolded in (None, row.task)
    ]
    drawn = [line for line in lines if line.bars]
    if unfolded is None:
        drawn = [_folded(each) for _, each in groupby(drawn, key=lambda line: (line.idx, line.map_index < 0))]
    shown = sorted(drawn, key=lambda line: (line.bars[0].begin, line.idx, line.map_index))
    left_out = max(len(shown) - MOST_LINES, 0)
    shown = shown[:MOST_LINES]
    first = min([begin, *(line.bars[0].begin for line in shown)])
    last = max((bar.end for line in shown for bar in line.bars), default=now)
    seconds = max((last - first).total_seconds(), 0.001)
    return Gantt(first, seconds, [_scaled(line, first, seconds) for line in shown], _ticks(seconds), left_out)


def _folded(found: Iterable[GanttRow]) -> GanttRow:
    """One line for the instances of a mapped task: the first waiting time, and the time from the first start to the last end."""
    lines = list(found)
    if len(lines) == 1 or lines[0].map_index < 0:
        return lines[0]
    first = min(lines, key=lambda line: line.bars[0].begin)
    runs = [bar for line in lines for bar in line.bars if bar.kind == "run"]
    counts = Counter(line.state for line in lines)
    state = shown_state(counts)
    waits = [bar for bar in first.bars if not runs or bar.end <= min(run.begin for run in runs)]
    words = ", ".join(f"{counts[each]} {each.replace('_', ' ')}" for each in PRECEDENCE if counts[each])
    bars = [*waits, *([_span(runs, state, f"{len(lines)} instances: {words}")] if runs else [])]
    return GanttRow(lines[0].idx, -1, lines[0].task, state, bars, len(lines))


def _span(runs: Sequence[Bar], state: str, reason: str) -> Bar:
    is_open = any(bar.is_open for bar in runs)
    begin, end = min(bar.begin for bar in runs), max(bar.end for bar in runs)
    return Bar(kind="run", state=state, begin=begin, end=end, is_open=is_open, reason=reason)


def _ready_at(
    rows: Sequence[TaskRow], edges: Iterable[tuple[int, int]], begin: datetime
) -> Mapping[int, datetime | None]:
    """When the last upstream task of each task ended; None if one has not ended."""
    ended: dict[int, datetime | None] = {}
    for row in rows:
        earlier = ended.get(row.idx, begin)
        ended[row.idx] = None if earlier is None or row.finished_at is None else max(earlier, row.finished_at)
    ready: dict[int, datetime | None] = {row.idx: begin for row in rows}
    for src, dst in edges:
        one, other = ready.get(dst), ended.get(src)
        ready[dst] = None if one is None or other is None else max(one, other)
    return ready


def _line(
    row: TaskRow, tries: Sequence[RunAttempt], stamp: OpenTask | None, ready: datetime | None, now: datetime
) -> GanttRow:
    bars: list[Bar] = []
    before: RunAttempt | None = None
    for each in tries:
        if each.started_at is None and each.taken_at is None:
            continue
        bars += _waits(each, before, ready, now)
        if each.started_at is not None:
            bars.append(_ran(each, now))
        before = each
    if row.state in ("pending", "available", "queued"):
        free_at, retry_at = (before.finished_at, before.retry_at) if before is not None else (ready, None)
        bars += _still_waits(row, stamp, free_at, retry_at, now)
    return GanttRow(row.idx, row.map_index, row.task, row.state, bars)


def _waits(each: RunAttempt, before: RunAttempt | None, ready: datetime | None, now: datetime) -> list[Bar]:
    """The waiting times of an attempt, from when it was ready until its body started."""
    began_at = each.started_at or each.finished_at or now
    body_at = _body_at(each) or began_at
    after = before.finished_at if before is not None else None

    def own(stamp: datetime | None) -> datetime | None:
        return stamp if stamp is not None and (after is None or stamp >= after) and stamp <= began_at else None

    let_in_at, taken_at, polled_at = own(each.let_in_at), own(each.taken_at), own(each.polled_since)
    first_known = let_in_at or polled_at or taken_at or began_at
    retry_at = None
    if before is not None and after is not None:
        # An attempt without `retry_at` was cleared. The time is unknown, but it is not before its upstream tasks ended again.
        retry_at = before.retry_at or (ready if ready is not None and ready > after else first_known)
    free_at = after or min(ready or first_known, first_known)
    steps = (
        ("retry", retry_at),
        ("gate", let_in_at),
        ("queue", polled_at or taken_at or began_at),
        ("outside", began_at if polled_at is not None else None),
        ("start", body_at),
    )
    return _in_turn(free_at, steps, body_at, state="pending")


def _still_waits(
    row: TaskRow, stamp: OpenTask | None, free_at: datetime | None, retry_at: datetime | None, now: datetime
) -> list[Bar]:
    """The waiting times of a task that has not started: the last one is open."""
    let_in_at, taken_at = (stamp.let_in_at, stamp.taken_at) if stamp is not None else (None, None)
    if free_at is None:
        return []
    if row.state == "pending":
        steps = [("retry", now if row.not_before is not None else retry_at), ("gate", now)]
    elif row.state == "available":
        steps = [("retry", retry_at), ("gate", let_in_at), ("queue", now)]
    else:
        steps = [("retry", retry_at), ("gate", let_in_at), ("queue", taken_at), ("start", now)]
    bars = _in_turn(free_at, steps, now, state=row.state)
    return [*bars[:-1], *(replace(bar, is_open=True) for bar in bars[-1:])]


def _in_turn(begin: datetime, steps: Iterable[tuple[str, datetime | None]], end: datetime, *, state: str) -> list[Bar]:
    bars: list[Bar] = []
    for kind, until in steps:
        if until is not None and begin < until <= end:
            bars.append(Bar(kind=kind, state=state, begin=begin, end=until))
            begin = until
    return bars


def _body_at(each: RunAttempt) -> datetime | None:
    """When the body started, at the latest when it ended: the two come from different clocks."""
    if each.started_at is None or each.start_seconds is None:
        return None
    body_at = each.started_at + timedelta(seconds=each.start_seconds)
    return body_at if each.finished_at is None else min(body_at, each.finished_at)


def _ran(each: RunAttempt, now: datetime) -> Bar:
    assert each.started_at is not None
    begin = _body_at(each) or each.started_at
    return Bar(
        kind="run",
        state=each.outcome,
        begin=begin,
        end=max(each.finished_at or now, begin),
        is_open=each.finished_at is None,
        attempt=each.attempt,
        reason=each.reason,
    )


def _scaled(line: GanttRow, begin: datetime, seconds: float) -> GanttRow:
    def scaled(bar: Bar) -> Bar:
        x = 100 * (bar.begin - begin).total_seconds() / seconds
        # Very short bars get a minimum width, so they stay visible.
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
