"""Schedules of a server: changing them by hand, and what they did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from evertick.cli.far import path, record
from evertick.cli.far_plans import if_match, schedule_row
from evertick.db.queries.schedules import ListedSchedule, ScheduleVersion, Skip
from evertick.domain.dags.spec import NamedSchedule

if TYPE_CHECKING:
    from evertick.cli.server import Server

_MOST = 200


def put(server: Server, dag: str, wanted: NamedSchedule, *, expected: int, request: str) -> ListedSchedule:
    spec = json.loads(wanted.spec.to_json())
    body = {
        "when": spec,
        "timezone": wanted.spec.timezone,
        "params": dict(wanted.params),
        "misfire": wanted.misfire,
        "catchup_window_seconds": wanted.catchup_window_seconds,
        "catchup_limit": wanted.catchup_limit,
        "overlap": wanted.overlap,
        "start_within_seconds": wanted.start_within_seconds,
        "finish_within_seconds": wanted.finish_within_seconds,
    }
    headers = {**if_match(expected), "Idempotency-Key": request}
    return schedule_row(server.put(path("dags", dag, "schedules", wanted.name), body, **headers))


def reset(server: Server, dag: str, name: str) -> bool:
    """Whether the DAG's file declares it."""
    return bool(server.post(path("dags", dag, "schedules", name, "reset"))["is_declared"])


def history(server: Server, dag: str, name: str, limit: int) -> list[ScheduleVersion]:
    found = server.get(path("dags", dag, "schedules", name, "history"), count=min(limit, _MOST))
    return [record(ScheduleVersion, each) for each in found["items"]]


def skips(server: Server, dag: str | None, name: str | None, limit: int) -> list[Skip]:
    found = server.get(path("skips"), dag=dag, name=name, count=min(limit, _MOST))
    return [record(Skip, each) for each in found["items"]]
