"""Backfills of a server, as the records that commands show."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from evertick.cli.far import path, record
from evertick.db.queries.backfills import BackfillRow, Canceled, Created, FailedRun
from evertick.engine.backfills import BackfillPreview, BackfillRequest
from evertick.engine.fire_schedules import read_spec

if TYPE_CHECKING:
    from evertick.cli.server import Server


def list_backfills(server: Server, dag: str | None, limit: int) -> list[BackfillRow]:
    return [record(BackfillRow, each) for each in server.pages(path("backfills"), limit=limit, dag=dag)]


def find_backfill(server: Server, backfill_id: int) -> tuple[BackfillRow, list[FailedRun]]:
    page = server.get(path("backfills", backfill_id))
    return record(BackfillRow, page), [record(FailedRun, each) for each in page["failed_runs"]]


def foresee(server: Server, wish: BackfillRequest) -> BackfillPreview:
    return _outlook(server.post(path("backfills"), {**_body(wish), "is_preview": True}), wish)


def create(server: Server, wish: BackfillRequest, request: str) -> tuple[Created, BackfillPreview]:
    made = server.post(path("backfills"), _body(wish), **{"Idempotency-Key": request})
    return Created(id=made["backfill_id"], is_new=made["is_new"]), _outlook(made, wish)


def change_backfill(server: Server, backfill_id: int, verb: str) -> BackfillRow:
    """Pause or resume it."""
    return record(BackfillRow, server.post(path("backfills", backfill_id, verb)))


def cancel(server: Server, backfill_id: int, *, leaves_runs: bool) -> Canceled:
    done = server.post(path("backfills", backfill_id, "cancel"), {"leaves_runs": leaves_runs})
    return Canceled(runs=done["canceled_runs"], asked=None)


def _body(wish: BackfillRequest) -> dict[str, Any]:
    return {
        "dag": wish.dag,
        "first": wish.first.isoformat(),
        "last": None if wish.last is None else wish.last.isoformat(),
        "schedule": wish.schedule,
        "when": None if wish.spec is None else json.loads(wish.spec.to_json()),
        "reprocess": wish.reprocess,
        "newest_first": wish.newest_first,
        "parallel": wish.parallel,
        "params": wish.params,
    }


def _outlook(found: dict[str, Any], wish: BackfillRequest) -> BackfillPreview:
    return BackfillPreview(
        dag_id=0,
        schedule_id=None,
        schedule=found["schedule"],
        spec=read_spec(found["spec"]),
        params=wish.params or {},
        first=datetime.fromisoformat(found["first_at"]),
        last=datetime.fromisoformat(found["last_at"]),
        total=found["total"],
        sample=tuple(datetime.fromisoformat(each) for each in found["sample"]),
        existing=found["existing"],
    )
