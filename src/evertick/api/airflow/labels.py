"""Airflow's names for Evertick's states, run types, tasks and errors."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from fastapi import Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from evertick.api.problems import headers_of, status_of
from evertick.db.queries.dags import ImportErrorRow
from evertick.db.queries.listings import ListedOutput, ListedTask
from evertick.db.queries.run_lists import ListedRun
from evertick.domain.dags.findings import is_refusal
from evertick.domain.states import AIRFLOW_TASK_STATES

_SPACE = uuid.UUID("7d0f6d5e-6a3c-5c57-9a26-6a4c1b8f0d11")
BUNDLE = "dags-folder"
OWNER = "evertick"
NO_POOL = "default_pool"

RUN_STATES: Mapping[str, str | None] = {
    "queued": "queued",
    "running": "running",
    "success": "success",
    "failed": "failed",
    "canceled": "failed",
}
# The run types of Evertick and Evertick's kind of each. Runs of a materialization request are manual.
RUN_TYPES = {
    "manual": "manual",
    "operator_triggered": "manual",
    "scheduled": "scheduled",
    "asset_triggered": "scheduled",
    "backfill": "backfill",
}
# The trigger of runs that no user started.
_STARTED_BY = {"backfill": "backfill", "operator_triggered": "operator", "asset_triggered": "asset"}
TASK_STATES: Mapping[str, str | None] = {"waiting": None, **AIRFLOW_TASK_STATES}
# The stored state of phases that are not states.
_STATE_OF = {"retrying": "pending", "polling": "deferred"}
# Without `waiting`: finished runs can contain waiting tasks, too.
LIVE = frozenset({"scheduled", "queued", "running", "up_for_retry", "up_for_reschedule", "deferred"})
OPERATORS: Mapping[str, str] = {
    "python": "PythonOperator",
    "shell": "BashOperator",
    "http": "HttpOperator",
    "program": "ExternalPythonOperator",
    "trigger": "TriggerDagRunOperator",
}


def tell(request: Request, error: Exception) -> JSONResponse:
    status, _, detail = status_of(error)
    return JSONResponse({"detail": detail}, status.value, headers=headers_of(error, status))


def tell_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    kept = [{key: each[key] for key in ("type", "loc", "msg")} for each in error.errors()]
    return JSONResponse({"detail": jsonable_encoder(kept)}, 422)


def broken_files(errors: Iterable[ImportErrorRow]) -> set[tuple[str, str]]:
    """The deployment and the name of each file that cannot be loaded."""
    return {(each.deployment, each.file) for each in errors if not is_refusal(each.message)}


def ours(shown: list[str] | None) -> list[str] | None:
    """Translate Airflow's run states to Evertick's."""
    if not shown:
        return None
    return [state for state, name in RUN_STATES.items() if name in shown]


def states_asked(names: list[str]) -> dict[str, Any]:
    """The filter for task instance states. Unfinished ones are searched only in open runs."""
    if not names:
        return {}
    phases = [phase for phase, name in TASK_STATES.items() if name in names]
    plain = sorted({_STATE_OF.get(phase, phase) for phase in phases})
    # Waiting tasks may have no row yet.
    return {"states": names, "plain_states": None if "none" in names else plain, "is_live": LIVE.issuperset(names)}


def operator_of(kind: str) -> str:
    return OPERATORS.get(kind, kind)


def version_of(dag: str, version_id: int, number: int, created_at: datetime) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid5(_SPACE, f"version {version_id}")),
        "version_number": number,
        "dag_id": dag,
        "dag_display_name": dag,
        "bundle_name": BUNDLE,
        "created_at": created_at,
    }


def run_document(row: ListedRun) -> dict[str, Any]:
    who, _, name = row.triggered_by.partition(":")
    by = {"cli": "cli", "user": "rest_api"}.get(who) or _STARTED_BY.get(row.run_type, "timetable")
    return {
        **_of_run(row),
        **_times(row),
        "dag_run_id": row.text_id,
        "queued_at": row.created_at,
        "data_interval_start": row.fire_at,
        "data_interval_end": row.fire_at,
        "run_type": row.run_type,
        "state": RUN_STATES[row.state],
        "triggered_by": by,
        "triggering_user_name": name if who in ("user", "cli") else None,
        "conf": row.params,
        "note": row.note if row.note is not None else row.reason,
        "partition_key": row.partition_key,
        "partition_date": row.partition_date,
        "dag_versions": [version_of(row.dag, row.version_id, row.version, row.version_created_at)],
    }


def _of_run(row: ListedRun | ListedTask | ListedOutput) -> dict[str, Any]:
    return {"dag_id": row.dag, "dag_display_name": row.dag, "logical_date": row.fire_at, "run_after": row.due_at}


def of_task(row: ListedTask | ListedOutput) -> dict[str, Any]:
    return {**_of_run(row), "task_id": row.task, "task_display_name": row.task, "map_index": row.map_index}


def _times(row: ListedRun | ListedTask) -> dict[str, Any]:
    return {"start_date": row.started_at, "end_date": row.finished_at, "duration": row.seconds}


def instance_id(run_id: int, idx: int, map_index: int) -> str:
    return str(uuid.uuid5(_SPACE, f"task {run_id} {idx} {map_index}"))


def instance_document(row: ListedTask, kind: str) -> dict[str, Any]:
    reason = row.reason or ("canceled" if row.phase == "canceled" else None)
    return {
        "id": instance_id(row.run_id, row.idx, row.map_index),
        **of_task(row),
        **_times(row),
        "dag_run_id": row.text_id,
        "state": TASK_STATES[row.phase],
        # Evertick restarts attempt numbers after a clear; Airflow continues them.
        "try_number": row.tries,
        "max_tries": max(row.tries - row.attempt, 0) + row.max_attempts - 1,
        "hostname": row.host,
        # Not recorded. Clients expect a text.
        "unixname": OWNER,
        "pool": row.pool or NO_POOL,
        "pool_slots": row.slots or 1,
        "queue": row.queue,
        "priority_weight": row.priority,
        "operator": operator_of(kind),
        "operator_name": operator_of(kind),
        "executor_config": "{}",
        "note": row.note if row.note is not None else reason,
        "rendered_map_index": (row.map_name or str(row.map_index)) if row.map_index >= 0 else None,
        "rendered_fields": {},
        "dag_version": version_of(row.dag, row.version_id, row.version, row.version_created_at),
    }
