"""`evertick runs`: list, show, watch, cancel and clear runs, and print their logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated

import typer

from evertick.cli.app import Group
from evertick.cli.commands.alerts import tried_again
from evertick.cli.commands.tasks import LogPrinter, clear_tasks, refuse_followed_document
from evertick.cli.commands.watch import wait_for_document, wait_for_end, watch_dag
from evertick.cli.options import (
    DagFilter,
    Downstream,
    DryRun,
    Json,
    Limit,
    Run,
    Tag,
    Timeout,
    Yes,
    confirm,
    moment,
    noun,
    read_number,
)
from evertick.cli.output import heading, hint, line, print_json, show, table
from evertick.cli.run_view import run_document, run_facts, run_table, task_table
from evertick.client.connect import Client, open_client
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.dependencies import Source, in_words
from evertick.domain.states import RunKind, RunState
from evertick.operations.dags import list_dags
from evertick.operations.runs import CancelRequest, ClearRequest, cancel_run, clear_run, list_runs, show_run
from evertick.operations.runs import Run as RunRecord
from evertick.operations.task_logs import RunLogLine, read_run_log
from evertick.operations.tasks import list_tasks

app = Group()

StateFilter = Annotated[RunState | None, typer.Option("--state", "-s", help="Only runs in this state.")]
KindFilter = Annotated[RunKind | None, typer.Option("--kind", help="Only runs of this kind.")]
RunText = Annotated[
    str | None,
    typer.Option(
        "--contains", metavar="TEXT", help="Only with this text in the DAG's name, the key or the parameters."
    ),
]
Since = Annotated[datetime | None, moment("--since", "Only runs for this time or later: a time, or an age such as 2h.")]
Until = Annotated[datetime | None, moment("--until", "Only runs for a time before this one.", is_end=True)]
FollowRun = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")]
RunOrDag = Annotated[str, typer.Argument(metavar="RUN|DAG", help="A run's number, or a DAG's name for all its runs.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Reason, for the audit log.")]
TaskNames = Annotated[
    list[str] | None, typer.Option("--task", "-t", metavar="TASK", help="Only this task; repeat for several.")
]
OnlyFailed = Annotated[
    bool, typer.Option("--failed", help="Only tasks that failed or were canceled, and their downstream tasks.")
]
Latest = Annotated[bool, typer.Option("--latest", help="Run on the newest version of the DAG.")]

Runs = Annotated[
    list[int] | None,
    typer.Argument(metavar="RUN", parser=read_number, help="The runs' numbers, as `evertick runs list` shows them."),
]
OnlyDag = Annotated[str | None, typer.Option("--dag", help="Only runs of this DAG.")]

_MOST_TASKS = 1000
_MOST_CHOSEN = 1000
_SHOWN = 50
_OPEN = (RunState.QUEUED, RunState.RUNNING)


@app.command("list", epilog="Example: evertick runs list etl --state failed --since 2026-11-01")
def list_command(
    dag: DagFilter = None,
    state: StateFilter = None,
    kind: KindFilter = None,
    tag: Tag = None,
    since: Since = None,
    until: Until = None,
    contains: RunText = None,
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """List runs, newest first. --since and --until bound the date that a run is for: its fire time, or its creation."""
    with open_client() as client:
        found = client.pages(
            list_runs, limit, dag=dag, state=state, kind=kind, tag=tag, since=since, until=until, contains=contains
        )
        if as_json:
            print_json({"runs": [run_document(row) for row in found]})
        elif found:
            show(run_table(found, client.now))
        elif any((state, kind, tag, since, until, contains)):
            show(hint(f"No run{f' of {dag}' if dag else ''} matches."))
        elif name := dag or _any_dag(client):
            show(hint(f"No runs yet. Start one with: evertick dags trigger {name}"))
        else:
            show(hint("No runs and no DAGs yet. `evertick dags list` says where to put a DAG file."))


@app.command("show", epilog="Example: evertick runs show 12")
def show_command(run: Run, as_json: Json = False) -> None:
    """Show one run with its tasks and its history."""
    with open_client() as client:
        found = client.call(show_run, run_id=run)
        tasks = client.pages(list_tasks, _MOST_TASKS, run_id=run)
        now = client.now
    if as_json:
        shown: dict[str, object] = {"run": run_document(found), "tasks": tasks}
        shown |= {"audit": found.audit, "triggers": found.triggers}
        shown |= {} if found.partition is None else {"partition": found.partition}
        return print_json(shown if found.quarantine is None else {**shown, "quarantine": found.quarantine})
    show(run_facts(found, now))
    if found.partition is not None:
        show(line(f"For partition {found.partition.key}"))
    for trigger in found.triggers:
        condition = in_words(Source(trigger.kind, trigger.name))
        source = f"updated by {trigger.updated_by or 'unknown'}" if trigger.run_id is None else f"run {trigger.run_id}"
        show(line(f"After {condition}: {source}, {relative(trigger.occurred_at, now)}"))
    if (quarantine := found.quarantine) is not None:
        again = f"tried again {tried_again(quarantine, now)}"
        show(line(f"Quarantined, {again}: {quarantine.verb}: {quarantine.reason}", "bold red"))
    show(heading("Tasks"), task_table(tasks, now))
    if found.task_count > _MOST_TASKS:
        show(hint(f"The first {_MOST_TASKS:,} tasks; all of them: evertick tasks list {run} --limit 100000"))
    if found.audit:
        names: dict[int | None, str] = {task.idx: task.task for task in tasks}
        rows = [(relative(it.occurred_at, now), it.verb, names.get(it.task_index), it.actor) for it in found.audit]
        show(heading("Activity"), table(("WHEN", "ACTION", "TASK", "BY"), rows))


@app.command("watch", epilog="Example: evertick runs watch 12, or: evertick runs watch heartbeat")
def watch_command(run: RunOrDag, timeout: Timeout = None, as_json: Json = False) -> None:
    """Follow a run until it ends (exit status as `dags trigger --wait`), or all runs of a DAG until Ctrl-C."""
    with open_client() as client:
        if run.isdecimal():
            run_id = read_number(run)
            client.call(show_run, run_id=run_id)
            if as_json:
                wait_for_document(client, run_id, within_seconds=timeout)
            wait_for_end(client, run_id, within_seconds=timeout)
        if as_json:
            raise UserError("--json prints one document when a run has ended: name a run by its number.")
        watch_dag(client, run, within_seconds=timeout)


@app.command("logs", epilog="Example: evertick runs logs 12 -f")
def logs_command(run: Run, follow: FollowRun = False, as_json: Json = False) -> None:
    """Print the logs of all tasks of a run, merged by time; with -f also new lines, until the run ends."""
    refuse_followed_document(follow=follow, as_json=as_json)
    found: list[RunLogLine] = []
    printer = LogPrinter()
    with open_client() as client:
        is_complete = _read_log(client, run, found.extend if as_json else printer.print, follow=follow)
    if as_json:
        print_json({"run_id": run, "lines": found})
    elif not printer.has_printed:
        show(hint(f"Run {run} has written nothing{'' if is_complete else ' yet'}."))


@app.command(
    "cancel", epilog='Example: evertick runs cancel 12 --reason "wrong parameters", or: evertick runs cancel --dag etl'
)
def cancel_command(
    run: Runs = None,
    dag: OnlyDag = None,
    tag: Tag = None,
    since: Since = None,
    until: Until = None,
    contains: RunText = None,
    reason: Reason = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Cancel runs: tasks that have not started end now, running tasks are stopped.

    Several runs, or the open runs that match a filter, are listed first, and canceled after a confirmation.
    """
    with open_client() as client:
        if run is not None and len(run) == 1 and not dry_run:
            stopped = client.call(cancel_run, run_id=run[0], body=CancelRequest(reason=reason)).stopping
            stopping = (
                f"{noun(stopped, 'running task')} will stop within a moment." if stopped else "Nothing was running."
            )
            return show(line(f"Canceled run {run[0]}. {stopping}"))
        chosen = _chosen_runs(client, run, _OPEN, dag=dag, tag=tag, since=since, until=until, contains=contains)
        if not _confirmed(client, chosen, "Cancel", yes=yes, dry_run=dry_run):
            return
        stopped = sum(
            client.call(cancel_run, run_id=row.run_id, body=CancelRequest(reason=reason)).stopping for row in chosen
        )
    show(line(f"Canceled {noun(len(chosen), 'run')}; {noun(stopped, 'running task')} will stop within a moment."))


@app.command(
    "clear", epilog="Example: evertick runs clear 12 --failed, or: evertick runs clear --dag etl --since 2d --failed"
)
def clear_command(
    run: Runs = None,
    dag: OnlyDag = None,
    tag: Tag = None,
    since: Since = None,
    until: Until = None,
    contains: RunText = None,
    task: TaskNames = None,
    failed: OnlyFailed = False,
    downstream: Downstream = False,
    latest: Latest = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Run tasks of runs again: all tasks, named tasks, or failed tasks. Lists them and asks first.

    A filter chooses runs that have ended; with --failed, only failed runs.
    """
    wanted = ClearRequest(
        tasks=task or [], only_failed=failed, with_downstream=downstream, run_on_latest_version=latest
    )
    if run is not None and len(run) == 1:
        return clear_tasks(run[0], wanted, yes=yes, dry_run=dry_run)
    states = (RunState.FAILED,) if failed else (RunState.SUCCESS, RunState.FAILED, RunState.CANCELED)
    with open_client() as client:
        chosen = _chosen_runs(client, run, states, dag=dag, tag=tag, since=since, until=until, contains=contains)
        if not _confirmed(client, chosen, "Clear tasks of", yes=yes, dry_run=dry_run):
            return
        done = [client.call(clear_run, run_id=row.run_id, body=wanted) for row in chosen]
    count = sum(each.reopened + each.stopping for each in done)
    show(line(f"Cleared {noun(count, 'task')} of {noun(len(chosen), 'run')}."))


def _chosen_runs(
    client: Client,
    runs: list[int] | None,
    states: Sequence[RunState],
    *,
    dag: str | None,
    tag: str | None,
    since: datetime | None,
    until: datetime | None,
    contains: str | None,
) -> list[RunRecord]:
    """The runs named by their numbers, or those in these states that match a filter; oldest first."""
    if (runs is None) == (not any((dag, tag, since, until, contains))):
        raise UserError("Name runs by their numbers, or choose them with --dag, --tag, --since, --until or --contains.")
    if runs is not None:
        return [client.call(show_run, run_id=each) for each in sorted(set(runs))]
    found: list[RunRecord] = []
    for state in states:
        found += client.pages(
            list_runs, _MOST_CHOSEN + 1, dag=dag, state=state, tag=tag, since=since, until=until, contains=contains
        )
    if len(found) > _MOST_CHOSEN:
        raise UserError(f"More than {_MOST_CHOSEN:,} runs match: narrow the filter.")
    return sorted(found, key=lambda row: row.run_id)


def _confirmed(client: Client, chosen: list[RunRecord], verb: str, *, yes: bool, dry_run: bool) -> bool:
    """Show the runs and ask. False: there is nothing to do, or this is a preview."""
    if not chosen:
        show(hint("No run matches."))
        return False
    show(run_table(chosen[:_SHOWN], client.now))
    if len(chosen) > _SHOWN:
        show(hint(f"and {noun(len(chosen) - _SHOWN, 'more run')}"))
    if dry_run:
        show(hint(f"{noun(len(chosen), 'run')}; nothing was changed."))
        return False
    confirm(f"{verb} {noun(len(chosen), 'run')}?", yes=yes)
    return True


def _read_log(client: Client, run_id: int, take: Callable[[list[RunLogLine]], None], *, follow: bool) -> bool:
    """Read the lines that there are; with `follow` until the run has ended. Returns whether these were the last ones."""
    cursor: str | None = None
    is_complete = False

    def is_over() -> bool:
        nonlocal cursor, is_complete
        before: str | None = ""
        # Without new lines, the cursor stays.
        while not is_complete and cursor != before:
            before = cursor
            page = client.call(read_run_log, run_id=run_id, cursor=cursor)
            take(page.lines)
            cursor, is_complete = page.next_cursor, page.is_complete
        return is_complete

    return client.poll(is_over) if follow else is_over()


def _any_dag(client: Client) -> str | None:
    """The name of a DAG, for an example."""
    found = client.pages(list_dags, 1)
    return found[0].name if found else None
