"""Follow a run until it ends, or the runs of a DAG until Ctrl-C.

A terminal gets one picture that is redrawn; a pipe gets a line for each change.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import NoReturn

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar

from evertick.cli.errors import RUN_EXIT_STATUS, TIMED_OUT
from evertick.cli.options import noun
from evertick.cli.output import console, hint, line, one_line, plain, print_json, show, state
from evertick.cli.run_view import run_document, run_state, run_table, task_note, task_table
from evertick.client.connect import Client
from evertick.db.queries.tasks import TaskRow
from evertick.domain.durations import length, took
from evertick.domain.states import FAILED_TASK_STATES, TERMINAL_RUN_STATES, TaskState
from evertick.engine.tasks import full_name
from evertick.operations.runs import Run, RunDetails, list_runs, show_run
from evertick.operations.tasks import list_tasks

_MOST_LINES = 1000
_MOST_DOCUMENTED = 10_000
_LINES_AROUND_TABLE = 6
_REASONS = 5
_NEWEST_RUNS = 20
# The order of tasks in a large run: running, failed, next.
_LIVELIEST = (
    TaskState.RUNNING,
    TaskState.QUEUED,
    TaskState.FAILED,
    TaskState.CANCELED,
    TaskState.AVAILABLE,
    TaskState.PENDING,
    TaskState.DEFERRED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment, with its most important tasks."""

    run: Run
    tasks: Sequence[TaskRow]
    counts: dict[str, int]
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How a wait ended. `is_over`: the run ended before the time was up."""

    last: Snapshot
    is_over: bool


View = Callable[[Snapshot], None]


def follow(client: Client, run_id: int, *, view: View, most_tasks: int, within_seconds: float | None) -> Watched:
    """Show a run to `view` again and again until it ends."""
    seen: list[Snapshot] = []

    def is_over() -> bool:
        seen[:] = [take_snapshot(client, run_id, most_tasks)]
        view(seen[0])
        return seen[0].run.state in TERMINAL_RUN_STATES

    is_over_in_time = client.poll(is_over, within_seconds=within_seconds)
    if not seen:
        raise typer.Exit(TIMED_OUT)
    return Watched(last=seen[0], is_over=is_over_in_time)


def take_snapshot(client: Client, run_id: int, most_tasks: int) -> Snapshot:
    run = client.call(show_run, run_id=run_id)
    return Snapshot(run=run, tasks=_liveliest(client, run, most_tasks), counts=run.tasks_by_state, now=client.now)


def _liveliest(client: Client, run: RunDetails, most: int) -> list[TaskRow]:
    """All tasks of a run; of a large run, first the running, failed and next tasks."""
    if sum(run.tasks_by_state.values()) <= most:
        return client.pages(list_tasks, most, run_id=run.run_id)
    found: list[TaskRow] = []
    for each in (*_LIVELIEST, *(each for each in TaskState if each not in _LIVELIEST)):
        if len(found) < most and run.tasks_by_state.get(each):
            found += client.pages(list_tasks, most - len(found), run_id=run.run_id, state=each)
    return found


def wait_for_end(client: Client, run_id: int, *, within_seconds: float | None) -> NoReturn:
    """Show a run until it ends, in the way that fits the output, and exit with the status that tells how it ended."""
    out = console()
    watch = partial(follow, client, run_id, within_seconds=within_seconds)
    if not out.is_terminal:
        conclude(watch(view=lines_view(_write), most_tasks=_MOST_LINES))
    rows = max(out.height - _LINES_AROUND_TABLE, 5)
    with Live(console=out, auto_refresh=False) as live:
        watched = watch(view=lambda snapshot: live.update(picture(snapshot), refresh=True), most_tasks=rows)
    conclude(watched)


def wait_for_document(client: Client, run_id: int, *, within_seconds: float | None, **more: object) -> NoReturn:
    """Print nothing until a run has ended, and then everything in one document."""
    watched = follow(client, run_id, view=lambda _: None, most_tasks=_MOST_DOCUMENTED, within_seconds=within_seconds)
    tasks = sorted(watched.last.tasks, key=lambda row: (row.idx, row.map_index))
    print_json({**more, "run": run_document(watched.last.run), "tasks": tasks})
    raise typer.Exit(RUN_EXIT_STATUS[watched.last.run.state] if watched.is_over else TIMED_OUT)


def picture(snapshot: Snapshot) -> RenderableType:
    """The whole run on one screen: a bar, the counts, and its tasks in order."""
    run, done = snapshot.run, snapshot.run.task_count - snapshot.run.open_tasks
    head = line(f"Run {run.run_id} of {run.dag}  ").append(run_state(run))
    head.append(f"  {done}/{run.task_count}  {took(run.started_at, run.finished_at, snapshot.now)}", style="dim")
    counts = line("  ").join(state(name, f"{name} {count}") for name, count in snapshot.counts.items())
    bar = ProgressBar(total=max(run.task_count, 1), completed=done, width=40)
    shown = sorted(snapshot.tasks, key=lambda row: (row.idx, row.map_index))
    hidden = sum(snapshot.counts.values()) - len(shown)
    more = [hint(f"and {noun(hidden, 'more task')}")] if hidden > 0 else []
    return Group(head, bar, counts, task_table(shown, snapshot.now), *more)


def lines_view(write: Callable[[str], object]) -> View:
    """A line for each task that started, ended or waits for its retry since the last snapshot."""
    known: dict[tuple[int, int], tuple[str, int]] = {}

    def view(snapshot: Snapshot) -> None:
        changed = [row for row in snapshot.tasks if known.get((row.idx, row.map_index)) != (row.state, row.epoch)]
        for row in sorted(changed, key=lambda row: (_changed_at(row, snapshot.now), row.idx)):
            known[row.idx, row.map_index] = (row.state, row.epoch)
            if row.state not in ("waiting", "available"):
                write(_line(row, snapshot.now))

    return view


def _changed_at(row: TaskRow, now: datetime) -> datetime:
    return row.finished_at or (row.started_at if row.state == "running" else None) or now


def _line(row: TaskRow, now: datetime) -> str:
    lasted = took(row.started_at, row.finished_at, now) if row.started_at and row.finished_at else ""
    words = [plain(full_name(row)), row.state, lasted, one_line(task_note(row, now) or "")]
    return f"{_changed_at(row, now).astimezone():%H:%M:%S} {' '.join(word for word in words if word)}\n"


def conclude(watched: Watched) -> NoReturn:
    """Print how the run ended, and exit with the status that tells it."""
    run, now = watched.last.run, watched.last.now
    if not watched.is_over:
        waited = took(run.created_at, None, now)
        sys.stderr.write(
            f"Run {run.run_id} of {run.dag} is still {run.state} after {waited} and continues."
            f" Follow it with: evertick runs watch {run.run_id}\n"
        )
        raise typer.Exit(TIMED_OUT)
    lasted = length((run.finished_at - run.started_at).total_seconds()) if run.started_at and run.finished_at else "0 s"
    show(line(f"Run {run.run_id} of {run.dag}: ").append(run_state(run)).append(f" in {lasted}"))
    wrong = [row for row in watched.last.tasks if row.state in FAILED_TASK_STATES and row.state != "upstream_failed"]
    for row in wrong[:_REASONS]:
        show(line(f"  {full_name(row)}: {row.reason or row.state}", "red"))
    count = sum(watched.last.counts.get(each, 0) for each in (TaskState.FAILED, TaskState.CANCELED))
    if wrong and count > _REASONS:
        show(hint(f"  and {count - _REASONS:,} more: evertick tasks list {run.run_id} --state failed"))
    if wrong and run.state == "failed":
        # A task without an attempt has no log.
        verb = "logs" if wrong[0].attempt else "why"
        show(hint(f"See why with: evertick tasks {verb} {run.run_id} {shlex.quote(full_name(wrong[0]))}"))
    raise typer.Exit(RUN_EXIT_STATUS[run.state])


def watch_dag(client: Client, dag: str, *, within_seconds: float | None) -> None:
    """The newest runs of a DAG, until Ctrl-C or the time is up."""
    out = console()
    if not out.is_terminal:
        _poll_runs(client, dag, _NEWEST_RUNS, _dag_lines(), within_seconds)
        return
    with Live(console=out, auto_refresh=False) as live:
        limit = max(out.height - 3, 5)
        _poll_runs(
            client, dag, limit, lambda found, now: live.update(run_table(found, now), refresh=True), within_seconds
        )


def _poll_runs(
    client: Client, dag: str, limit: int, view: Callable[[list[Run], datetime], None], within_seconds: float | None
) -> None:
    def is_over() -> bool:
        view(client.pages(list_runs, limit, dag=dag), client.now)
        return False

    # A DAG that does not exist is an error, not something to wait for.
    is_over()
    client.poll(is_over, within_seconds=within_seconds)


def _dag_lines() -> Callable[[list[Run], datetime], None]:
    known: dict[int, str] = {}

    def view(found: list[Run], now: datetime) -> None:
        for run in reversed(found):
            if known.get(run.run_id) != run.state:
                at = (run.finished_at or run.started_at or run.created_at).astimezone()
                lasted = f" {took(run.started_at, run.finished_at, now)}" if run.started_at and run.finished_at else ""
                _write(f"{at:%H:%M:%S} run {run.run_id} {run.state}{lasted}\n")
            known[run.run_id] = run.state

    return view


def _write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()
