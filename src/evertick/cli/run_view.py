"""Runs and tasks as tables and documents, for every command that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime

from rich.table import Table
from rich.text import Text

from evertick.cli.output import Cell, clock, facts, line, state, table
from evertick.db.queries.tasks import TaskRow
from evertick.domain.durations import relative, took
from evertick.engine.tasks import full_name
from evertick.operations.runs import Run

_RUN_COLUMNS = ("#RUN", "DAG", "STATE", "#TASKS", "FOR", "STARTED", "TOOK", "BY")
_TASK_COLUMNS = ("TASK", "STATE", "#ATTEMPT", "STARTED", "TOOK", "NOTE")


def run_document(run: Run) -> dict[str, object]:
    """The fields of a run. Every command that prints one, prints the same."""
    found = {each.name: getattr(run, each.name) for each in fields(Run)}
    is_canceling = found.pop("is_canceling")
    return {**found, "cancel_requested": is_canceling or run.state == "canceled"}


def run_table(rows: Iterable[Run], now: datetime) -> Table:
    return table(_RUN_COLUMNS, [_run_cells(row, now) for row in rows])


def run_state(row: Run) -> Text:
    return state(row.state, f"{row.state}, canceling" if row.is_canceling else None)


def run_facts(row: Run, now: datetime) -> Table:
    params = ", ".join(f"{name}={value!r}" for name, value in row.params.items())
    values: Mapping[str, Cell] = {
        "Run": line(f"{row.run_id}", "bold"),
        "DAG": f"{row.dag}, version {row.version}",
        "State": run_state(row),
        "Reason": row.reason,
        "Tasks": f"{row.task_count - row.open_tasks} of {row.task_count} ended",
        "Retried": f"{row.retried} times, as a whole" if row.retried else None,
        "Triggered by": _trigger_text(row),
        "For": clock(row.fire_at or row.created_at),
        "Created": f"{clock(row.created_at)} ({relative(row.created_at, now)})",
        "Took": took(row.started_at, row.finished_at, now) if row.started_at else None,
        "Params": params or None,
    }
    return facts(values)


def _trigger_text(row: Run) -> str:
    if row.triggered_by.startswith("run "):
        return row.triggered_by
    return f"{row.kind}, {row.triggered_by}" + (f", key {row.key}" if row.key else "")


def task_table(rows: Iterable[TaskRow], now: datetime) -> Table:
    return table(_TASK_COLUMNS, [_task_cells(row, now) for row in rows])


def attempt_text(row: TaskRow) -> str | None:
    return f"{row.attempt}/{row.max_attempts}" if row.attempt else None


def task_note(row: TaskRow, now: datetime) -> str | None:
    """Why the task is in its state, as far as its own row tells."""
    if row.request:
        return f"being stopped ({row.request})"
    if row.not_before:
        return f"retry {relative(row.not_before, now)}" + (f"; {row.reason}" if row.reason else "")
    return row.reason


def _run_cells(row: Run, now: datetime) -> list[Cell]:
    done = f"{row.task_count - row.open_tasks}/{row.task_count}"
    lasted = took(row.started_at, row.finished_at, now)
    by = "schedule" if row.kind == "scheduled" else row.triggered_by
    due = clock(row.fire_at or row.created_at)
    return [row.run_id, row.dag, run_state(row), done, due, relative(row.started_at or row.created_at, now), lasted, by]


def _task_cells(row: TaskRow, now: datetime) -> list[Cell]:
    lasted = took(row.started_at, row.finished_at, now)
    started = relative(row.started_at, now)
    name = f"{full_name(row)} {row.map_name}" if row.map_name else full_name(row)
    return [name, state(row.state), attempt_text(row), started, lasted, task_note(row, now)]
