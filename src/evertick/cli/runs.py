"""`evertick runs`: what ran, what runs, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import clearing, far, far_plans
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Downstream, DryRun, Json, Limit, Run, Timeout, Yes, noun, run_number, seconds_of
from evertick.cli.quarantine import tried_again
from evertick.cli.run_page import run_document, run_facts, run_table, task_table
from evertick.cli.tables import Cell, heading, hint, line, show, table
from evertick.cli.watch import wait_for_document, wait_for_end, watch_dag
from evertick.db.notify import Channel
from evertick.db.queries import dags, notifications, runs, schedules, tasks
from evertick.db.queries.notifications import QuarantinedRow
from evertick.db.queries.runs import JournalEntry, RunRow
from evertick.db.queries.schedules import RunTrigger
from evertick.db.queries.tasks import TaskRow
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.dependencies import Source, in_words
from evertick.domain.states import RunState
from evertick.engine import runs as verb
from evertick.engine.runs import find_dag_row, find_run

if TYPE_CHECKING:
    from evertick.cli.server import Server

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What ran and what runs.")

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only runs of this DAG.")]
StateFilter = Annotated[RunState | None, typer.Option("--state", "-s", help="Only runs in this state.")]
RunOrDag = Annotated[str, typer.Argument(metavar="RUN|DAG", help="A run's number, or a DAG's name for all its runs.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Why, for the record.")]
TaskNames = Annotated[
    list[str] | None, typer.Option("--task", "-t", metavar="TASK", help="Only this task; give it once for each.")
]
OnlyFailed = Annotated[bool, typer.Option("--failed", help="Only what failed or was canceled, and what comes after.")]
Latest = Annotated[bool, typer.Option("--latest", help="On the newest version of the DAG, if it has the same tasks.")]

_MOST_TASKS = 1000


@app.command("list", epilog="Example: evertick runs list etl --state failed")
def list_runs(dag: DagFilter = None, state: StateFilter = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List runs, newest first."""

    async def read(conn: AsyncConnection) -> tuple[list[RunRow], list[str]]:
        dag_id = await _dag_id(conn, dag) if dag is not None else None
        found = await runs.list_newest(conn, dag_id=dag_id, state=state, limit=limit)
        return found, [] if found else await dags.names(conn)

    def read_far(server: Server) -> tuple[list[RunRow], list[str]]:
        found = far.list_runs(server, dag, state, limit)
        return found, [] if found else [each.name for each in far_plans.list_dag_rows(server, 1)]

    (found, names), now = ask(read, far=read_far)
    if as_json:
        print_json({"runs": [run_document(row) for row in found]})
    elif found:
        show(run_table(found, now))
    elif state is not None:
        show(hint(f"No run{f' of {dag}' if dag else ''} is {state} now."))
    elif names:
        show(hint(f"No runs yet. Start one with: evertick dags trigger {dag or names[0]}"))
    else:
        show(hint("No runs and no DAGs yet. `evertick dags list` says where to put a DAG file."))


@app.command("show", epilog="Example: evertick runs show 12")
def show_run(run: Run, as_json: Json = False) -> None:
    """Show one run: its facts, its tasks, and what people did to it."""
    run_id = run_number(run)

    async def read(
        conn: AsyncConnection,
    ) -> tuple[RunRow, list[TaskRow], list[JournalEntry], QuarantinedRow | None, list[RunTrigger]]:
        row = await find_run(conn, run_id)
        listed = await tasks.list_of_run(conn, run_id=run_id, limit=_MOST_TASKS)
        aside = await notifications.find_quarantined(conn, kind="run", subject_id=run_id)
        return row, listed, await runs.journal(conn, run_id=run_id), aside, await schedules.causes(conn, run_id)

    (row, listed, journal, aside, causes), now = ask(read, far=lambda server: far.run_page(server, run_id, _MOST_TASKS))
    if as_json:
        deeds = [document(entry) for entry in journal]
        shown = {"run": run_document(row), "tasks": [document(task) for task in listed], "journal": deeds}
        shown["causes"] = [document(each) for each in causes]
        print_json(shown if aside is None else {**shown, "quarantine": document(aside)})
        return
    show(run_facts(row, now))
    for cause in causes:
        what = in_words(Source(cause.kind, cause.name))
        source = f"told by {cause.updated_by or 'somebody'}" if cause.run_id is None else f"run {cause.run_id}"
        show(line(f"After {what}: {source}, {relative(cause.occurred_at, now)}"))
    if aside is not None:
        again = f"tried again {tried_again(aside, now)}"
        show(line(f"Set aside, {again}: {aside.verb}: {aside.reason}", "bold red"))
    show(heading("Tasks"), task_table(listed, now))
    if row.task_count > _MOST_TASKS:
        show(hint(f"The first {_MOST_TASKS:,} tasks; all of them: evertick tasks list {run_id} --limit 100000"))
    if journal:
        names = {task.idx: task.task for task in listed}
        rows: list[list[Cell]] = []
        for each in journal:
            task = names.get(each.idx) if each.idx is not None else None
            rows.append([relative(each.occurred_at, now), each.verb, task, each.actor])
        show(heading("What was done to it"), table(("WHEN", "WHAT", "TASK", "BY"), rows))


@app.command("watch", epilog="Example: evertick runs watch 12, or: evertick runs watch heartbeat")
def watch(run: RunOrDag, timeout: Timeout = None, as_json: Json = False) -> None:
    """Follow a run until it ends (exit status as `dags trigger --wait`), or all runs of a DAG until Ctrl-C."""
    within_seconds = seconds_of(timeout)
    if run.isdecimal():
        run_id = run_number(run)
        row, _ = ask(lambda conn: find_run(conn, run_id), far=lambda server: far.find_run(server, run_id))
        if as_json:
            wait_for_document(row.run_id, within_seconds=within_seconds)
        wait_for_end(row.run_id, within_seconds=within_seconds)
    if as_json:
        raise UserError("--json prints one document when a run has ended: name a run by its number.")
    found, _ = ask(lambda conn: find_dag_row(conn, run), far=lambda server: far_plans.find_dag(server, run))
    watch_dag(found, within_seconds=within_seconds)


@app.command("cancel", epilog='Example: evertick runs cancel 12 --reason "wrong parameters"')
def cancel(run: Run, reason: Reason = None) -> None:
    """Cancel a run: what has not started ends now, what runs is stopped."""
    run_id = run_number(run)
    asked = change(
        lambda conn: verb.cancel(conn, run_id=run_id, actor=actor(), reason=reason),
        Channel.STOP,
        Channel.READY,
        far=lambda server: far.cancel(server, run_id, reason),
    )
    stopping = f"{noun(asked, 'running task')} will stop within a moment." if asked else "Nothing was running."
    show(line(f"Canceled run {run_id}. {stopping}"))


@app.command("clear", epilog="Example: evertick runs clear 12 --failed")
def clear(
    run: Run,
    task: TaskNames = None,
    failed: OnlyFailed = False,
    downstream: Downstream = False,
    latest: Latest = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Run tasks of a run again: all of them, those named, or what failed. Shows them and asks first."""
    clearing.clear_tasks(
        run_number(run),
        task or [],
        only_failed=failed,
        downstream=downstream,
        yes=yes,
        dry_run=dry_run,
        latest=latest,
    )


async def _dag_id(conn: AsyncConnection, name: str) -> int:
    """Also of a deleted DAG: its history stays."""
    row = await dags.find(conn, name)
    return row.dag_id if row else (await find_dag_row(conn, name)).dag_id
