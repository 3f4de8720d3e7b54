"""`evertick dags`: list, show, pause, trigger and delete DAGs, and compare and restore their versions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated

import typer

from evertick.cli import dag_view
from evertick.cli.commands.deploy import validate_command
from evertick.cli.commands.watch import wait_for_document, wait_for_end
from evertick.cli.options import (
    CatchUpOption,
    DagName,
    DryRun,
    Json,
    KeyOption,
    Limit,
    ParamOption,
    ParamsOption,
    Timeout,
    WindowOption,
    Yes,
    confirm,
    noun,
    read_catch_up,
    read_object,
    read_pairs,
    seconds_of,
)
from evertick.cli.output import Cell, document, heading, hint, line, print_json, show, state, table
from evertick.cli.run_view import run_document
from evertick.client.connect import Client, open_client
from evertick.config import read_settings
from evertick.db.queries.dags import ImportErrorRow
from evertick.domain.durations import relative
from evertick.domain.errors import Forbidden, OutcomeUnknown, UserError
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.operations.dags import (
    Dag,
    RollBack,
    Trigger,
    Unpause,
    delete_dag,
    diff_versions,
    list_dags,
    list_versions,
    pause_dag,
    roll_back_dag,
    show_dag,
    trigger_run,
    unpause_dag,
)
from evertick.operations.runners import list_runners
from evertick.operations.runs import Run, list_latest_runs, show_run
from evertick.operations.schedules import Schedule, list_all_schedules
from evertick.publisher.publisher import DEPLOYED
from evertick.supervisor.postgres_home import shown

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, show, start, pause and delete DAGs, and their versions."
)

WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Show its progress, and exit as the run ends.")]
Number = Annotated[
    int | None, typer.Argument(metavar="VERSION", min=1, help="A version's number; by default the previous version.")
]
Other = Annotated[
    int | None, typer.Argument(metavar="OTHER", min=1, help="The version to compare with; by default the current one.")
]

_COLUMNS = ("DAG", "STATUS", "SCHEDULE", "NEXT RUN", "LAST RUN", "#TASKS", "TAGS")
_MOST_SCHEDULES = 100_000
_MOST_LINES = 2000


@app.command("list", epilog="Example: evertick dags list")
def list_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the DAGs with their state, next run and last run."""
    with open_client() as client:
        found = client.pages(list_dags, limit)
        plans: dict[str, list[Schedule]] = {row.name: [] for row in found}
        for each in client.pages(list_all_schedules, _MOST_SCHEDULES):
            plans.setdefault(each.dag, []).append(each)
        last = {run.dag: run for run in client.pages(list_latest_runs, limit)}
        errors = dag_view.import_errors(client)
        now = client.now
    broken = {error.file: error for error in errors}
    if as_json:
        listed = [_listed(row, plans[row.name], last.get(row.name), broken.get(row.file)) for row in found]
        print_json({"dags": listed, "import_errors": [document(error, without=["detail"]) for error in errors]})
        return
    if found:
        show(table(_COLUMNS, [_row(row, plans[row.name], last.get(row.name), broken, now) for row in found]))
        if len(found) == limit:
            show(hint(f"The first {limit:,} DAGs; see more with --limit"))
    else:
        folder = shown(read_settings().dags_folder)
        show(
            hint(f"No DAGs yet. Put a Python file with an @dag into {folder}; `evertick dags validate FILE` checks it.")
        )
    for error in errors:
        show(line(f"Broken: {dag_view.place_of(error)}", "red"))


app.command("show", epilog="Example: evertick dags show etl")(dag_view.show_command)
app.command("validate", epilog="Example: evertick dags validate dags/etl.py")(validate_command)


@app.command("trigger", epilog="Example: evertick dags trigger etl --param rows=50 --wait")
def trigger_command(
    dag: DagName,
    param: ParamOption = None,
    params: ParamsOption = None,
    key: KeyOption = None,
    wait: WaitOption = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Start a run of a DAG now. With --wait, exit with 0 for success, 1 failed, 3 canceled, 124 for a timeout."""
    within_seconds = seconds_of(timeout)
    if within_seconds is not None and not wait:
        raise UserError("--timeout limits a wait: add --wait.")
    if key is not None and not key.strip():
        raise UserError("--key is empty: leave it out, or give a text that names this one run.")
    # Only this command has the key, so that the call can be repeated when its answer was lost.
    own_key = key or f"cli-{secrets.token_hex(8)}"
    with open_client() as client:
        page = client.call(show_dag, dag=dag).record
        given = read_object(params)
        if param:
            given |= read_pairs(dag_view.published_spec(client, page).params, param)
        try:
            made = client.call(trigger_run, dag=dag, body=Trigger(params=given), idempotency_key=own_key)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error} It is safe to repeat it with: --key {own_key}") from None
        run = client.call(show_run, run_id=made.run_id)
        is_new = made.is_new or key is None
        if as_json and wait:
            wait_for_document(client, run.run_id, within_seconds=within_seconds, is_new=is_new)
        if as_json:
            print_json({"is_new": is_new, "run": run_document(run)})
            return
        _announce(run, is_new=is_new, is_paused=page.is_paused)
        if not _has_runner(client):
            advice = "Start one with: evertick runner (or all with: evertick up)"
            show(hint(f"No runner is alive, so nothing runs yet. {advice}"))
        if wait:
            wait_for_end(client, run.run_id, within_seconds=within_seconds)
    show(hint(f"Follow it with: evertick runs watch {run.run_id}"))


@app.command("versions", epilog="Example: evertick dags versions etl")
def versions_command(dag: DagName, limit: Limit = 20, as_json: Json = False) -> None:
    """List the versions of a DAG, newest first."""
    with open_client() as client:
        found = client.pages(list_versions, limit, dag=dag)
        now = client.now
    if as_json:
        versions = [{**document(each, without=("bundle",)), "bundle_hash": each.bundle} for each in found]
        print_json({"dag": dag, "versions": versions})
        return
    rows: list[list[Cell]] = [
        [
            each.number,
            state("success", "current") if each.is_current else None,
            relative(each.created_at, now),
            each.task_count,
            each.hash[:12],
            each.bundle[:12],
        ]
        for each in found
    ]
    show(table(("#VERSION", "", "PUBLISHED", "#TASKS", "PLAN", "CODE"), rows))
    show(hint(f"Compare versions with: evertick dags diff {dag}"))


@app.command("diff", epilog="Example: evertick dags diff etl 3 5")
def diff_command(dag: DagName, number: Number = None, other: Other = None, as_json: Json = False) -> None:
    """Compare the plan and the code of two versions. Without numbers: the current version and the one before."""
    with open_client() as client:
        found = client.call(diff_versions, dag=dag, old=number, new=other)
    old, new = found.old.number, found.new.number
    if as_json:
        print_json({"dag": dag, "from": old, "to": new, "plan": found.plan, "code": found.code})
        return
    show(line(f"{dag}: version {old} to {new}", "bold"))
    if not found.plan and not found.code:
        show(hint("They are the same."))
    for title, lines in (("Plan", found.plan), ("Code", found.code)):
        if lines:
            show(heading(title))
            for each in lines[:_MOST_LINES]:
                typer.echo(each)
            if len(lines) > _MOST_LINES:
                show(hint(f"and {len(lines) - _MOST_LINES:,} lines more"))


@app.command("rollback", epilog="Example: evertick dags rollback etl 3")
def rollback_command(dag: DagName, number: Number = None, yes: Yes = False) -> None:
    """Make an earlier version the current one again: plan, code and schedules. Open runs keep their version."""
    with open_client() as client:
        # The older side of a comparison with the current version is the version to return to.
        wanted = client.call(diff_versions, dag=dag, old=number).old.number
        confirm(f"Roll {dag} back to version {wanted}?", yes=yes)
        done = client.call(roll_back_dag, dag=dag, body=RollBack(number=wanted))
    show(line(f"{dag} is at version {done.now}; it was at {done.before}."))
    if not done.file.startswith(DEPLOYED):
        show(hint(f"It comes from {done.file} in a watched folder: restore that file too, or its next change wins."))


@app.command("pause", epilog="Example: evertick dags pause etl")
def pause_command(dag: DagName) -> None:
    """Pause a DAG: its schedules record their fires as skipped, and waiting tasks wait. Running tasks continue."""
    with open_client() as client:
        is_changed = client.call(pause_dag, dag=dag).is_changed
    show(line(f"{dag} is paused." if is_changed else f"{dag} was paused already."))
    show(hint(f"Resume it with: evertick dags unpause {dag}"))


@app.command("unpause", epilog="Example: evertick dags unpause etl --catch-up latest --dry-run")
def unpause_command(
    dag: DagName,
    catch_up: CatchUpOption = MisfirePolicy.SKIP,
    window: WindowOption = None,
    dry_run: DryRun = False,
) -> None:
    """Resume a paused DAG. Waiting tasks run now; its schedules continue with their next fire, or catch up if you ask.

    --dry-run shows what would run. A schedule that is paused itself remains paused.
    """
    window_seconds = read_catch_up(catch_up, window)
    body = Unpause(catch_up=catch_up, window_seconds=window_seconds, is_preview=dry_run)
    with open_client() as client:
        done = client.call(unpause_dag, dag=dag, body=body)
    if not dry_run:
        show(line(f"{dag} goes on." if done.is_changed else f"{dag} was not paused."))
    if dry_run or (done.is_changed and done.missed):
        dag_view.show_missed(done.missed, is_done=not dry_run)


@app.command("delete", epilog="Example: evertick dags delete old_report --yes")
def delete_command(dag: DagName, yes: Yes = False) -> None:
    """Delete a DAG. Its history remains, and its open runs continue."""
    with open_client() as client:
        count = len(client.pages(list_all_schedules, _MOST_SCHEDULES, dag=dag))
        confirm(f"Delete {dag} with {noun(count, 'schedule')}? Its history remains.", yes=yes)
        file = _file_of(client, dag)
        client.call(delete_dag, dag=dag)
    show(line(f"Deleted {dag}."), hint(f"Remove {file} from the DAGs folder too, or it is published again."))


def _file_of(client: Client, dag: str) -> str:
    """From the list, which also has DAGs whose published version cannot be read."""
    found = client.pages(list_dags, _MOST_SCHEDULES, contains=dag)
    return next((each.file for each in found if each.name == dag), "its file")


def _has_runner(client: Client) -> bool:
    """True for a caller who may not see runners: the answer must not reveal that there are none."""
    try:
        return bool(client.call(list_runners).items)
    except Forbidden:
        return True


def _announce(run: Run, *, is_new: bool, is_paused: bool) -> None:
    if not is_new:
        show(line(f"Run {run.run_id} of {run.dag} has this key already; it is {run.state}."))
        return
    show(line(f"Started run {run.run_id} of {run.dag}." if not is_paused else f"Run {run.run_id} of {run.dag} waits."))
    if is_paused:
        show(hint(f"The DAG is paused; resume it with: evertick dags unpause {run.dag}"))


def _row(
    row: Dag, plans: Sequence[Schedule], last: Run | None, broken: Mapping[str, object], now: datetime
) -> list[Cell]:
    status = state("broken") if row.file in broken else state("paused") if row.is_paused else state("success", "on")
    words = "; ".join(each.when for each in plans) or "by hand"
    due = min((each.next_due for each in plans if each.next_due), default=None)
    next_run = "-" if row.is_paused else relative(due, now)
    ended = state(last.state, f"{last.state} {relative(last.finished_at or last.created_at, now)}") if last else None
    return [row.name, status, words, next_run, ended, row.task_count, ", ".join(row.tags) or None]


def _listed(row: Dag, plans: Sequence[Schedule], last: Run | None, error: ImportErrorRow | None) -> dict[str, object]:
    return {
        "dag": row.name,
        "is_paused": row.is_paused,
        "version": row.version,
        "file": row.file,
        "description": row.description,
        "tags": row.tags,
        "task_count": row.task_count,
        "schedules": [dag_view.schedule_document(each) for each in plans],
        "last_run": run_document(last) if last else None,
        "import_error": document(error, without=["detail"]) if error else None,
    }
