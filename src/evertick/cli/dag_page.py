"""`evertick dags show`: everything about one DAG on one page."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

from psycopg import AsyncConnection
from rich.table import Table

from evertick.cli import far_plans
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import DagName, Json
from evertick.cli.tables import Cell, facts, heading, hint, line, show, state, table
from evertick.cli.times import clock
from evertick.db.queries import dags, schedules
from evertick.db.queries.dags import DagRow, ImportErrorRow
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.dags.spec import DagSpec, TaskSpec
from evertick.domain.durations import length, relative
from evertick.domain.retry import RetryPolicy
from evertick.engine.fire_schedules import fires_of, in_words
from evertick.engine.runs import find_dag

_FIRES = 3


def show_dag(dag: DagName, as_json: Json = False) -> None:
    """Show one DAG: schedules with their next fires, parameters, tasks, and what is wrong with its file."""

    async def read(
        conn: AsyncConnection,
    ) -> tuple[DagRow, DagSpec, list[ListedSchedule], ImportErrorRow | None]:
        row, spec = await find_dag(conn, dag)
        spec = _routed(spec, await dags.queues(conn, row.version_id))
        errors = [error for error in await dags.import_errors(conn) if error.file == row.file]
        return row, spec, await schedules.list_all(conn, dag=dag), errors[0] if errors else None

    (row, spec, planned, error), now = ask(read, far=lambda server: far_plans.show_dag(server, dag))
    if as_json:
        print_json(_document(row, spec, planned, error))
        return
    _show_facts(row, spec)
    if error:
        note = line(f"Its file cannot be loaded now, so version {row.number} goes on: ", "bold red")
        show(note.append_text(line(place_of(error), "red")))
    _show_schedules(row, planned, now)
    if spec.params:
        show(heading("Parameters"), _params(spec))
    show(heading("Tasks"), _tasks(spec))
    show(hint(f"\nStart it with: evertick dags trigger {row.name} --wait"))


def _routed(spec: DagSpec, queues: list[str]) -> DagSpec:
    """With the queues that its tasks wait in, whether their author chose them or the rules."""
    tasks = (replace(task, queue=queue) for task, queue in zip(spec.tasks, queues, strict=True))
    return replace(spec, tasks=tuple(tasks))


def schedule_document(row: ListedSchedule, fires: list[datetime] | None = None) -> dict[str, object]:
    found: dict[str, object] = {
        "name": row.name,
        "schedule": in_words(row.spec),
        "spec": row.spec,
        "version": row.version,
        "origin": row.origin,
        "params": row.params,
        "misfire": row.misfire,
        "catchup_window_seconds": row.window_seconds,
        "catchup_limit": row.catchup_limit,
        "overlap": row.overlap,
        "start_within_seconds": row.start_within,
        "finish_within_seconds": row.finish_within,
        "delay_seconds": row.delay_seconds,
        "is_paused": row.paused,
        "is_paused_itself": row.is_held,
        "error": row.error,
        "next_due": row.next_due,
        "last_fired": row.last_fired,
    }
    return found if fires is None else {**found, "next_fires": fires}


def place_of(error: ImportErrorRow) -> str:
    line = f":{error.line}" if error.line else ""
    return f"{error.file}{line}: {error.message}"


def _show_facts(row: DagRow, spec: DagSpec) -> None:
    why = f"runs in fresh interpreters because importing it starts threads: {row.uses_threads}"
    values: dict[str, Cell] = {
        "DAG": line(row.name, "bold"),
        "About": spec.description,
        "Status": state("paused") if row.paused else state("success", "on"),
        "Version": f"{row.number}, published {clock(row.created_at)}",
        "File": row.file,
        "Tags": ", ".join(spec.tags) or None,
        "Active runs": f"at most {spec.max_active_runs}" if spec.max_active_runs else None,
        "Time per run": f"at most {length(spec.run_timeout_seconds)}" if spec.run_timeout_seconds else None,
        "Isolation": why if row.uses_threads else None,
    }
    show(facts(values))


def _show_schedules(row: DagRow, planned: list[ListedSchedule], now: datetime) -> None:
    show(heading("Schedules"))
    if not planned:
        show(hint(f"None: it runs by hand, with `evertick dags trigger {row.name}`."))
        return
    rows = [[each.name, in_words(each.spec), _next_text(each, now), relative(each.last_fired, now)] for each in planned]
    show(table(("NAME", "WHEN", "NEXT", "LAST"), rows))


def _next_text(row: ListedSchedule, now: datetime) -> Cell:
    if row.error:
        return state("failed", row.error)
    if row.paused:
        return state("paused")
    fires = fires_of(row, _FIRES)
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
        [each.name, each.allowed, "must be given" if each.required else json.dumps(each.default), each.description]
        for each in spec.params
    ]
    return table(("NAME", "MUST BE", "DEFAULT", "DESCRIPTION"), rows)


def _retries(retry: RetryPolicy) -> str | None:
    if not retry.retries:
        return None
    return f"{retry.retries} × {length(retry.delay_seconds)} {retry.backoff}"


def _document(
    row: DagRow, spec: DagSpec, planned: list[ListedSchedule], error: ImportErrorRow | None
) -> dict[str, object]:
    upstream = upstream_of(spec)
    return {
        "dag": row.name,
        "description": spec.description,
        "is_paused": row.paused,
        "version": row.number,
        "published_at": row.created_at,
        "file": row.file,
        "tags": spec.tags,
        "max_active_runs": spec.max_active_runs,
        "run_timeout_seconds": spec.run_timeout_seconds,
        "uses_threads": row.uses_threads,
        "import_error": document(error) if error else None,
        "schedules": [schedule_document(each, fires_of(each, _FIRES)) for each in planned],
        "params": [document(each) for each in spec.params],
        "tasks": [_task_document(task, upstream[task.name]) for task in spec.tasks],
    }


def _task_document(task: TaskSpec, upstream: list[str]) -> dict[str, object]:
    found = document(task, without=["name", "inputs"])
    return {"task": task.name, "upstream": upstream, **found}
