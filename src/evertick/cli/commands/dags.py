"""`evertick dags`: list, show, validate, pause, trigger and delete DAGs, and compare and restore their versions.

Validation needs no database. It loads each file in a process of its own; its code never runs in this one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evertick.cli import dag_view, options
from evertick.cli.app import Group
from evertick.cli.commands import local_runs
from evertick.cli.commands.watch import wait_for_document, wait_for_end
from evertick.cli.options import DagName, DryRun, Json, Limit, Timeout, Yes, confirm, noun
from evertick.cli.output import Cell, clock, document, heading, hint, line, print_json, show, state, table
from evertick.cli.run_view import run_document
from evertick.client.connect import Client, call, open_client, read_pages
from evertick.config import read_settings, user_environment
from evertick.db.queries.dags import ImportErrorRow
from evertick.domain.dags.validation import past_hints
from evertick.domain.durations import parse_duration, relative
from evertick.domain.errors import Forbidden, UserError
from evertick.domain.schedules.spec import describe
from evertick.operations import dags
from evertick.operations.dags import CatchUpOptions, Dag, RollbackRequest, TriggerRequest
from evertick.operations.runners import list_runners
from evertick.operations.runs import Run, RunDetails, list_latest_runs, show_run
from evertick.operations.schedules import Schedule, list_all_schedules
from evertick.supervisor.postgres_home import shown

if TYPE_CHECKING:
    from evertick.bundles.loader import ImportProblem, LoadedDag, LoadedFile

app = Group()

PartitionOption = Annotated[
    str | None,
    typer.Option("--partition", metavar="KEY", help="The partition that the run is for, such as 2030-01-31."),
]
DateOption = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="DATE",
        help="The date that the run is for, such as 2030-01-31 or 2030-01-31T06:00; without an offset in the time zone of the"
        " DAG's schedule. By default now.",
    ),
]
RunAfter = Annotated[
    str | None,
    typer.Option(
        "--run-after",
        metavar="TIME",
        help="The run is queued and begins then, such as 2030-01-31T06:00; without an offset in the time zone of the DAG's"
        " schedule. By default now.",
    ),
]
UniqueFor = Annotated[
    str | None,
    typer.Option(
        "--unique-for",
        metavar="DURATION",
        help="For so long, such as 1h, the same --key, or without one the same parameters, are the same run.",
    ),
]
DagNames = Annotated[list[str] | None, typer.Argument(metavar="DAG", help="The DAGs' names.")]
WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Wait for the run and exit with its status.")]
Number = Annotated[int | None, typer.Argument(metavar="VERSION", min=1, help="A version; by default the previous one.")]
Other = Annotated[
    int | None, typer.Argument(metavar="OTHER", min=1, help="Compare with this version; by default the current one.")
]

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A DAG file, or a folder of them.")]


class DagStatus(StrEnum):
    ON = "on"
    PAUSED = "paused"


Status = Annotated[DagStatus | None, typer.Option("--status", help="Only DAGs that are on, or paused.")]

_COLUMNS = ("DAG", "STATUS", "SCHEDULE", "NEXT RUN", "LAST RUN", "#TASKS", "TAGS")
_MOST_SCHEDULES = 100_000
_MOST_LINES = 2000


@app.command("list", epilog="Example: evertick dags list")
def list_command(
    tag: options.Tag = None,
    contains: options.Contains = None,
    status: Status = None,
    limit: Limit = 1000,
    as_json: Json = False,
) -> None:
    """List the DAGs with their state, next run and last run."""
    is_paused = None if status is None else status is DagStatus.PAUSED
    is_filtered = (tag, contains, status) != (None, None, None)
    with open_client() as client:
        found = client.pages(dags.list_dags, limit, tag=tag, contains=contains, is_paused=is_paused)
        plans: dict[str, list[Schedule]] = {row.name: [] for row in found}
        for each in client.pages(list_all_schedules, _MOST_SCHEDULES):
            plans.setdefault(each.dag, []).append(each)
        last = {run.dag: run for run in client.pages(list_latest_runs, limit)}
        files = {(row.deployment, row.file) for row in found}
        errors = dag_view.import_errors(client)
        errors = [each for each in errors if not is_filtered or (each.deployment, each.file) in files]
        now = client.now
    broken = {(error.deployment, error.file): error for error in errors}
    if as_json:
        listed = [
            _listed(row, plans[row.name], last.get(row.name), broken.get((row.deployment, row.file))) for row in found
        ]
        return print_json({"dags": listed, "import_errors": [document(error, without=["detail"]) for error in errors]})
    if found:
        show(table(_COLUMNS, [_row(row, plans[row.name], last.get(row.name), broken, now) for row in found]))
        if len(found) == limit:
            show(hint(f"The first {limit:,} DAGs; see more with --limit"))
    elif is_filtered:
        show(hint("No DAG matches."))
    else:
        advice = f"Put a Python file with an @dag into {shown(read_settings().dags_folder)}"
        show(hint(f"No DAGs yet. {advice}; `evertick dags validate FILE` checks it."))
    for error in errors:
        show(line(f"Broken: {dag_view.place_of(error)}", "red"))


app.command("show", epilog="Example: evertick dags show etl")(dag_view.show_command)


@app.command("validate", epilog="Example: evertick dags validate dags/etl.py")
def validate_command(path: PathArgument, as_json: Json = False) -> None:
    """Check DAG files without publishing them: list their DAGs, or the errors with their lines."""
    # Imported late, here and below: other commands load no files.
    from evertick.bundles.loader import find_duplicates
    from evertick.publisher.deployment import load_files

    folder, files = _find_files(path)
    loaded = asyncio.run(load_files(folder, files, read_settings(), user_environment()))
    duplicates = find_duplicates(loaded)
    problems = [problem for problem in map(_problem_of, loaded) if problem]
    if as_json:
        print_json(_validation_document(loaded, duplicates))
    else:
        for file in loaded:
            _show_file(folder, file)
        for name, owners in duplicates.items():
            show(line(f"DAG {name} is defined in more than one file: {', '.join(owners)}.", "red"))
    if problems or duplicates:
        raise typer.Exit(2)


app.command("test", epilog="Example: evertick dags test etl --param rows=5 --for 2026-11-01")(
    local_runs.test_dag_command
)


@app.command("trigger", epilog="Example: evertick dags trigger etl --param rows=50 --for 2030-01-31 --wait")
def trigger_command(
    dag: DagName,
    param: options.ParamOption = None,
    params: options.ParamsOption = None,
    date: DateOption = None,
    run_after: RunAfter = None,
    partition: PartitionOption = None,
    key: options.KeyOption = None,
    unique_for: UniqueFor = None,
    wait: WaitOption = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Start a run of a DAG now. With --wait, exit with 0 for success, 1 failed, 3 canceled, 124 for a timeout."""
    if timeout is not None and not wait:
        raise UserError("--timeout limits a wait: add --wait.")
    if key is not None and not key.strip():
        raise UserError("--key is empty: leave it out, or give a text that names this one run.")
    with open_client() as client:
        page = client.call(dags.show_dag, dag=dag).record
        given = options.read_object(params)
        if param:
            given |= options.read_pairs(dag_view.published_spec(client, page).params, param)
        named = {"--for": date, "--run-after": run_after}
        zone = dag_view.zone_of(client, dag) if any(named.values()) else "UTC"
        moments = {name: options.read_moment(name, text, zone) for name, text in named.items() if text is not None}
        body = TriggerRequest(
            params=given,
            fire_at=moments.get("--for"),
            run_after=moments.get("--run-after"),
            unique_for_seconds=_seconds(unique_for),
            partition=partition,
        )
        made = client.call_by_key(dags.trigger_run, key, dag=dag, body=body)
        run = client.call(show_run, run_id=made.run_id)
        is_new = made.is_new or (key is None and unique_for is None)
        if as_json and wait:
            wait_for_document(client, run.run_id, within_seconds=timeout, is_new=is_new)
        if as_json:
            return print_json({"is_new": is_new, "run": run_document(run)})
        _announce(run, is_new=is_new, is_paused=page.is_paused)
        if not _has_runner(client):
            advice = "Start one with: evertick runner (or all with: evertick up)"
            show(hint(f"No runner is alive, so nothing runs yet. {advice}"))
        if wait:
            wait_for_end(client, run.run_id, within_seconds=timeout)
    show(hint(f"Follow it with: evertick runs watch {run.run_id}"))


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text).total_seconds()
    except ValueError as error:
        raise UserError(f"--unique-for {text!r}: {error}") from None


@app.command("versions", epilog="Example: evertick dags versions etl")
def versions_command(dag: DagName, limit: Limit = 20, as_json: Json = False) -> None:
    """List the versions of a DAG, newest first."""
    found, now = read_pages(dags.list_versions, limit, dag=dag)
    if as_json:
        versions = [{**document(each, without=("bundle",)), "bundle_hash": each.bundle} for each in found]
        return print_json({"dag": dag, "versions": versions})
    rows: list[list[Cell]] = []
    for each in found:
        current = state("success", "current") if each.is_current else None
        published = relative(each.created_at, now)
        rows.append([each.number, current, published, each.task_count, each.hash[:12], each.bundle[:12]])
    show(table(("#VERSION", "", "PUBLISHED", "#TASKS", "PLAN", "CODE"), rows))
    show(hint(f"Compare versions with: evertick dags diff {dag}"))


@app.command("diff", epilog="Example: evertick dags diff etl 3 5")
def diff_command(dag: DagName, number: Number = None, other: Other = None, as_json: Json = False) -> None:
    """Compare the plan and the code of two versions. Without numbers: the current version and the one before."""
    found = call(dags.diff_versions, dag=dag, old=number, new=other)
    old, new = found.old.number, found.new.number
    if as_json:
        return print_json({"dag": dag, "from": old, "to": new, "plan": found.plan, "code": found.code})
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
        wanted = client.call(dags.diff_versions, dag=dag, old=number).old.number
        confirm(f"Roll {dag} back to version {wanted}?", yes=yes)
        done = client.call(dags.roll_back_dag, dag=dag, body=RollbackRequest(number=wanted))
    show(line(f"{dag} is at version {done.now}; it was at {done.before}."))
    show(
        hint(
            f"It comes from {done.file} of deployment {done.deployment}: restore that file too, or its next change wins."
        )
    )


@app.command("pause", epilog="Example: evertick dags pause etl, or: evertick dags pause --tag finance")
def pause_command(
    dag: DagNames = None, tag: options.Tag = None, contains: options.Contains = None, yes: Yes = False
) -> None:
    """Pause DAGs: their schedules record their fires as skipped, and waiting tasks wait. Running tasks continue.

    Several DAGs, or the DAGs that match a filter, are listed first, and paused after a confirmation.
    """
    if bool(dag) == bool(tag or contains):
        raise UserError("Name DAGs, or choose them with --tag or --contains.")
    with open_client() as client:
        names = dag or [
            row.name
            for row in client.pages(dags.list_dags, _MOST_SCHEDULES, tag=tag, contains=contains, is_paused=False)
        ]
        if not names:
            return show(hint("No DAG matches, or all are paused."))
        if len(names) > 1 or not dag:
            show(line(", ".join(names)))
            confirm(f"Pause {noun(len(names), 'DAG')}?", yes=yes)
        for name in names:
            is_changed = client.call(dags.pause_dag, dag=name).is_changed
            show(line(f"{name} is paused." if is_changed else f"{name} was paused already."))
    show(hint(f"Resume it with: evertick dags unpause {names[0]}"))


@app.command("unpause", epilog="Example: evertick dags unpause etl --catch-up latest --dry-run")
def unpause_command(
    dag: DagName, catch_up: options.CatchUpOption = None, window: options.WindowOption = None, dry_run: DryRun = False
) -> None:
    """Resume a paused DAG. Waiting tasks run now; its schedules continue with their next fire, or catch up if asked.

    --dry-run shows what would run. A schedule that is paused itself remains paused.
    """
    options.check_catch_up(catch_up, window)
    body = CatchUpOptions(catch_up=catch_up, window_seconds=window, is_preview=dry_run)
    done = call(dags.unpause_dag, dag=dag, body=body)
    if not dry_run:
        show(line(f"{dag} resumed." if done.is_changed else f"{dag} was not paused."))
    if dry_run or (done.is_changed and done.missed):
        dag_view.show_missed(done.missed, is_done=not dry_run)


@app.command("delete", epilog="Example: evertick dags delete old_report --yes")
def delete_command(dag: DagName, yes: Yes = False) -> None:
    """Stop scheduling a DAG; its history is kept, and its open runs continue."""
    with open_client() as client:
        count = len(client.pages(list_all_schedules, _MOST_SCHEDULES, dag=dag))
        confirm(f"Delete {dag} with {noun(count, 'schedule')}? Its history is kept.", yes=yes)
        file = _file_of(client, dag)
        client.call(dags.delete_dag, dag=dag)
    show(line(f"Deleted {dag}."), hint(f"Remove {file} from the DAGs folder too, or it is published again."))


def _file_of(client: Client, dag: str) -> str:
    """From the list, which also has DAGs whose published version cannot be read."""
    found = client.pages(dags.list_dags, _MOST_SCHEDULES, contains=dag)
    return next((each.file for each in found if each.name == dag), "its file")


def _has_runner(client: Client) -> bool:
    """True for a caller who may not see runners: the answer must not reveal that there are none."""
    try:
        return bool(client.pages(list_runners, 1))
    except Forbidden:
        return True


def _announce(run: RunDetails, *, is_new: bool, is_paused: bool) -> None:
    if not is_new:
        return show(line(f"Run {run.run_id} of {run.dag} has this key already; it is {run.state}."))
    of = f"{run.dag} for {clock(run.fire_at)}" if run.fire_at else run.dag
    if run.start_at is not None:
        return show(line(f"Run {run.run_id} of {of} begins at {clock(run.start_at)}."))
    show(line(f"Started run {run.run_id} of {of}." if not is_paused else f"Run {run.run_id} of {of} waits."))
    if is_paused:
        show(hint(f"The DAG is paused; resume it with: evertick dags unpause {run.dag}"))


def _row(
    row: Dag, plans: Sequence[Schedule], last: Run | None, broken: Mapping[tuple[str, str], object], now: datetime
) -> list[Cell]:
    status = (
        state("broken")
        if (row.deployment, row.file) in broken
        else state("paused")
        if row.is_paused
        else state("success", "on")
    )
    words = "; ".join(each.when for each in plans) or "manual"
    due = min((each.next_due for each in plans if each.next_due), default=None)
    next_run = "-" if row.is_paused else relative(due, now)
    ended = state(last.state, f"{last.state} {relative(last.finished_at or last.created_at, now)}") if last else None
    return [row.name, status, words, next_run, ended, row.task_count, ", ".join(row.tags) or None]


def _listed(row: Dag, plans: Sequence[Schedule], last: Run | None, error: ImportErrorRow | None) -> dict[str, object]:
    return {
        "dag": row.name,
        **document(row, without=("name", "max_active_runs", "published_at")),
        "schedules": [dag_view.schedule_document(each) for each in plans],
        "last_run": run_document(last) if last else None,
        "import_error": document(error, without=["detail"]) if error else None,
    }


# Validation ---------------------------------------------------------------------------------------------------------


def _find_files(path: Path) -> tuple[Path, list[str]]:
    """The folder that imports are relative to, and the files in it."""
    from evertick.publisher.publisher import find_dag_files

    if path.is_dir():
        files = find_dag_files(path)
        if not files:
            raise UserError(f"{path} holds no DAG file: no .py file in it names both `evertick` and `dag`.")
        return path, files
    if not path.is_file():
        raise UserError(f"There is no file or folder {path}.")
    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file: its name must end in .py.")
    root = read_settings().dags_folder.resolve()
    folder = root if path.resolve().is_relative_to(root) else path.resolve().parent
    return folder, [str(path.resolve().relative_to(folder))]


def _problem_of(loaded: LoadedFile) -> ImportProblem | None:
    from evertick.bundles.loader import ImportProblem

    if loaded.error or loaded.dags:
        return loaded.error
    return ImportProblem(file=loaded.file, line=None, message="it defines no DAG. Call a function decorated with @dag.")


def _show_file(folder: Path, loaded: LoadedFile) -> None:
    if problem := _problem_of(loaded):
        show(line(str(replace(problem, file=os.path.relpath(folder / problem.file))), "red"))
        if problem.traceback:
            show(hint(problem.traceback.rstrip()))
        return
    for dag in loaded.dags:
        words = "; ".join(describe(each.spec) for each in dag.spec.schedules) or "manual"
        count = noun(len(dag.spec.tasks), "task")
        show(line(f"ok {loaded.file}: {dag.name}, {count}, {words}", "green"))
        for task, upstream in dag_view.upstream_of(dag.spec).items():
            show(line(f"     {task}" + (f"  after {', '.join(upstream)}" if upstream else "")))
        for each in past_hints(dag.spec, datetime.now(UTC)):
            show(line(f"     Note: {each}", "yellow"))
    if loaded.uses_threads:
        names = ", ".join(loaded.uses_threads)
        show(hint(f"   runs in fresh interpreters because importing it starts threads: {names}"))


def _validation_document(loaded: Sequence[LoadedFile], duplicates: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    files = [
        {
            "file": file.file,
            "error": document(problem) if (problem := _problem_of(file)) else None,
            "uses_threads": file.uses_threads,
            "dags": [_dag_document(dag) for dag in file.dags],
        }
        for file in loaded
    ]
    return {"files": files, "duplicates": duplicates}


def _dag_document(dag: LoadedDag) -> dict[str, object]:
    upstream = dag_view.upstream_of(dag.spec)
    return {
        "dag": dag.name,
        "hash": dag.hash,
        "schedules": [describe(each.spec) for each in dag.spec.schedules],
        "notes": past_hints(dag.spec, datetime.now(UTC)),
        "tasks": [{"task": name, "upstream": after} for name, after in upstream.items()],
    }
