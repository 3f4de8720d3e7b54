"""Following a run until it ends, or the runs of a DAG for as long as somebody looks.

A terminal gets one picture that is redrawn; a pipe gets a line for each change.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

import typer
from psycopg import AsyncConnection
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar

from evertick.cli import far
from evertick.cli.connection import database_url
from evertick.cli.documents import document, print_json
from evertick.cli.errors import RUN_EXIT_STATUS, TIMED_OUT
from evertick.cli.options import noun
from evertick.cli.poll import poll
from evertick.cli.run_page import run_document, run_state, run_table, task_note, task_table
from evertick.cli.tables import console, hint, line, show, state
from evertick.cli.text import one_line, plain
from evertick.config import read_settings
from evertick.db.queries import runs, shards, tasks
from evertick.db.queries.dags import DagRow
from evertick.db.queries.runs import RunRow
from evertick.db.queries.tasks import TaskRow
from evertick.domain.durations import length, took
from evertick.domain.states import FAILED_TASK_STATES, TERMINAL_RUN_STATES
from evertick.engine.runs import find_run
from evertick.engine.tasks import full_name

if TYPE_CHECKING:
    from evertick.cli.server import Server

_MOST_LINES = 1000
_MOST_DOCUMENTED = 10_000
_LINES_AROUND_TABLE = 6
_REASONS = 5
_NEWEST_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment, with the tasks that matter most."""

    run: RunRow
    tasks: Sequence[TaskRow]
    counts: dict[str, int]
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How a wait ended. `is_over` is false when the time was up first."""

    last: Snapshot
    is_over: bool


View = Callable[[Snapshot], None]


async def follow(url: str, run_id: int, *, view: View, most_tasks: int, within_seconds: float | None = None) -> Watched:
    """Show a run to `view` again and again until it ends."""
    seen: list[Snapshot] = []

    async def look(conn: AsyncConnection) -> bool:
        seen[:] = [await take_snapshot(conn, run_id, most_tasks)]
        view(seen[0])
        return seen[0].run.state in TERMINAL_RUN_STATES

    is_over = await poll(url, look, within_seconds=within_seconds)
    if not seen:
        raise typer.Exit(TIMED_OUT)
    return Watched(last=seen[0], is_over=is_over)


def follow_here(run_id: int, *, view: View, most_tasks: int, within_seconds: float | None) -> Watched:
    """The same, by the database or through a server."""
    if (server := far.far_server()) is None:
        url = database_url(read_settings())
        return asyncio.run(follow(url, run_id, view=view, most_tasks=most_tasks, within_seconds=within_seconds))
    seen: list[Snapshot] = []

    def look() -> bool:
        run, counts = far.run_with_counts(server, run_id)
        shown = far.list_tasks(server, run_id, most_tasks)
        seen[:] = [Snapshot(run=run, tasks=shown, counts=counts, now=server.now)]
        view(seen[0])
        return run.state in TERMINAL_RUN_STATES

    is_over = far.look_until_over(look, within_seconds=within_seconds)
    return Watched(last=seen[0], is_over=is_over)


async def take_snapshot(conn: AsyncConnection, run_id: int, most_tasks: int) -> Snapshot:
    return Snapshot(
        run=await find_run(conn, run_id),
        tasks=await tasks.liveliest_of_run(conn, run_id=run_id, limit=most_tasks),
        counts=await tasks.count_by_state(conn, run_id=run_id),
        now=await shards.read_clock(conn),
    )


def wait_for_end(run_id: int, *, within_seconds: float | None) -> NoReturn:
    """Show a run until it ends, in the way that fits the output, and leave with the status that means how."""
    out = console()
    if not out.is_terminal:
        view = lines_view(_write)
        conclude(follow_here(run_id, view=view, most_tasks=_MOST_LINES, within_seconds=within_seconds))
    rows = max(out.height - _LINES_AROUND_TABLE, 5)
    with Live(console=out, auto_refresh=False) as live:
        watched = follow_here(
            run_id,
            view=lambda snapshot: live.update(picture(snapshot), refresh=True),
            most_tasks=rows,
            within_seconds=within_seconds,
        )
    conclude(watched)


def wait_for_document(run_id: int, *, within_seconds: float | None, **more: object) -> NoReturn:
    """Say nothing until a run has ended, and then everything in one document."""
    watched = follow_here(run_id, view=lambda _: None, most_tasks=_MOST_DOCUMENTED, within_seconds=within_seconds)
    tasks = [document(task) for task in sorted(watched.last.tasks, key=lambda row: (row.idx, row.map_index))]
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
    """A line for each task that started, ended or waits for its retry since the last look."""
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
    """Say how the run ended, and leave with the status that means it."""
    run, now = watched.last.run, watched.last.now
    if not watched.is_over:
        waited = took(run.created_at, None, now)
        sys.stderr.write(
            f"Run {run.run_id} of {run.dag} is still {run.state} after {waited}, and goes on."
            f" Follow it with: evertick runs watch {run.run_id}\n"
        )
        raise typer.Exit(TIMED_OUT)
    lasted = length((run.finished_at - run.started_at).total_seconds()) if run.started_at and run.finished_at else "0 s"
    show(line(f"Run {run.run_id} of {run.dag}: ").append(run_state(run)).append(f" in {lasted}"))
    wrong = [row for row in watched.last.tasks if row.state in FAILED_TASK_STATES and row.state != "upstream_failed"]
    for row in wrong[:_REASONS]:
        show(line(f"  {full_name(row)}: {row.reason or row.state}", "red"))
    if wrong and run.state == "failed":
        show(hint(f"See why with: evertick tasks logs {run.run_id} {wrong[0].task}"))
    raise typer.Exit(RUN_EXIT_STATUS[run.state])


def watch_dag(dag: DagRow, *, within_seconds: float | None) -> None:
    """The newest runs of a DAG, until Ctrl-C or the time is up."""
    out = console()
    if not out.is_terminal:
        _look_at_runs(dag, _NEWEST_RUNS, _dag_lines(), within_seconds)
        return
    with Live(console=out, auto_refresh=False) as live:
        _look_at_runs(
            dag,
            max(out.height - 3, 5),
            lambda found, now: live.update(run_table(found, now), refresh=True),
            within_seconds,
        )


def _look_at_runs(
    dag: DagRow, limit: int, view: Callable[[list[RunRow], datetime], None], within_seconds: float | None
) -> None:
    """By the database or through a server, again and again."""

    async def look(conn: AsyncConnection) -> bool:
        view(await runs.list_newest(conn, dag_id=dag.dag_id, limit=limit), await shards.read_clock(conn))
        return False

    def look_far(server: Server) -> bool:
        view(far.list_runs(server, dag.name, None, limit), server.now)
        return False

    if (server := far.far_server()) is None:
        asyncio.run(poll(database_url(read_settings()), look, within_seconds=within_seconds))
    else:
        far.look_until_over(lambda: look_far(server), within_seconds=within_seconds)


def _dag_lines() -> Callable[[list[RunRow], datetime], None]:
    known: dict[int, str] = {}

    def view(found: list[RunRow], now: datetime) -> None:
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
