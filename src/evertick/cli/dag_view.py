"""`evertick dags show`: everything about one DAG on one page. Schedules and missed fires, for every command that shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from rich.table import Table

from evertick.cli.options import DagName, Json, noun
from evertick.cli.output import Cell, clock, document, facts, heading, hint, line, print_json, show, state, table
from evertick.client.connect import Client, open_client
from evertick.db.queries.dags import ImportErrorRow
from evertick.domain.dags.spec import DagSpec, TaskSpec, from_json
from evertick.domain.durations import length, relative
from evertick.domain.errors import Forbidden
from evertick.domain.retry import RetryPolicy
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.engine.schedules import Missed
from evertick.operations.dags import Dag, DagDetails, list_import_errors, show_dag, show_version
from evertick.operations.schedules import Schedule, list_all_schedules, upcoming_fires

_SHOWN = 10
_MOST_SCHEDULES = 100_000
_FIRES = 3


def show_command(dag: DagName, as_json: Json = False) -> None:
    """Show one DAG: schedules with their next fires, parameters, tasks, and errors in its file."""
    with open_client() as client:
        page = client.call(show_dag, dag=dag).record
        spec = published_spec(client, page)
        planned = client.pages(list_all_schedules, _MOST_SCHEDULES, dag=dag)
        error = next((each for each in import_errors(client) if is_of(each, page)), None)
        now = client.now
    if as_json:
        return print_json(_document(page, spec, planned, error))
    _show_facts(page, spec)
    if error:
        note = line(f"Its file cannot be loaded now, so version {page.version} stays current: ", "bold red")
        show(note.append_text(line(place_of(error), "red")))
    _show_schedules(page, planned, now)
    if spec.params:
        show(heading("Parameters"), _params(spec))
    show(heading("Tasks"), _tasks(spec))
    show(hint(f"\nStart it with: evertick dags trigger {page.name} --wait"))


def published_spec(client: Client, page: DagDetails) -> DagSpec:
    """The current version as it was published, with the queue of each task, whether its author or the rules chose it."""
    assert page.version is not None, "a DAG that is shown has a version"
    published = client.call(show_version, dag=page.name, number=page.version).spec
    spec = from_json(json.dumps(published))
    tasks = (replace(task, queue=each.queue) for task, each in zip(spec.tasks, page.tasks, strict=True))
    return replace(spec, tasks=tuple(tasks))


def is_of(error: ImportErrorRow, dag: Dag) -> bool:
    """Whether the error is in the file of this DAG."""
    return (error.deployment, error.file) == (dag.deployment, dag.file)


def import_errors(client: Client) -> list[ImportErrorRow]:
    try:
        return client.pages(list_import_errors, _MOST_SCHEDULES)
    except Forbidden:
        # A caller who may see only some DAGs may not see the files of the others.
        return []


def show_missed(missed: Sequence[Missed], *, is_done: bool) -> None:
    """The fires that a pause prevented: which ran or were skipped, or would be."""
    verb = "ran now" if is_done else "would run now"
    skipped = "skipped" if is_done else "would be skipped"
    for each in missed:
        if each.skipped:
            show(line(f"{each.name}: {noun(each.skipped, 'missed fire')} {skipped}."))
        if each.runs:
            show(line(f"{each.name}: {noun(len(each.runs), 'missed fire')} {verb}:"))
            show(table(("FIRE",), [[clock(run)] for run in each.runs[:_SHOWN]]))
            if len(each.runs) > _SHOWN:
                show(hint(f"... and {len(each.runs) - _SHOWN} more, until {clock(each.runs[-1])}"))
    if not missed:
        show(hint("It missed nothing."))


def schedule_document(row: Schedule, fires: list[datetime] | None = None) -> dict[str, object]:
    rest = document(row, without=("dag", "name", "when", "changed_by", "changed_at", "deleted_at"))
    found = {"name": row.name, "schedule": row.when, **rest}
    return found if fires is None else {**found, "next_fires": fires}


def place_of(error: ImportErrorRow) -> str:
    line = f":{error.line}" if error.line else ""
    return f"{error.file}{line}: {error.message}"


def _show_facts(row: DagDetails, spec: DagSpec) -> None:
    threads = f"runs in fresh interpreters because importing it starts threads: {row.uses_threads}"
    values: dict[str, Cell] = {
        "DAG": line(row.name, "bold"),
        "About": spec.description,
        "Status": state("paused") if row.is_paused else state("success", "on"),
        "Version": f"{row.version}, published {clock(row.published_at)}",
        "File": row.file,
        "Owner": spec.owner,
        "Tags": ", ".join(spec.tags) or None,
        "Active runs": f"at most {spec.max_active_runs}" if spec.max_active_runs else None,
        "Time per run": f"at most {length(spec.run_timeout_seconds)}" if spec.run_timeout_seconds else None,
        "Isolation": threads if row.uses_threads else None,
    }
    show(facts(values))


def _show_schedules(row: DagDetails, planned: Sequence[Schedule], now: datetime) -> None:
    show(heading("Schedules"))
    if not planned:
        return show(hint(f"None. Start it with `evertick dags trigger {row.name}`."))
    rows = [[each.name, each.when, _next_text(each, now), relative(each.last_fired, now)] for each in planned]
    show(table(("NAME", "WHEN", "NEXT", "LAST"), rows))


def _next_text(row: Schedule, now: datetime) -> Cell:
    if row.error:
        return state("failed", row.error)
    if row.is_paused:
        return state("paused")
    fires = upcoming_fires(row, _FIRES)
    return ", ".join(relative(fire, now) for fire in fires) or "ended"


def upstream_of(spec: DagSpec) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {task.name: [] for task in spec.tasks}
    for up, down in spec.edges:
        found[spec.tasks[down].name].append(spec.tasks[up].name)
    return found


def _tasks(spec: DagSpec) -> Table:
    upstream = upstream_of(spec)
    rows: list[list[Cell]] = []
    for task in spec.tasks:
        after = upstream[task.name]
        timeout = length(task.timeout_seconds) if task.timeout_seconds else None
        place: list[Cell] = [task.queue, task.priority, task.isolation]
        rule = task.trigger_rule if after else None
        rows.append([task.name, task.kind, ", ".join(after) or None, rule, _retries(task.retry), timeout, *place])
    columns = ("TASK", "KIND", "AFTER", "RULE", "RETRIES", "TIMEOUT", "QUEUE", "#PRIORITY", "ISOLATION")
    return table(columns, rows)


def _params(spec: DagSpec) -> Table:
    rows = [
        [each.name, each.allowed, "required" if each.required else json.dumps(each.default), each.description]
        for each in spec.params
    ]
    return table(("NAME", "TYPE", "DEFAULT", "DESCRIPTION"), rows)


def _retries(retry: RetryPolicy) -> str | None:
    if not retry.retries:
        return None
    return f"{retry.retries} × {length(retry.delay_seconds)} {retry.backoff}"


def _document(
    row: DagDetails, spec: DagSpec, planned: Sequence[Schedule], error: ImportErrorRow | None
) -> dict[str, object]:
    upstream = upstream_of(spec)
    return {
        "dag": row.name,
        "description": spec.description,
        "is_paused": row.is_paused,
        "version": row.version,
        "published_at": row.published_at,
        "file": row.file,
        "tags": spec.tags,
        "max_active_runs": spec.max_active_runs,
        "run_timeout_seconds": spec.run_timeout_seconds,
        "uses_threads": row.uses_threads,
        "import_error": document(error) if error else None,
        "schedules": [schedule_document(each, upcoming_fires(each, _FIRES)) for each in planned],
        "params": [document(each) for each in spec.params],
        "tasks": [_task_document(task, upstream[task.name]) for task in spec.tasks],
    }


def _task_document(task: TaskSpec, upstream: list[str]) -> dict[str, object]:
    found = document(task, without=["name", "inputs"])
    return {"task": task.name, "upstream": upstream, **found}


def zone_of(client: Client, dag: str, schedule: str | None = None) -> str:
    """The time zone of the schedule, by default of the only one, for times without an offset. The operation that follows reports
    errors in its name."""
    found = [
        each for each in client.pages(list_all_schedules, _MOST_SCHEDULES, dag=dag) if schedule in (None, each.name)
    ]
    try:
        return read_spec(found[0].spec).timezone if len(found) == 1 else "UTC"
    except UNPLANNABLE:
        return "UTC"
