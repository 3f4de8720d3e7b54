"""`evertick tasks`: list, show, explain, clear and mark the tasks of one run. `evertick blocked`: what holds back work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from evertick.cli.commands.task_logs import logs_command
from evertick.cli.options import (
    Downstream,
    DryRun,
    Json,
    Limit,
    Run,
    Task,
    Yes,
    confirm,
    noun,
    run_number,
    task_instance,
)
from evertick.cli.output import Cell, clock, document, facts, heading, hint, line, print_json, show, state, table
from evertick.cli.run_view import attempt_text, task_note, task_table
from evertick.client.connect import Client, open_client
from evertick.db.queries.tasks import AttemptRow, TaskRow
from evertick.domain.durations import relative, took
from evertick.domain.errors import Conflict
from evertick.domain.explain import describe, describe_blocked, kind_of
from evertick.engine.tasks import full_name, markable
from evertick.operations.gates import MOST_TASKS, list_blocked
from evertick.operations.runs import Clear, clear_run, show_run
from evertick.operations.tasks import Mark, TaskPage, Why, list_tasks, mark_task, reason_of, show_task, why_task

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, explain, clear and mark the tasks of one run."
)
blocked_app = typer.Typer(add_completion=False)

Names = Annotated[list[str], typer.Argument(metavar="TASK...", help="The tasks to run again.")]
MarkState = Annotated[str, typer.Argument(metavar="success|failed|skipped", help="New state.")]

_SHOWN = 50
_MOST_INSTANCES = 100_000


@app.command("list", epilog="Example: evertick tasks list 12")
def list_command(run: Run, limit: Limit = 1000, as_json: Json = False) -> None:
    """List the tasks of a run in the order in which they can run."""
    run_id = run_number(run)
    with open_client() as client:
        row = client.call(show_run, run_id=run_id)
        found, now = client.pages(list_tasks, limit, run_id=run_id), client.now
    if as_json:
        print_json({"run_id": run_id, "dag": row.dag, "tasks": found})
        return
    show(task_table(found, now))
    if row.task_count > len(found):
        show(hint(f"{len(found):,} of {row.task_count:,} tasks; see more with --limit"))


@app.command("show", epilog="Example: evertick tasks show 12 extract")
def show_command(run: Run, task: Task, as_json: Json = False) -> None:
    """Show one task: its state, all attempts, and what it returned."""
    run_id = run_number(run)
    with open_client() as client:
        found, now = _pages(client, run_id, task), client.now
    if as_json:
        shown = [{**document(each.task), "attempts": each.attempts, "result": each.result} for each in found]
        print_json({"run_id": run_id, "tasks": shown})
        return
    for each in found:
        show(_facts(run_id, each.task, now, each.result))
        if each.attempts:
            show(heading("Attempts"), _attempts(each.attempts, now))
            show(hint(f"\nSee what it wrote with: evertick tasks logs {run_id} {full_name(each.task)}"))


@app.command("why", epilog="Example: evertick tasks why 12 load")
def why_command(run: Run, task: Task, as_json: Json = False) -> None:
    """Explain why a task is not running: all reasons, the most binding first, and what holds the resources it needs."""
    run_id = run_number(run)
    name, map_index = task_instance(task)
    with open_client() as client:
        found, now = client.call(why_task, run_id=run_id, task=name, map_index=map_index), client.now
    if as_json:
        print_json(found)
        return
    each: Why | None = found
    while each is not None:
        show(line(f"{each.task} of run {run_id} is {each.state}", "bold"))
        for number, reason in enumerate(each.reasons):
            text = describe(reason_of(reason), _relative_to(now))
            show(line(f"{'  because' if number == 0 else '  and'} {text}"))
        if not each.reasons:
            show(hint("  nothing holds it back: its state is just changing. Try again."))
        each = each.upstream


app.command("logs", epilog="Example: evertick tasks logs 12 extract -f")(logs_command)


@app.command("clear", epilog="Example: evertick tasks clear 12 transform --downstream")
def clear_command(
    run: Run, task: Names, downstream: Downstream = False, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Run tasks again. Lists them and asks first; running tasks are stopped first."""
    clear_tasks(run_number(run), task, only_failed=False, downstream=downstream, yes=yes, dry_run=dry_run)


@app.command("mark", epilog="Example: evertick tasks mark 12 extract success")
def mark_command(run: Run, task: Task, ended: MarkState) -> None:
    """Decide how a task ended. A running task is stopped first; tasks that it blocked are evaluated again."""
    run_id = run_number(run)
    name, _ = task_instance(task)
    wanted = markable(ended)
    with open_client() as client:
        rows = [row for row in _instances(client, run_id, task) if row.state != wanted]
        if not rows:
            raise Conflict(f"Task {task!r} of run {run_id} is {wanted} already.")
        marks = [Mark(state=wanted, map_index=row.map_index) for row in rows]
        outcomes = {client.call(mark_task, run_id=run_id, task=name, body=each).outcome for each in marks}
    if "asked" in outcomes:
        show(line(f"{task} of run {run_id} is running. It is being stopped and will then be {wanted}."))
    else:
        show(line(f"Marked {task} of run {run_id} as {wanted}."))


@blocked_app.command(epilog="Example: evertick blocked")
def blocked_command(limit: Limit = 50, as_json: Json = False) -> None:
    """List what holds back the most work now, over all runs: full pools and keys, queues without a runner, paused DAGs."""
    with open_client() as client:
        found, now = client.call(list_blocked, limit=min(limit, MOST_TASKS)).items, client.now
    if as_json:
        print_json({"blocked": found})
        return
    if not found:
        show(hint("Nothing is held back."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        since = relative(each.since, now) if each.since else None
        detail = describe_blocked(each, _relative_to(now))
        rows.append([each.waiting, state("pending", kind_of(each)), each.name, since, detail])
    show(table(("#WAITING", "WHY", "WHAT", "OLDEST", "DETAIL"), rows))
    show(hint("\nExplain one task with: evertick tasks why RUN TASK"))


def clear_tasks(
    run_id: int,
    names: Sequence[str],
    *,
    only_failed: bool,
    downstream: bool,
    yes: bool,
    dry_run: bool,
    latest: bool = False,
) -> None:
    """List what would run again, ask, and clear. Shared by `runs clear` and `tasks clear`."""
    wanted = Clear(tasks=list(names), only_failed=only_failed, with_downstream=downstream, run_on_latest_version=latest)
    with open_client() as client:
        preview = client.call(clear_run, run_id=run_id, body=replace(wanted, is_preview=True))
        if not preview.tasks:
            what = "no failed task" if only_failed else "nothing that has started"
            show(hint(f"There is nothing to clear: run {run_id} has {what} among these."))
            return
        show(task_table(preview.tasks[:_SHOWN], client.now))
        if (change := preview.version_change) is not None:
            show(line(f"The run goes on with version {change.new}; it began with version {change.old}."))
        count = len(preview.tasks)
        if count > _SHOWN:
            show(hint(f"and {noun(count - _SHOWN, 'more task')}"))
        if dry_run:
            show(hint(f"{noun(count, 'task')} would run again; nothing was changed."))
            raise typer.Exit
        confirm(f"Run {noun(count, 'task')} of run {run_id} again?", yes=yes)
        done = client.call(clear_run, run_id=run_id, body=wanted)
    asked = done.asked_to_stop
    stopping = f"; {noun(asked, 'running task')} will be stopped first" if asked else ""
    show(line(f"Cleared {noun(done.reopened + asked, 'task')} of run {run_id}{stopping}."))
    show(hint(f"Follow it with: evertick runs watch {run_id}"))


def _pages(client: Client, run_id: int, task: str) -> list[TaskPage]:
    """The task, or all instances of a mapped task that is named without an index."""
    name, map_index = task_instance(task)
    if map_index is not None:
        return [client.call(show_task, run_id=run_id, task=name, map_index=map_index)]
    rows = client.pages(list_tasks, _MOST_INSTANCES, run_id=run_id, task=name)
    return [client.call(show_task, run_id=run_id, task=name, map_index=row.map_index) for row in rows]


def _instances(client: Client, run_id: int, task: str) -> list[TaskRow]:
    name, map_index = task_instance(task)
    if map_index is not None:
        return [client.call(show_task, run_id=run_id, task=name, map_index=map_index).task]
    return client.pages(list_tasks, _MOST_INSTANCES, run_id=run_id, task=name)


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


def _relative_to(now: datetime) -> Callable[[str], str]:
    """Instants as all commands show them."""
    return lambda instant: relative(datetime.fromisoformat(instant), now)
