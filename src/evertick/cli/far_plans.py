"""DAGs and schedules of a server, as the records that commands show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from evertick.cli.far import find_run, path, record, run_row
from evertick.db.queries.dags import DagRow, ImportErrorRow, ListedVersion
from evertick.db.queries.runs import RunRow
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.errors import Forbidden
from evertick.engine.publish import RolledBack
from evertick.engine.schedules import CatchUp

if TYPE_CHECKING:
    from evertick.cli.server import Server

_MOST_SCHEDULES = 100_000


def dag_row(document: Mapping[str, Any]) -> DagRow:
    """As far as a list shows it: how many tasks there are, not which."""
    spec = {"description": document["description"], "tags": document["tags"], "tasks": [None] * document["task_count"]}
    return DagRow(
        dag_id=0,
        name=document["name"],
        paused=document["is_paused"],
        version_id=None,
        max_active_runs=document["max_active_runs"],
        file=document["file"],
        deleted_at=None,
        number=document["version"],
        spec=spec,
        created_at=datetime.fromisoformat(document["published_at"]) if document["published_at"] else None,
        uses_threads=None,
    )


def list_dag_rows(server: Server, limit: int) -> list[DagRow]:
    return [dag_row(each) for each in server.pages(path("dags"), limit=limit)]


def list_dags(
    server: Server, limit: int
) -> tuple[list[DagRow], list[ListedSchedule], list[RunRow], list[ImportErrorRow]]:
    found, planned = list_dag_rows(server, limit), list_schedules(server, None, _MOST_SCHEDULES)
    newest = [run_row(each) for each in server.pages(path("latest-runs"), limit=limit)]
    return found, planned, newest, _import_errors(server)


def _import_errors(server: Server) -> list[ImportErrorRow]:
    try:
        return [record(ImportErrorRow, each) for each in server.get(path("import-errors"))["items"]]
    except Forbidden:
        # Who is limited to some DAGs is not shown the files of others.
        return []


def find_spec(server: Server, dag: str) -> tuple[Mapping[str, Any], DagSpec]:
    """A DAG's page, and its version as it was published."""
    page = server.get(path("dags", dag))
    return page, from_json(json.dumps(server.get(path("dags", dag, "versions", page["version"]))["spec"]))


def trigger(server: Server, dag: str, params: Mapping[str, object], key: str) -> tuple[RunRow, bool]:
    body, headers = {"params": dict(params)}, {"Idempotency-Key": key}
    made = server.post(path("dags", dag, "runs"), body, **headers)
    return find_run(server, made["run_id"]), made["is_new"]


def pause_dag(server: Server, dag: str) -> bool:
    return bool(server.post(path("dags", dag, "pause"))["is_changed"])


def unpause_dag(server: Server, dag: str, asked: CatchUp) -> bool:
    body = {"catch_up": asked.policy, "window_seconds": asked.window_seconds}
    return bool(server.post(path("dags", dag, "unpause"), body)["is_changed"])


def list_schedules(server: Server, dag: str | None, limit: int) -> list[ListedSchedule]:
    return [schedule_row(each) for each in server.pages(path("schedules"), limit=limit, dag=dag)]


def schedule_row(document: Mapping[str, Any]) -> ListedSchedule:
    return record(
        ListedSchedule,
        document,
        schedule_id=0,
        paused=document["is_paused"],
        is_held=document["is_paused_itself"],
        window_seconds=document["catchup_window_seconds"],
        start_within=document["start_within_seconds"],
        finish_within=document["finish_within_seconds"],
        deleted_at=None,
    )


def find_dag(server: Server, dag: str) -> DagRow:
    return dag_row(server.get(path("dags", dag)))


def delete_dag(server: Server, dag: str) -> bool:
    server.delete(path("dags", dag))
    return True


def show_dag(server: Server, dag: str) -> tuple[DagRow, DagSpec, list[ListedSchedule], ImportErrorRow | None]:
    page, spec = find_spec(server, dag)
    queues = {task["name"]: task["queue"] for task in page["tasks"]}
    routed = replace(spec, tasks=tuple(replace(task, queue=queues[task.name]) for task in spec.tasks))
    errors = [error for error in _import_errors(server) if error.file == page["file"]]
    return dag_row(page), routed, list_schedules(server, dag, _MOST_SCHEDULES), errors[0] if errors else None


def pause_schedule(server: Server, dag: str, name: str, expected: int | None) -> int:
    return int(server.post(path("dags", dag, "schedules", name, "pause"), None, **if_match(expected))["version"])


def unpause_schedule(server: Server, dag: str, name: str, asked: CatchUp, expected: int | None) -> int:
    body = {"catch_up": asked.policy, "window_seconds": asked.window_seconds}
    return int(server.post(path("dags", dag, "schedules", name, "unpause"), body, **if_match(expected))["version"])


def schedules_of(server: Server, dag: str) -> list[ListedSchedule]:
    return [schedule_row(each) for each in server.get(path("dags", dag, "schedules"))["items"]]


def find_schedule(server: Server, dag: str, name: str) -> ListedSchedule:
    return schedule_row(server.get(path("dags", dag, "schedules", name)))


def delete_schedule(server: Server, dag: str, name: str, expected: int | None) -> None:
    server.delete(path("dags", dag, "schedules", name), **if_match(expected))


def if_match(version: int | None) -> dict[str, str]:
    return {} if version is None else {"If-Match": f'"v{version}"'}


# Versions -------------------------------------------------------------------------------------------------------------


def list_versions(server: Server, dag: str, limit: int) -> list[ListedVersion]:
    return [_version_row(each) for each in server.pages(path("dags", dag, "versions"), limit=limit)]


def diff(
    server: Server, dag: str, old: int | None, new: int | None
) -> tuple[ListedVersion, ListedVersion, list[str], list[str]]:
    found = server.get(path("dags", dag, "diff"), old=old, new=new)
    return _version_row(found["old"]), _version_row(found["new"]), found["plan"], found["code"]


def roll_back(server: Server, dag: str, number: int) -> RolledBack:
    return record(RolledBack, server.post(path("dags", dag, "rollback"), {"number": number}))


def _version_row(document: Mapping[str, Any]) -> ListedVersion:
    return record(ListedVersion, document, version_id=0, bundle_hash=document["bundle"])
