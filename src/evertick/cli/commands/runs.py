"""`evertick runs`: list, show, watch, cancel and clear runs."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.cli.commands.alerts import tried_again
from evertick.cli.commands.tasks import clear_tasks
from evertick.cli.commands.watch import wait_for_document, wait_for_end, watch_dag
from evertick.cli.options import Downstream, DryRun, Json, Limit, Run, Timeout, Yes, noun, run_number, seconds_of
from evertick.cli.output import Cell, heading, hint, line, print_json, show, table
from evertick.cli.run_view import run_document, run_facts, run_table, task_table
from evertick.client.connect import Client, open_client
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.dependencies import Source, in_words
from evertick.domain.states import RunState
from evertick.operations.dags import list_dags
from evertick.operations.runs import Cancel, cancel_run, list_runs, show_run
from evertick.operations.tasks import list_tasks

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, follow, cancel and repeat runs.")

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only runs of this DAG.")]
StateFilter = Annotated[RunState | None, typer.Option("--state", "-s", help="Only runs in this state.")]
RunOrDag = Annotated[str, typer.Argument(metavar="RUN|DAG", help="A run's number, or a DAG's name for all its runs.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Reason, for the audit log.")]
TaskNames = Annotated[
    list[str] | None, typer.Option("--task", "-t", metavar="TASK", help="Only this task; repeat it for more tasks.")
]
OnlyFailed = Annotated[
    bool, typer.Option("--failed", help="Only tasks that failed or were canceled, and their downstream tasks.")
]
Latest = Annotated[
    bool, typer.Option("--latest", help="Run on the newest version of the DAG, if it has the same tasks.")
]

_MOST_TASKS = 1000


@app.command("list", epilog="Example: evertick runs list etl --state failed")
def list_command(dag: DagFilter = None, state: StateFilter = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List runs, newest first."""
    with open_client() as client:
        found = client.pages(list_runs, limit, dag=dag, state=state)
        if as_json:
            print_json({"runs": [run_document(row) for row in found]})
        elif found:
            show(run_table(found, client.now))
        elif state is not None:
            show(hint(f"No run{f' of {dag}' if dag else ''} is {state} now."))
        elif name := dag or _any_dag(client):
            show(hint(f"No runs yet. Start one with: evertick dags trigger {name}"))
        else:
            show(hint("No runs and no DAGs yet. `evertick dags list` says where to put a DAG file."))


@app.command("show", epilog="Example: evertick runs show 12")
def show_command(run: Run, as_json: Json = False) -> None:
    """Show one run with its tasks and its history."""
    run_id = run_number(run)
    with open_client() as client:
        found = client.call(show_run, run_id=run_id)
        tasks = client.pages(list_tasks, _MOST_TASKS, run_id=run_id)
        now = client.now
    if as_json:
        shown = {"run": run_document(found), "tasks": tasks, "journal": found.journal, "causes": found.causes}
        print_json(shown if found.quarantine is None else {**shown, "quarantine": found.quarantine})
        return
    show(run_facts(found, now))
    for cause in found.causes:
        what = in_words(Source(cause.kind, cause.name))
        source = f"updated by {cause.updated_by or 'unknown'}" if cause.run_id is None else f"run {cause.run_id}"
        show(line(f"After {what}: {source}, {relative(cause.occurred_at, now)}"))
    if (aside := found.quarantine) is not None:
        again = f"tried again {tried_again(aside, now)}"
        show(line(f"Quarantined, {again}: {aside.verb}: {aside.reason}", "bold red"))
    show(heading("Tasks"), task_table(tasks, now))
    if found.task_count > _MOST_TASKS:
        show(hint(f"The first {_MOST_TASKS:,} tasks; all of them: evertick tasks list {run_id} --limit 100000"))
    if found.journal:
        names = {task.idx: task.task for task in tasks}
        rows: list[list[Cell]] = []
        for each in found.journal:
            task = names.get(each.idx) if each.idx is not None else None
            rows.append([relative(each.occurred_at, now), each.verb, task, each.actor])
        show(heading("History"), table(("WHEN", "WHAT", "TASK", "BY"), rows))


@app.command("watch", epilog="Example: evertick runs watch 12, or: evertick runs watch heartbeat")
def watch_command(run: RunOrDag, timeout: Timeout = None, as_json: Json = False) -> None:
    """Follow a run until it ends (exit status as `dags trigger --wait`), or all runs of a DAG until Ctrl-C."""
    within_seconds = seconds_of(timeout)
    with open_client() as client:
        if run.isdecimal():
            run_id = run_number(run)
            client.call(show_run, run_id=run_id)
            if as_json:
                wait_for_document(client, run_id, within_seconds=within_seconds)
            wait_for_end(client, run_id, within_seconds=within_seconds)
        if as_json:
            raise UserError("--json prints one document when a run has ended: name a run by its number.")
        watch_dag(client, run, within_seconds=within_seconds)


@app.command("cancel", epilog='Example: evertick runs cancel 12 --reason "wrong parameters"')
def cancel_command(run: Run, reason: Reason = None) -> None:
    """Cancel a run: tasks that have not started end now, running tasks are stopped."""
    run_id = run_number(run)
    with open_client() as client:
        asked = client.call(cancel_run, run_id=run_id, body=Cancel(reason=reason)).asked_to_stop
    stopping = f"{noun(asked, 'running task')} will stop within a moment." if asked else "Nothing was running."
    show(line(f"Canceled run {run_id}. {stopping}"))


@app.command("clear", epilog="Example: evertick runs clear 12 --failed")
def clear_command(
    run: Run,
    task: TaskNames = None,
    failed: OnlyFailed = False,
    downstream: Downstream = False,
    latest: Latest = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Run tasks of a run again: all tasks, named tasks, or failed tasks. Lists them and asks first."""
    clear_tasks(
        run_number(run),
        task or [],
        only_failed=failed,
        downstream=downstream,
        yes=yes,
        dry_run=dry_run,
        latest=latest,
    )


def _any_dag(client: Client) -> str | None:
    """The name of a DAG, for an example."""
    found = client.pages(list_dags, 1)
    return found[0].name if found else None
