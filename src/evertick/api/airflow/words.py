"""What our states, runs, tasks and errors are called there, and how lists are asked for: limit, offset, order_by, patterns."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from evertick.api.problems import headers_of, status_of
from evertick.domain.errors import UserError
from evertick.store.listing import ListedRun
from evertick.store.tasks import TaskRow

EVERY = "~"
USUAL_ITEMS, MOST_ITEMS = 50, 100
# Lists that cannot be ordered by a key are ordered in memory, up to so many; the answer says so.
MOST_ORDERED = 5000
_SPACE = uuid.UUID("7d0f6d5e-6a3c-5c57-9a26-6a4c1b8f0d11")

Limit = Annotated[int, Query(ge=0)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]
OrderBy = Annotated[list[str] | None, Query(max_length=10)]
Texts = Annotated[list[str] | None, Query(max_length=1000)]

RUN_STATES = {"queued": "queued", "running": "running", "success": "success", "failed": "failed", "canceled": "failed"}
RUN_TYPES = {"scheduled": "scheduled", "manual": "manual", "backfill": "backfill"}
TASK_STATES: dict[str, str | None] = {
    "waiting": None,
    "pending": "scheduled",
    "available": "queued",
    "queued": "queued",
    "running": "running",
    "deferred": "deferred",
    "success": "success",
    "failed": "failed",
    "skipped": "skipped",
    "canceled": "failed",
    "upstream_failed": "upstream_failed",
}

T = TypeVar("T")


class Body(BaseModel):
    """Unknown keys are refused, as there."""

    model_config = ConfigDict(extra="forbid")


def tell(request: Request, error: Exception) -> JSONResponse:
    status, _, detail = status_of(error)
    return JSONResponse({"detail": detail}, status.value, headers=headers_of(error, status))


def tell_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    kept = [{key: each[key] for key in ("type", "loc", "msg")} for each in error.errors()]
    return JSONResponse({"detail": jsonable_encoder(kept)}, 422)


def page_size(limit: int) -> int:
    """0 is as many as allowed."""
    return min(limit or MOST_ITEMS, MOST_ITEMS)


def patterns(contains: str | None, prefix: str | None) -> list[str] | None:
    """LIKE patterns for `a|b`: contains, or begins with, one of them."""
    found = []
    for text, form in ((contains, "%{}%"), (prefix, "{}%")):
        for part in (text or "").split("|"):
            if part:
                plain = part.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
                found.append(form.format(plain))
    return found or None


def fits(text: str | None, contains: str | None, prefix: str | None) -> bool:
    """The same for what is in memory."""
    plain = (text or "").lower()
    parts = [part for part in (contains or "").lower().split("|") if part]
    heads = [part for part in (prefix or "").lower().split("|") if part]
    if not parts and not heads:
        return True
    return any(part in plain for part in parts) or (plain.startswith(tuple(heads)) and bool(heads))


def ordered(items: Sequence[T], order_by: list[str] | None, keys: dict[str, Callable[[T], Any]]) -> list[T]:
    """By several keys, `-` for descending; what has no value comes last."""
    found = list(items)
    for each in reversed(order_by or []):
        name = each.removeprefix("-")
        if name not in keys:
            raise UserError(f"Ordering with '{name}' is disallowed or the attribute does not exist on the model")
        key, is_down = keys[name], each.startswith("-")
        known = sorted((item for item in found if key(item) is not None), key=key, reverse=is_down)
        found = known + [item for item in found if key(item) is None]
    return found


def version_of(dag: str, version_id: int, number: int, created_at: datetime) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid5(_SPACE, f"version {version_id}")),
        "version_number": number,
        "dag_id": dag,
        "dag_display_name": dag,
        "bundle_name": "dags-folder",
        "bundle_version": None,
        "bundle_url": None,
        "created_at": created_at,
    }


def run_document(row: ListedRun) -> dict[str, Any]:
    who, _, name = row.triggered_by.partition(":")
    by = {"cli": "cli", "user": "rest_api"}.get(who, "backfill" if row.kind == "backfill" else "timetable")
    return {
        "dag_run_id": row.text_id,
        "dag_id": row.dag,
        "dag_display_name": row.dag,
        "logical_date": row.fire_at,
        "queued_at": row.created_at,
        "start_date": row.started_at,
        "end_date": row.finished_at,
        "duration": row.seconds,
        "data_interval_start": row.fire_at,
        "data_interval_end": row.fire_at,
        "run_after": row.due_at,
        "last_scheduling_decision": None,
        "run_type": RUN_TYPES[row.kind],
        "state": RUN_STATES[row.state],
        "triggered_by": by,
        "triggering_user_name": name if who in ("user", "cli") else None,
        "conf": row.params,
        "note": row.reason,
        "dag_versions": [version_of(row.dag, row.version_id, row.version, row.version_created_at)],
        "bundle_version": None,
        "partition_key": None,
        "partition_date": None,
    }


def task_state(row: TaskRow) -> str | None:
    if row.state == "pending" and row.not_before is not None:
        return "up_for_retry"
    return TASK_STATES[row.state]


def instance_document(run: ListedRun, row: TaskRow) -> dict[str, Any]:
    seconds = None
    if row.started_at is not None and row.finished_at is not None:
        seconds = (row.finished_at - row.started_at).total_seconds()
    note = row.reason if row.state != "canceled" or row.reason else "canceled"
    return {
        "id": str(uuid.uuid5(_SPACE, f"task {run.run_id} {row.idx} {row.map_index}")),
        "task_id": row.task,
        "task_display_name": row.task,
        "dag_id": run.dag,
        "dag_display_name": run.dag,
        "dag_run_id": run.text_id,
        "map_index": row.map_index,
        "logical_date": run.fire_at,
        "run_after": run.due_at,
        "start_date": row.started_at,
        "end_date": row.finished_at,
        "duration": seconds,
        "state": task_state(row),
        "try_number": row.attempt,
        "max_tries": row.max_attempts - 1,
        "hostname": None,
        "unixname": None,
        "pool": "default_pool",
        "pool_slots": 1,
        "queue": row.queue,
        "priority_weight": row.priority,
        "operator": None,
        "operator_name": None,
        "queued_when": None,
        "scheduled_when": None,
        "pid": None,
        "executor": None,
        "executor_config": "{}",
        "note": note,
        "rendered_map_index": None,
        "rendered_fields": {},
        "trigger": None,
        "triggerer_job": None,
        "dag_version": version_of(run.dag, run.version_id, run.version, run.version_created_at),
    }
