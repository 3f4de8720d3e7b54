"""`evertick tasks`: the tasks of one run."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection
from rich.table import Table

from evertick.cli import clearing, far, logs, why
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Downstream, DryRun, Json, Limit, Run, Task, Yes, run_number
from evertick.cli.run_page import attempt_text, task_note, task_table
from evertick.cli.tables import Cell, facts, heading, hint, line, show, state, table
from evertick.cli.times import clock
from evertick.db.notify import Channel
from evertick.db.queries import tasks
from evertick.db.queries.runs import RunRow
from evertick.db.queries.tasks import AttemptRow, TaskRow
from evertick.domain.attempt import TaskKey
from evertick.domain.durations import relative, took
from evertick.domain.errors import Conflict
from evertick.engine import tasks as verb
from evertick.engine.runs import find_run
from evertick.engine.tasks import full_name, select_tasks

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The tasks of one run.")

Names = Annotated[list[str], typer.Argument(metavar="TASK...", help="The tasks to run again.")]
MarkState = Annotated[str, typer.Argument(metavar="success|failed|skipped", help="How it shall have ended.")]


@app.command("list", epilog="Example: evertick tasks list 12")
def list_tasks(run: Run, limit: Limit = 1000, as_json: Json = False) -> None:
    """List the tasks of a run, in the order in which they can run."""
    run_id = run_number(run)

    async def read(conn: AsyncConnection) -> tuple[RunRow, list[TaskRow]]:
        return await find_run(conn, run_id), await tasks.list_of_run(conn, run_id=run_id, limit=limit)

    (row, found), now = ask(
        read, far=lambda server: (far.find_run(server, run_id), far.list_tasks(server, run_id, limit))
    )
    if as_json:
        print_json({"run_id": run_id, "dag": row.dag, "tasks": [document(task) for task in found]})
        return
    show(task_table(found, now))
    if row.task_count > len(found):
        show(hint(f"{len(found):,} of {row.task_count:,} tasks; see more with --limit"))


@app.command("show", epilog="Example: evertick tasks show 12 extract")
def show_task(run: Run, task: Task, as_json: Json = False) -> None:
    """Show one task: its state, every attempt, and what it returned."""
    run_id = run_number(run)

    async def read(conn: AsyncConnection) -> list[tuple[TaskRow, list[AttemptRow], object]]:
        found = await select_tasks(conn, run_id=run_id, names=[task])
        keys = [TaskKey(run_id, row.idx, row.map_index) for row in found]
        return [
            (row, await tasks.attempts(conn, key), await tasks.result(conn, key))
            for row, key in zip(found, keys, strict=True)
        ]

    found, now = ask(read, far=lambda server: far.show_task(server, run_id, task))
    if as_json:
        shown = [
            {**document(row), "attempts": [document(each) for each in attempts], "result": result}
            for row, attempts, result in found
        ]
        print_json({"run_id": run_id, "tasks": shown})
        return
    for row, attempts, result in found:
        show(_facts(run_id, row, now, result))
        if attempts:
            show(heading("Attempts"), _attempts(attempts, now))
            show(hint(f"\nSee what it wrote with: evertick tasks logs {run_id} {full_name(row)}"))


app.command("why", epilog="Example: evertick tasks why 12 load")(why.why_task)


app.command("logs", epilog="Example: evertick tasks logs 12 extract -f")(logs.show_logs)


@app.command("clear", epilog="Example: evertick tasks clear 12 transform --downstream")
def clear(run: Run, task: Names, downstream: Downstream = False, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Run tasks again. Shows them and asks first; what runs is stopped before."""
    clearing.clear_tasks(run_number(run), task, only_failed=False, downstream=downstream, yes=yes, dry_run=dry_run)


@app.command("mark", epilog="Example: evertick tasks mark 12 extract success")
def mark(run: Run, task: Task, ended: MarkState) -> None:
    """Decide how a task ended. What runs is stopped first; what it had blocked is decided again."""
    run_id = run_number(run)

    async def write(conn: AsyncConnection) -> list[str]:
        found = await select_tasks(conn, run_id=run_id, names=[task])
        open_rows = [row for row in found if row.state != ended]
        if not open_rows:
            raise Conflict(f"Task {task!r} of run {run_id} is {ended} already.")
        keys = [TaskKey(run_id, row.idx, row.map_index) for row in open_rows]
        return [await verb.mark(conn, key, state=ended, actor=actor()) for key in keys]

    answers = change(
        write,
        Channel.READY,
        Channel.STOP,
        Channel.PLAN,
        far=lambda server: far.mark(server, run_id, task, ended),
    )
    if "asked" in answers:
        show(line(f"{task} of run {run_id} runs: it is being stopped, and will then be {ended}."))
    else:
        show(line(f"Marked {task} of run {run_id} as {ended}."))


def _facts(run_id: int, row: TaskRow, now: datetime, result: object) -> Table:
    values: dict[str, Cell] = {
        "Task": line(full_name(row), "bold"),
        "Run": run_id,
        "State": state(row.state),
        "Note": task_note(row, now),
        "Attempt": attempt_text(row),
        "Queue": f"{row.queue}, priority {row.priority}",
        "Started": f"{clock(row.started_at)} ({relative(row.started_at, now)})" if row.started_at else None,
        "Took": took(row.started_at, row.finished_at, now) if row.started_at else None,
        "Exit code": row.exit_code,
        "Result": json.dumps(result) if result is not None else None,
    }
    return facts(values)


def _attempts(rows: list[AttemptRow], now: datetime) -> Table:
    cells: list[list[Cell]] = []
    for number, row in enumerate(rows, 1):
        lasted = took(row.started_at, row.finished_at, now)
        place = f"{row.runner_id} on {row.host}" if row.runner_id else None
        outcome = state(row.outcome)
        cells.append([number, outcome, clock(row.started_at), lasted, row.exit_code, place, row.reason])
    return table(("#NUMBER", "OUTCOME", "STARTED", "TOOK", "#EXIT", "RUNNER", "REASON"), cells)
