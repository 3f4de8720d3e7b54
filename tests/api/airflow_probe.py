"""What a user of Airflow's official client does, checked value by value against a running server: Airflow's or Evertick's.

The server needs the DAG files of `airflow_probe_dags/airflow` or of `airflow_probe_dags/evertick`, and a fresh database:

    AIRFLOW_PROBE_PASSWORD=... python -m tests.api.airflow_probe http://127.0.0.1:8080 --user admin

prints one line for each operation: ok, or the first check that failed. What Airflow itself does not do is not checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import airflow_client.client as airflow
import httpx
from airflow_client.client.exceptions import ApiException

from tests.api.airflow_world import operations
from tests.waiting import eventually_sync

WITHIN_SECONDS = 150.0
PAUSE_SECONDS = 0.3
DAGS = [
    *("probe_approval", "probe_both", "probe_consumer", "probe_daily", "probe_etl"),
    *("probe_flaky", "probe_gone", "probe_mapped", "probe_producer"),
]
ENDED = ("success", "failed")


class CheckFailed(Exception):
    """A value is not the one that Airflow answers."""


def same(what: str, actual: object, wanted: object) -> None:
    if actual != wanted:
        raise CheckFailed(f"{what} is {actual!r:.300}, but must be {wanted!r:.300}")


def true(what: str, actual: object) -> None:
    if not actual:
        raise CheckFailed(f"{what}: not so")


@dataclass(slots=True)
class Probe:
    """The client of one user, and what earlier checks left for later ones."""

    client: airflow.ApiClient
    url: str
    user: str
    password: str = field(repr=False)
    # A second probe of the same server makes other runs.
    mark: str
    kept: dict[str, Any] = field(default_factory=dict)

    def call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._api(operation), operation)(*arguments, **options)

    def raw(self, operation: str, *arguments: Any, **options: Any) -> Any:
        answer = getattr(self._api(operation), f"{operation}_without_preload_content")(*arguments, **options)
        return answer.status, answer.read()

    def refused(self, status: int, operation: str, *arguments: Any, **options: Any) -> str:
        """The call is refused with this status; returns the reason."""
        answered, content = self.raw(operation, *arguments, **options)
        same(f"status of {operation}{arguments[:1]}", answered, status)
        return str(json.loads(content)["detail"])

    def run(self, dag: str, name: str, **fields: Any) -> str:
        """Trigger a run, and return its id."""
        run_id = f"{name}_{self.mark}"
        body = airflow.TriggerDAGRunPostBody(dag_run_id=run_id, **{"logical_date": None, **fields})
        self.call("trigger_dag_run", dag, body)
        return run_id

    def ended(self, dag: str, name: str, **fields: Any) -> str:
        run_id = self.run(dag, name, **fields)
        self.wait_for_end(dag, run_id)
        return run_id

    def wait_for_end(self, dag: str, run_id: str) -> Any:
        self.until(lambda: self.call("get_dag_run", dag, run_id).state in ENDED)
        return self.call("get_dag_run", dag, run_id)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What several checks look at is made by the first of them."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @staticmethod
    def until(predicate: Callable[[], Any]) -> Any:
        return eventually_sync(predicate, WITHIN_SECONDS, pause_seconds=PAUSE_SECONDS)

    def _api(self, operation: str) -> Any:
        return getattr(airflow, _API_OF[operation])(self.client)


_API_OF = {each.name: each.api for each in operations()}
CHECKS: dict[str, Callable[[Probe], None]] = {}


def check(function: Callable[[Probe], None]) -> Callable[[Probe], None]:
    """The check of the operation with its name."""
    CHECKS[function.__name__] = function
    return function


# The runs that several checks read ----------------------------------------------------------------------------------

NOON = datetime(2024, 3, 1, 12, tzinfo=UTC)


def etl_run(probe: Probe) -> str:
    """A run that succeeded with n = 5."""
    at = NOON + timedelta(seconds=int(probe.mark))
    return probe.once(
        "etl", lambda: probe.ended("probe_etl", "etl", conf={"n": 5, "who": "ann"}, logical_date=at, note="first")
    )


def flaky_run(probe: Probe) -> str:
    return probe.once("flaky", lambda: probe.ended("probe_flaky", "flaky", conf={"n": 7}))


def mapped_run(probe: Probe) -> str:
    return probe.once("mapped", lambda: probe.ended("probe_mapped", "mapped", conf={"n": 4}))


def newest_version(probe: Probe) -> int:
    return int(probe.call("get_dag_versions", "probe_etl").total_entries)


# The server ---------------------------------------------------------------------------------------------------------


@check
def get_version(probe: Probe) -> None:
    true("version begins with 3.", probe.call("get_version").version.startswith("3."))


@check
def get_health(probe: Probe) -> None:
    health = probe.call("get_health")
    same("metadatabase", health.metadatabase.status, "healthy")
    same("scheduler", health.scheduler.status, "healthy")
    true("the scheduler has a heartbeat", health.scheduler.latest_scheduler_heartbeat)


@check
def get_jobs(probe: Probe) -> None:
    jobs = probe.call("get_jobs")
    same("number of jobs", len(jobs.jobs), min(jobs.total_entries, 50))


@check
def get_plugins(probe: Probe) -> None:
    same("number of plugins", len(probe.call("get_plugins").plugins), probe.call("get_plugins").total_entries)


@check
def get_providers(probe: Probe) -> None:
    found = probe.call("get_providers")
    same("number of providers", len(found.providers), found.total_entries)


@check
def get_config(probe: Probe) -> None:
    """Airflow hides its configuration unless it is set to show it."""
    status, content = probe.raw("get_config")
    true(f"status {status} is 200 or 403", status == 403 or (status == 200 and "sections" in json.loads(content)))


@check
def create_token_cli(probe: Probe) -> None:
    """How Airflow's own command line signs in; not in the client."""
    signed_in = sign_in(f"{probe.url}/auth/token/cli", probe.user, probe.password)
    same("status", signed_in.status_code, 201)
    headers = {"Authorization": f"Bearer {signed_in.json()['access_token']}"}
    same("its token", httpx.get(f"{probe.url}/api/v2/dags", headers=headers, timeout=60).status_code, 200)
    same("a wrong password", sign_in(f"{probe.url}/auth/token/cli", probe.user, "wrong").status_code, 401)


@check
def openapi_document(probe: Probe) -> None:
    """What programs that generate a client read; not in the client."""
    answer = httpx.get(f"{probe.url}/openapi.json", timeout=60)
    same("status", answer.status_code, 200)
    true("it has the paths of the API", "/api/v2/dags/{dag_id}/dagRuns" in answer.json()["paths"])


# DAGs ---------------------------------------------------------------------------------------------------------------


@check
def get_dags(probe: Probe) -> None:
    def names(**options: Any) -> list[str]:
        return [dag.dag_id for dag in probe.call("get_dags", tags=["probe"], **options).dags]

    same("the DAGs with the tag", names(), DAGS)
    same("their number", probe.call("get_dags", tags=["probe"]).total_entries, len(DAGS))
    same("descending", names(order_by=["-dag_id"]), DAGS[::-1])
    same("the second page of two", names(limit=2, offset=2), DAGS[2:4])
    same("by pattern", names(dag_id_pattern="probe_%a_ly"), ["probe_daily"])
    same("paused", names(paused=True), ["probe_daily"])
    same("with assets", names(has_asset_schedule=True), ["probe_both", "probe_consumer"])
    both = probe.call("get_dags", tags=["probe", "probe_etl_tag"], tags_match_mode="all").dags
    same("with both tags", [dag.dag_id for dag in both], ["probe_etl"])
    probe.refused(400, "get_dags", order_by=["nonsense"])


@check
def get_dag(probe: Probe) -> None:
    daily, etl = probe.call("get_dag", "probe_daily"), probe.call("get_dag", "probe_etl")
    same("is_paused", (daily.is_paused, etl.is_paused), (True, False))
    consumer = probe.call("get_dag", "probe_consumer")
    same("timetable_summary", (daily.timetable_summary, etl.timetable_summary), ("0 0 * * *", None))
    same("timetable_summary after assets", consumer.timetable_summary, "Asset")
    backfillable = (daily.is_backfillable, etl.is_backfillable, consumer.is_backfillable)
    same("is_backfillable", backfillable, (True, False, False))
    same("description", etl.description, "Extract, transform, load.")
    same("tags", sorted(tag.name for tag in etl.tags), ["probe", "probe_etl_tag"])
    same("limits", (etl.max_active_runs, etl.max_active_tasks), (4, 16))
    same("flags", (etl.is_stale, etl.has_import_errors, etl.dag_display_name), (False, False, "probe_etl"))
    true("the file is named", etl.fileloc.endswith("etl.py") and etl.relative_fileloc.endswith("etl.py"))
    periodic = (daily.timetable_periodic, etl.timetable_periodic, consumer.timetable_periodic)
    same("timetable_periodic", periodic, (True, False, False))
    same("next run of one without a schedule", etl.next_dagrun_run_after, None)
    true("an owner", etl.owners)
    true("404 names the DAG", "nowhere" in probe.refused(404, "get_dag", "nowhere"))


@check
def get_dag_details(probe: Probe) -> None:
    daily, etl = probe.call("get_dag_details", "probe_daily"), probe.call("get_dag_details", "probe_etl")
    same("start_date", daily.start_date, datetime(2024, 1, 1, tzinfo=UTC))
    same("timezone and catchup", (daily.timezone, daily.catchup), ("UTC", False))
    same("start_date of one without", etl.start_date, None)
    same("limits", (etl.max_active_runs, etl.concurrency), (4, 16))
    same("version", etl.latest_dag_version.version_number, newest_version(probe))
    same("params", etl.params, {})
    same("is_paused_upon_creation", daily.is_paused_upon_creation, True)
    probe.refused(404, "get_dag_details", "nowhere")


@check
def patch_dag(probe: Probe) -> None:
    for is_paused in (True, False):
        body = airflow.DAGPatchBody(is_paused=is_paused)
        changed = probe.call("patch_dag", "probe_flaky", body, update_mask=["is_paused"])
        same("is_paused", changed.is_paused, is_paused)
        same("is_paused afterwards", probe.call("get_dag", "probe_flaky").is_paused, is_paused)
    probe.refused(400, "patch_dag", "probe_flaky", body, update_mask=["tags"])
    probe.refused(404, "patch_dag", "nowhere", body)


@check
def patch_dags(probe: Probe) -> None:
    for is_paused in (True, False):
        body = airflow.DAGPatchBody(is_paused=is_paused)
        changed = probe.call("patch_dags", body, dag_id_pattern="probe_fla", tags=["probe"])
        same("changed", [(dag.dag_id, dag.is_paused) for dag in changed.dags], [("probe_flaky", is_paused)])
    same("another", probe.call("get_dag", "probe_daily").is_paused, True)


@check
def get_dag_tags(probe: Probe) -> None:
    found = probe.call("get_dag_tags", tag_name_pattern="probe")
    same("tags", found.tags, ["probe", "probe_etl_tag"])
    same("their number", found.total_entries, 2)


@check
def get_tasks(probe: Probe) -> None:
    found = probe.call("get_tasks", "probe_etl")
    below = {task.task_id: sorted(task.downstream_task_ids) for task in found.tasks}
    same("downstream tasks", below, {"extract": ["transform"], "load": [], "transform": ["load"]})
    same("their number", found.total_entries, 3)
    down = probe.call("get_tasks", "probe_etl", order_by="-task_id").tasks
    same("descending", [task.task_id for task in down], ["transform", "load", "extract"])
    probe.refused(404, "get_tasks", "nowhere")


@check
def get_task(probe: Probe) -> None:
    task = probe.call("get_task", "probe_flaky", "unsteady")
    same("retries", task.retries, 2)
    same("retry_delay", (task.retry_delay.days, task.retry_delay.seconds), (0, 1))
    same("rule, pool, slots", (task.trigger_rule, task.pool, task.pool_slots), ("all_success", "default_pool", 1))
    same("flags", (task.is_mapped, task.depends_on_past, task.wait_for_downstream), (False, False, False))
    same("queue", task.queue, "default")
    same("a mapped one", probe.call("get_task", "probe_mapped", "square").is_mapped, True)
    probe.refused(404, "get_task", "probe_flaky", "nothing")


@check
def get_dag_versions(probe: Probe) -> None:
    found = probe.call("get_dag_versions", "probe_etl")
    numbers = [each.version_number for each in found.dag_versions]
    same("numbers", numbers, list(range(1, len(numbers) + 1)))
    same("DAG, number", (found.dag_versions[0].dag_id, found.total_entries), ("probe_etl", len(numbers)))


@check
def get_dag_version(probe: Probe) -> None:
    listed = probe.call("get_dag_versions", "probe_etl").dag_versions[0]
    same("id", probe.call("get_dag_version", "probe_etl", 1).id, listed.id)
    probe.refused(404, "get_dag_version", "probe_etl", 99)


@check
def get_dag_source(probe: Probe) -> None:
    found = probe.call("get_dag_source", "probe_etl")
    true("the source of a task", "def transform(batch" in found.content)
    same("whose", (found.dag_id, found.version_number), ("probe_etl", newest_version(probe)))
    _, content = probe.raw("get_dag_source", "probe_etl", accept="text/plain")
    true("the same as text", content.decode() == found.content)
    probe.refused(404, "get_dag_source", "nowhere")


@check
def get_import_errors(probe: Probe) -> None:
    found = probe.call("get_import_errors")
    same("number", (len(found.import_errors), found.total_entries), (1, 1))
    (error,) = found.import_errors
    true("its file", error.filename.endswith("broken.py"))
    true("the reason", "the probe's broken file" in error.stack_trace)
    same("by another name", probe.call("get_import_errors", filename_pattern="nothing").import_errors, [])


@check
def get_import_error(probe: Probe) -> None:
    (listed,) = probe.call("get_import_errors").import_errors
    one = probe.call("get_import_error", listed.import_error_id)
    same("file and time", (one.filename, one.timestamp), (listed.filename, listed.timestamp))
    probe.refused(404, "get_import_error", listed.import_error_id + 1000)


@check
def delete_dag(probe: Probe) -> None:
    probe.call("delete_dag", "probe_gone")
    probe.refused(404, "delete_dag", "nowhere")


# Runs ---------------------------------------------------------------------------------------------------------------


@check
def trigger_dag_run(probe: Probe) -> None:
    # It waits during the other checks: Airflow fails a task that is answered as soon as it waits.
    asked_run(probe)
    run_id, at = f"made_{probe.mark}", NOON + timedelta(days=1, seconds=int(probe.mark))
    body = airflow.TriggerDAGRunPostBody(
        dag_run_id=run_id, logical_date=at, conf={"n": 2, "any": {"thing": [1]}}, note="why"
    )
    made = probe.call("trigger_dag_run", "probe_etl", body)
    same("id, DAG, time", (made.dag_run_id, made.dag_id, made.logical_date), (run_id, "probe_etl", at))
    same("conf and note", (made.conf, made.note), ({"n": 2, "any": {"thing": [1]}}, "why"))
    true("it is to run", made.state in ("queued", "running"))
    same("how", (made.run_type, made.triggered_by), ("manual", "rest_api"))
    same("by whom", made.triggering_user_name, probe.user)
    probe.refused(409, "trigger_dag_run", "probe_etl", body)
    again = airflow.TriggerDAGRunPostBody(dag_run_id=f"{run_id}_2", logical_date=at)
    probe.refused(409, "trigger_dag_run", "probe_etl", again)
    plain = probe.call("trigger_dag_run", "probe_etl", airflow.TriggerDAGRunPostBody(logical_date=None))
    true("a made id begins with manual__", plain.dag_run_id.startswith("manual__"))
    same("no logical date, no conf", (plain.logical_date, plain.conf), (None, {}))
    probe.refused(404, "trigger_dag_run", "nowhere", body)
    same("it ended well", probe.wait_for_end("probe_etl", run_id).state, "success")
    rows = probe.call("get_xcom_entry", "probe_etl", "extract", run_id, "return_value").actual_instance.value
    same("the task saw conf", rows, {"rows": 2})
    probe.wait_for_end("probe_etl", plain.dag_run_id)


@check
def get_dag_run(probe: Probe) -> None:
    run = probe.call("get_dag_run", "probe_etl", etl_run(probe))
    same("state, type", (run.state, run.run_type), ("success", "manual"))
    same("conf, note", (run.conf, run.note), ({"n": 5, "who": "ann"}, "first"))
    true("it began and ended", run.queued_at <= run.start_date <= run.end_date)
    true("duration", abs(run.duration - (run.end_date - run.start_date).total_seconds()) < 0.01)
    same("version", [each.version_number for each in run.dag_versions], [newest_version(probe)])
    same("name of the DAG", run.dag_display_name, "probe_etl")
    same("one that failed", probe.call("get_dag_run", "probe_flaky", flaky_run(probe)).state, "failed")
    true("404 names the run", "nothing" in probe.refused(404, "get_dag_run", "probe_etl", "nothing"))


@check
def get_dag_runs(probe: Probe) -> None:
    first, other = etl_run(probe), flaky_run(probe)

    def ids(dag: str = "~", **options: Any) -> list[str]:
        options = {"run_id_pattern": probe.mark, **options}
        return [run.dag_run_id for run in probe.call("get_dag_runs", dag, **options).dag_runs]

    true("of one DAG", first in ids("probe_etl") and other not in ids("probe_etl"))
    same("failed", ids("probe_flaky", state=["failed"]), [other])
    same("by id", ids(run_id_pattern=first), [first])
    run = probe.call("get_dag_run", "probe_etl", first)
    same("by logical date", ids(logical_date_gte=run.logical_date, logical_date_lte=run.logical_date), [first])
    same("none of a type", ids(run_type=["scheduled"]), [])
    down = ids(order_by=["-run_after"])
    same("by time, both ways", ids(order_by=["run_after"]), down[::-1])
    same("the second page", ids(order_by=["-run_after"], limit=1, offset=1), down[1:2])
    by_cursor, cursor = [], ""
    while cursor is not None:
        options = {"order_by": ["run_after"], "limit": 1, "run_id_pattern": probe.mark}
        page = probe.call("get_dag_runs", "~", cursor=cursor, **options)
        by_cursor += [run.dag_run_id for run in page.dag_runs]
        cursor = page.next_cursor
    same("by cursor", by_cursor, down[::-1])
    probe.refused(404, "get_dag_runs", "nowhere")


@check
def get_list_dag_runs_batch(probe: Probe) -> None:
    first, other = etl_run(probe), flaky_run(probe)

    def ids(**fields: Any) -> list[str]:
        found = probe.call("get_list_dag_runs_batch", "~", airflow.DAGRunsBatchBody(**fields)).dag_runs
        return [run.dag_run_id for run in found if run.dag_run_id.endswith(probe.mark)]

    true("of two DAGs", {first, other} <= set(ids(dag_ids=["probe_etl", "probe_flaky"])))
    same("failed", ids(dag_ids=["probe_flaky"], states=["failed"]), [other])
    same("none", ids(dag_ids=["probe_daily"]), [])


@check
def patch_dag_run(probe: Probe) -> None:
    run_id = probe.ended("probe_etl", "patched")
    noted = probe.call("patch_dag_run", "probe_etl", run_id, airflow.DAGRunPatchBody(note="seen"))
    same("note, state", (noted.note, noted.state), ("seen", "success"))
    failed = probe.call("patch_dag_run", "probe_etl", run_id, airflow.DAGRunPatchBody(state="failed"))
    same("state, note", (failed.state, failed.note), ("failed", "seen"))
    again = probe.call("patch_dag_run", "probe_etl", run_id, airflow.DAGRunPatchBody(state="queued"))
    true("it runs again", again.state in ("queued", "running"))
    same("its end", probe.wait_for_end("probe_etl", run_id).state, "success")
    probe.refused(404, "patch_dag_run", "probe_etl", "nothing", airflow.DAGRunPatchBody(note="x"))


@check
def wait_dag_run_until_finished(probe: Probe) -> None:
    run_id = etl_run(probe)
    over = probe.call("wait_dag_run_until_finished", "probe_etl", run_id, interval=1, result=["load", "transform"])
    same("its end and results", over, {"state": "success", "results": {"load": "10 rows", "transform": 10}})
    waited = probe.run("probe_etl", "waited")
    lines = probe.call("wait_dag_run_until_finished", "probe_etl", waited, interval=0.5)
    last = lines if isinstance(lines, dict) else json.loads(lines.strip().splitlines()[-1])
    same("the last line", last["state"], "success")
    probe.refused(404, "wait_dag_run_until_finished", "probe_etl", "nothing", interval=1)


@check
def clear_dag_run(probe: Probe) -> None:
    run_id = probe.ended("probe_etl", "cleared")
    _, content = probe.raw("clear_dag_run", "probe_etl", run_id, airflow.DAGRunClearBody())
    foreseen = sorted(each["task_id"] for each in json.loads(content)["task_instances"])
    same("a dry run unless asked", foreseen, ["extract", "load", "transform"])
    same("nothing happened", probe.call("get_dag_run", "probe_etl", run_id).state, "success")
    _, content = probe.raw("clear_dag_run", "probe_etl", run_id, airflow.DAGRunClearBody(dry_run=False))
    true("it runs again", json.loads(content)["state"] in ("queued", "running"))
    probe.wait_for_end("probe_etl", run_id)
    same("its second try", probe.call("get_task_instance", "probe_etl", run_id, "load").try_number, 2)


@check
def clear_dag_runs(probe: Probe) -> None:
    ids = [probe.ended("probe_etl", f"several{place}") for place in (1, 2)]
    chosen = [airflow.BulkDAGRunBody(dag_run_id=each) for each in ids]
    _, content = probe.raw("clear_dag_runs", "probe_etl", airflow.BulkDAGRunClearBody(dag_runs=chosen))
    same("foreseen", json.loads(content)["total_entries"], 6)
    body = airflow.BulkDAGRunClearBody(dag_runs=chosen, dry_run=False)
    _, content = probe.raw("clear_dag_runs", "probe_etl", body)
    same("cleared", sorted(each["dag_run_id"] for each in json.loads(content)["dag_runs"]), sorted(ids))
    for each in ids:
        same("its end", probe.wait_for_end("probe_etl", each).state, "success")


@check
def bulk_dag_runs(probe: Probe) -> None:
    one, other = (probe.ended("probe_etl", f"bulk{place}") for place in (1, 2))
    body = airflow.BulkBodyBulkDAGRunBody.from_dict(
        {
            "actions": [
                {"action": "update", "entities": [{"dag_run_id": one, "note": "bulk"}]},
                {"action": "delete", "entities": [other]},
                {"action": "delete", "entities": ["nothing"]},
            ]
        }
    )
    done = probe.call("bulk_dag_runs", "probe_etl", body)
    same("updated", (len(done.update.success), done.update.errors), (1, []))
    same("deleted", len(done.delete.success), 1)
    same("errors of delete", [error["status_code"] for error in done.delete.errors], [404])
    same("note", probe.call("get_dag_run", "probe_etl", one).note, "bulk")


@check
def delete_dag_run(probe: Probe) -> None:
    run_id = probe.ended("probe_etl", "deleted")
    probe.call("delete_dag_run", "probe_etl", run_id)
    probe.refused(404, "get_dag_run", "probe_etl", run_id)
    probe.refused(404, "delete_dag_run", "probe_etl", run_id)


@check
def get_dag_stats(probe: Probe) -> None:
    etl_run(probe), flaky_run(probe)
    (stats,) = probe.call("get_dag_stats", dag_ids=["probe_flaky"]).dags
    counts = {str(each.state.value): each.count for each in stats.stats}
    failed = probe.call("get_dag_runs", "probe_flaky", state=["failed"]).total_entries
    same("states", set(counts), {"queued", "running", "success", "failed"})
    same("failed, running", (counts["failed"], counts["running"]), (failed, 0))


# Task instances -----------------------------------------------------------------------------------------------------


@check
def get_task_instances(probe: Probe) -> None:
    found = probe.call("get_task_instances", "probe_flaky", flaky_run(probe))
    states = {task.task_id: task.state.value for task in found.task_instances}
    same("states", states, {"unsteady": "success", "hopeless": "failed", "never": "upstream_failed"})
    same("their number", found.total_entries, 3)
    failed = probe.call("get_task_instances", "probe_flaky", flaky_run(probe), state=["failed"]).task_instances
    same("failed", [task.task_id for task in failed], ["hopeless"])
    ordered = probe.call("get_task_instances", "probe_etl", etl_run(probe), order_by=["start_date"]).task_instances
    same("in order of time", [task.task_id for task in ordered], ["extract", "transform", "load"])
    everywhere = probe.call(
        "get_task_instances", "~", "~", task_id="hopeless", run_id_pattern=probe.mark
    ).task_instances
    true("in all runs", flaky_run(probe) in [task.dag_run_id for task in everywhere])
    probe.refused(404, "get_task_instances", "probe_etl", "nothing")


@check
def get_task_instance(probe: Probe) -> None:
    task = probe.call("get_task_instance", "probe_flaky", flaky_run(probe), "unsteady")
    same("state, tries", (task.state, task.try_number, task.max_tries), ("success", 2, 2))
    same("place", (task.dag_id, task.dag_run_id, task.map_index), ("probe_flaky", flaky_run(probe), -1))
    same("pool, queue", (task.pool, task.pool_slots, task.queue), ("default_pool", 1, "default"))
    true("it began and ended", task.start_date <= task.end_date)
    true("where and as whom", task.hostname and task.unixname)
    true("duration", task.duration is not None and task.duration >= 0)
    same("version", task.dag_version.version_number, 1)
    never = probe.call("get_task_instance", "probe_flaky", flaky_run(probe), "never")
    same("one that never ran", (never.state, never.try_number), ("upstream_failed", 0))
    true(
        "404 names the task",
        "nothing" in probe.refused(404, "get_task_instance", "probe_flaky", flaky_run(probe), "nothing"),
    )
    probe.refused(404, "get_task_instance", "probe_mapped", mapped_run(probe), "square")


@check
def get_task_instances_batch(probe: Probe) -> None:
    runs = [etl_run(probe), flaky_run(probe)]

    def names(**fields: Any) -> list[str]:
        body = airflow.TaskInstancesBatchBody(dag_run_ids=runs, **fields)
        return sorted(task.task_id for task in probe.call("get_task_instances_batch", "~", "~", body).task_instances)

    same("of two runs", names(), ["extract", "hopeless", "load", "never", "transform", "unsteady"])
    same("failed", names(state=["failed"]), ["hopeless"])
    same("of one DAG", names(dag_ids=["probe_etl"]), ["extract", "load", "transform"])


@check
def get_task_instance_tries(probe: Probe) -> None:
    tries = probe.call("get_task_instance_tries", "probe_flaky", flaky_run(probe), "unsteady").task_instances
    found = sorted((each.try_number, each.state.value) for each in tries)
    true("two tries", [number for number, _ in found] == [1, 2])
    same("the last one", found[-1], (2, "success"))
    true("the first one failed", found[0][1] in ("failed", "up_for_retry"))


@check
def get_task_instance_try_details(probe: Probe) -> None:
    place = ("probe_flaky", flaky_run(probe), "unsteady")
    same("the second", probe.call("get_task_instance_try_details", *place, 2).state, "success")
    same("the first", probe.call("get_task_instance_try_details", *place, 1).try_number, 1)
    probe.refused(404, "get_task_instance_try_details", *place, 9)


@check
def get_task_instance_dependencies(probe: Probe) -> None:
    run_id = etl_run(probe)
    same(
        "of one that ended", probe.call("get_task_instance_dependencies", "probe_etl", run_id, "load").dependencies, []
    )
    probe.refused(404, "get_task_instance_dependencies", "probe_etl", run_id, "nothing")


@check
def get_mapped_task_instances(probe: Probe) -> None:
    place = ("probe_mapped", mapped_run(probe), "square")
    found = probe.call("get_mapped_task_instances", *place)
    same("indexes", sorted(task.map_index for task in found.task_instances), [0, 1, 2, 3])
    same("their number", found.total_entries, 4)
    same("states", {task.state.value for task in found.task_instances}, {"success"})
    down = probe.call("get_mapped_task_instances", *place, order_by=["-map_index"], limit=2).task_instances
    same("the last two", [task.map_index for task in down], [3, 2])
    probe.refused(404, "get_mapped_task_instances", "probe_mapped", mapped_run(probe), "nothing")


@check
def get_mapped_task_instance(probe: Probe) -> None:
    place = ("probe_mapped", mapped_run(probe), "square")
    task = probe.call("get_mapped_task_instance", *place, 2)
    same("place, state", (task.task_id, task.map_index, task.state), ("square", 2, "success"))
    detail = probe.refused(404, "get_mapped_task_instance", *place, 77)
    true(f"404 names the map index, not {detail!r}", "77" in detail)


@check
def get_mapped_task_instance_tries(probe: Probe) -> None:
    tries = probe.call("get_mapped_task_instance_tries", "probe_mapped", mapped_run(probe), "square", 1).task_instances
    same("tries", [(each.try_number, each.map_index, each.state) for each in tries], [(1, 1, "success")])


@check
def get_mapped_task_instance_try_details(probe: Probe) -> None:
    place = ("probe_mapped", mapped_run(probe), "square")
    one = probe.call("get_mapped_task_instance_try_details", *place, 1, 3)
    same("try, index", (one.try_number, one.map_index), (1, 3))
    probe.refused(404, "get_mapped_task_instance_try_details", *place, 5, 3)


@check
def get_task_instance_dependencies_by_map_index(probe: Probe) -> None:
    place = ("probe_mapped", mapped_run(probe), "square")
    same("reasons", probe.call("get_task_instance_dependencies_by_map_index", *place, 0).dependencies, [])


@check
def post_clear_task_instances(probe: Probe) -> None:
    run_id = probe.ended("probe_etl", "again")

    def cleared(**fields: Any) -> list[str]:
        body = airflow.ClearTaskInstancesBody(dag_run_id=run_id, **fields)
        found = probe.call("post_clear_task_instances", "probe_etl", body).task_instances
        return sorted(task.task_id for task in found)

    inner = airflow.ClearTaskInstancesBodyTaskIdsInner
    same("only what failed unless asked", cleared(), [])
    same("one task", cleared(only_failed=False, task_ids=[inner("transform")]), ["transform"])
    below = cleared(only_failed=False, task_ids=[inner("transform")], include_downstream=True)
    same("and what follows", below, ["load", "transform"])
    above = cleared(only_failed=False, task_ids=[inner("transform")], include_upstream=True)
    same("and what precedes", above, ["extract", "transform"])
    same("a dry run unless asked", probe.call("get_dag_run", "probe_etl", run_id).state, "success")
    done = cleared(only_failed=False, task_ids=[inner("load")], dry_run=False)
    same("cleared", done, ["load"])
    same("its end", probe.wait_for_end("probe_etl", run_id).state, "success")
    tries = {
        task.task_id: task.try_number for task in probe.call("get_task_instances", "probe_etl", run_id).task_instances
    }
    same("tries", tries, {"extract": 1, "transform": 1, "load": 2})
    probe.refused(404, "post_clear_task_instances", "nowhere", airflow.ClearTaskInstancesBody())


@check
def patch_task_instance(probe: Probe) -> None:
    run_id = probe.ended("probe_etl", "marked")
    body = airflow.PatchTaskInstanceBody(new_state="failed")
    done = probe.call("patch_task_instance", "probe_etl", run_id, "load", body).task_instances
    same("marked", [(task.task_id, task.state) for task in done], [("load", "failed")])
    same("it stays", probe.call("get_task_instance", "probe_etl", run_id, "load").state, "failed")
    noted = airflow.PatchTaskInstanceBody(note="by hand")
    done = probe.call("patch_task_instance", "probe_etl", run_id, "extract", noted, update_mask=["note"]).task_instances
    same("noted", [(task.note, task.state) for task in done], [("by hand", "success")])
    same("noted afterwards", probe.call("get_task_instance", "probe_etl", run_id, "extract").note, "by hand")
    probe.refused(404, "patch_task_instance", "probe_etl", run_id, "nothing", body)


@check
def patch_task_instance_dry_run(probe: Probe) -> None:
    body = airflow.PatchTaskInstanceBody(new_state="failed")
    found = probe.call("patch_task_instance_dry_run", "probe_etl", etl_run(probe), "load", body).task_instances
    same("foreseen", [task.task_id for task in found], ["load"])
    same("nothing happened", probe.call("get_task_instance", "probe_etl", etl_run(probe), "load").state, "success")


@check
def patch_task_instance_by_map_index(probe: Probe) -> None:
    run_id = probe.ended("probe_mapped", "map_marked", conf={"n": 2})
    body = airflow.PatchTaskInstanceBody(new_state="failed")
    done = probe.call("patch_task_instance_by_map_index", "probe_mapped", run_id, "square", 1, body).task_instances
    same("marked", [(task.map_index, task.state) for task in done], [(1, "failed")])
    kept = probe.call("get_mapped_task_instance", "probe_mapped", run_id, "square", 0)
    same("another", kept.state, "success")


@check
def patch_task_instance_dry_run_by_map_index(probe: Probe) -> None:
    body = airflow.PatchTaskInstanceBody(new_state="failed")
    where = ("probe_mapped", mapped_run(probe), "square", 2, body)
    found = probe.call("patch_task_instance_dry_run_by_map_index", *where).task_instances
    same("foreseen", [task.map_index for task in found], [2])


@check
def bulk_task_instances(probe: Probe) -> None:
    run_id = probe.ended("probe_etl", "bulk_tasks")
    # Airflow changes nothing of an action that names something unknown.
    entities = ({"task_id": name, "new_state": "failed"} for name in ("load", "nothing"))
    actions = [{"action": "update", "entities": [each]} for each in entities]
    body = airflow.BulkBodyBulkTaskInstanceBody.from_dict({"actions": actions})
    done = probe.call("bulk_task_instances", "probe_etl", run_id, body)
    same("changed", done.update.success, [f"probe_etl.{run_id}.load[-1]"])
    same("errors", [error["status_code"] for error in done.update.errors], [404])
    same("state", probe.call("get_task_instance", "probe_etl", run_id, "load").state, "failed")


@check
def get_log(probe: Probe) -> None:
    def lines(*place: Any, **options: Any) -> list[str]:
        content = probe.call("get_log", *place, full_content=True, **options).content.actual_instance
        return [line if isinstance(line, str) else line.event for line in content]

    plain = lines("probe_etl", etl_run(probe), "extract", 1)
    true("the printed line", any("extracting 5 rows" in line for line in plain))
    first = lines("probe_flaky", flaky_run(probe), "unsteady", 1)
    true("of the first try", any("try 1" in line for line in first) and not any("try 2" in line for line in first))
    mapped = lines("probe_mapped", mapped_run(probe), "square", 1, map_index=2)
    true("of one instance", any("squaring 2" in line for line in mapped))
    probe.refused(404, "get_log", "probe_etl", etl_run(probe), "nothing", 1)


# Approvals ----------------------------------------------------------------------------------------------------------


def asked_run(probe: Probe) -> str:
    def make() -> str:
        run_id = probe.run("probe_approval", "asked")
        place = ("get_task_instance", "probe_approval", run_id, "ask")
        probe.until(lambda: probe.call(*place).state in ("awaiting_input", "deferred"))
        return run_id

    return probe.once("asked", make)


@check
def get_hitl_details(probe: Probe) -> None:
    (found,) = probe.call("get_hitl_details", "probe_approval", asked_run(probe)).hitl_details
    same("subject, options", (found.subject, found.options), ("Release?", ["Approve", "Reject"]))
    same("answered", (found.response_received, found.responded_at), (False, None))
    same("of which task", found.task_instance.task_id, "ask")
    same("its form", found.params["copies"]["value"], 1)
    everywhere = probe.call("get_hitl_details", "~", "~", dag_id_pattern="probe_approval", response_received=False)
    true("in all runs", asked_run(probe) in [each.task_instance.dag_run_id for each in everywhere.hitl_details])


@check
def get_hitl_detail(probe: Probe) -> None:
    found = probe.call("get_hitl_detail", "probe_approval", asked_run(probe), "ask", -1)
    same("subject, multiple", (found.subject, found.multiple), ("Release?", False))
    true("when", found.created_at)
    probe.refused(404, "get_hitl_detail", "probe_approval", asked_run(probe), "release", -1)


@check
def update_hitl_detail(probe: Probe) -> None:
    place = ("probe_approval", asked_run(probe), "ask", -1)
    body = airflow.UpdateHITLDetailPayload(chosen_options=["Approve"], params_input={"copies": 3})
    done = probe.call("update_hitl_detail", *place, body)
    same("answer", (done.chosen_options, done.params_input), (["Approve"], {"copies": 3}))
    same("by whom", done.responded_by.name, probe.user)
    probe.refused(409, "update_hitl_detail", *place, body)
    same("its end", probe.wait_for_end("probe_approval", asked_run(probe)).state, "success")
    same("what follows ran", probe.call("get_task_instance", *place[:2], "release").state, "success")
    same("kept", probe.call("get_hitl_detail", *place).chosen_options, ["Approve"])


# XComs --------------------------------------------------------------------------------------------------------------


@check
def get_xcom_entries(probe: Probe) -> None:
    found = probe.call("get_xcom_entries", "probe_etl", etl_run(probe), "extract")
    same("keys", [entry.key for entry in found.xcom_entries], ["return_value"])
    everywhere = probe.call("get_xcom_entries", "probe_etl", etl_run(probe), "~").xcom_entries
    same("of all tasks", sorted(entry.task_id for entry in everywhere), ["extract", "load", "transform"])


@check
def get_xcom_entry(probe: Probe) -> None:
    def value(dag: str, task: str, run_id: str, **options: Any) -> Any:
        return probe.call("get_xcom_entry", dag, task, run_id, "return_value", **options).actual_instance.value

    same("a dict", value("probe_etl", "extract", etl_run(probe)), {"rows": 5})
    same("a number", value("probe_etl", "transform", etl_run(probe)), 10)
    same("a text", value("probe_etl", "load", etl_run(probe)), "10 rows")
    same("conf of a retried task", value("probe_flaky", "unsteady", flaky_run(probe)), 7)
    same("of one instance", value("probe_mapped", "square", mapped_run(probe), map_index=3), 9)
    same("their sum", value("probe_mapped", "total", mapped_run(probe)), 14)
    probe.refused(404, "get_xcom_entry", "probe_etl", "extract", etl_run(probe), "nothing")


@check
def create_xcom_entry(probe: Probe) -> None:
    place = ("probe_etl", "extract", etl_run(probe))
    body = airflow.XComCreateBody(key="size", value={"n": 1})
    made = probe.call("create_xcom_entry", *place, body)
    same("key, value", (made.key, made.value), ("size", {"n": 1}))
    same("read again", probe.call("get_xcom_entry", *place, "size").actual_instance.value, {"n": 1})
    probe.refused(409, "create_xcom_entry", *place, body)


@check
def update_xcom_entry(probe: Probe) -> None:
    place = ("probe_etl", "extract", etl_run(probe))
    same("value", probe.call("update_xcom_entry", *place, "size", airflow.XComUpdateBody(value=[2])).value, [2])
    probe.refused(404, "update_xcom_entry", *place, "nothing", airflow.XComUpdateBody(value=1))


@check
def delete_xcom_entry(probe: Probe) -> None:
    place = ("probe_etl", "extract", etl_run(probe), "size")
    probe.call("delete_xcom_entry", *place)
    probe.refused(404, "get_xcom_entry", *place)


# Variables, connections, pools --------------------------------------------------------------------------------------


@check
def post_variable(probe: Probe) -> None:
    body = airflow.VariableBody(key=f"v_{probe.mark}", value={"a": 1}, description="d")
    made = probe.call("post_variable", body)
    same("key, description", (made.key, made.description), (body.key, "d"))
    same("value", json.loads(made.value), {"a": 1})
    probe.refused(409, "post_variable", body)


@check
def get_variable(probe: Probe) -> None:
    same("value", json.loads(probe.call("get_variable", f"v_{probe.mark}").value), {"a": 1})
    secret = airflow.VariableBody(key=f"api_key_{probe.mark}", value="canary")
    probe.call("post_variable", secret)
    same("a secret", probe.call("get_variable", secret.key).value, "***")
    probe.refused(404, "get_variable", "nothing")


@check
def get_variables(probe: Probe) -> None:
    found = probe.call("get_variables", variable_key_pattern=probe.mark, order_by=["key"])
    same("keys", [each.key for each in found.variables], [f"api_key_{probe.mark}", f"v_{probe.mark}"])
    same("their number", found.total_entries, 2)


@check
def patch_variable(probe: Probe) -> None:
    key = f"v_{probe.mark}"
    changed = probe.call("patch_variable", key, airflow.VariableBody(key=key, value="new"), update_mask=["value"])
    same("value, description", (changed.value, changed.description), ("new", "d"))
    probe.refused(404, "patch_variable", "nothing", airflow.VariableBody(key="nothing", value="x"))


@check
def delete_variable(probe: Probe) -> None:
    for key in (f"v_{probe.mark}", f"api_key_{probe.mark}"):
        probe.call("delete_variable", key)
        probe.refused(404, "get_variable", key)


@check
def bulk_variables(probe: Probe) -> None:
    key = f"b_{probe.mark}"
    body = airflow.BulkBodyVariableBody.from_dict(
        {
            "actions": [
                {"action": "create", "entities": [{"key": key, "value": "1"}]},
                {"action": "create", "action_on_existence": "overwrite", "entities": [{"key": key, "value": "3"}]},
                {"action": "delete", "entities": [key]},
                {"action": "delete", "entities": ["nothing"]},
            ]
        }
    )
    done = probe.call("bulk_variables", body)
    same("created, deleted", (done.create.success, done.delete.success), ([key, key], [key]))
    same("errors of delete", [error["status_code"] for error in done.delete.errors], [404])


CONNECTION: dict[str, Any] = {"conn_type": "postgres", "host": "h", "login": "anna", "port": 5432, "password": "canary"}
EXTRA = {"a": "shown", "api_key": "hidden", "nested": {"token": "hidden", "b": 1}, "n": 5}
SHOWN = {"a": "shown", "api_key": "***", "nested": {"token": "***", "b": 1}, "n": 5}


@check
def post_connection(probe: Probe) -> None:
    body = airflow.ConnectionBody(
        connection_id=f"c_{probe.mark}", extra=json.dumps(EXTRA), var_schema="shop", description="d", **CONNECTION
    )
    made = probe.call("post_connection", body)
    same(
        "address",
        (made.conn_type, made.host, made.login, made.port, made.var_schema),
        ("postgres", "h", "anna", 5432, "shop"),
    )
    same("password", made.password, "***")
    same("extra", json.loads(made.extra), SHOWN)
    probe.refused(409, "post_connection", body)


@check
def get_connection(probe: Probe) -> None:
    found = probe.call("get_connection", f"c_{probe.mark}")
    same("id, description", (found.connection_id, found.description), (f"c_{probe.mark}", "d"))
    same("extra", json.loads(found.extra), SHOWN)
    probe.refused(404, "get_connection", "nothing")


@check
def get_connections(probe: Probe) -> None:
    found = probe.call("get_connections", connection_id_pattern=probe.mark)
    same("ids", [each.connection_id for each in found.connections], [f"c_{probe.mark}"])
    same("their number", found.total_entries, 1)


@check
def patch_connection(probe: Probe) -> None:
    name = f"c_{probe.mark}"
    body = airflow.ConnectionBody(connection_id=name, conn_type="postgres", host="other")
    changed = probe.call("patch_connection", name, body, update_mask=["host"])
    same("host, login", (changed.host, changed.login), ("other", "anna"))
    same("extra", json.loads(changed.extra), SHOWN)
    body = airflow.ConnectionBody(connection_id="nothing", conn_type="postgres")
    probe.refused(404, "patch_connection", "nothing", body)


@check
def delete_connection(probe: Probe) -> None:
    probe.call("delete_connection", f"c_{probe.mark}")
    probe.refused(404, "get_connection", f"c_{probe.mark}")
    probe.refused(404, "delete_connection", f"c_{probe.mark}")


@check
def bulk_connections(probe: Probe) -> None:
    name = f"d_{probe.mark}"

    def done(*actions: dict[str, Any]) -> Any:
        return probe.call("bulk_connections", airflow.BulkBodyConnectionBody.from_dict({"actions": actions}))

    created = done({"action": "create", "entities": [{"connection_id": name, "conn_type": "http"}]})
    same("created", created.create.success, [name])
    deleted = done({"action": "delete", "entities": [name]}, {"action": "delete", "entities": ["nothing"]})
    same("deleted", deleted.delete.success, [name])
    same("errors", [error["status_code"] for error in deleted.delete.errors], [404])


@check
def post_pool(probe: Probe) -> None:
    body = airflow.PoolBody(name=f"p_{probe.mark}", slots=4, description="d")
    made = probe.call("post_pool", body)
    same("name, slots", (made.name, made.slots, made.open_slots), (body.name, 4, 4))
    probe.refused(409, "post_pool", body)


@check
def get_pool(probe: Probe) -> None:
    pool = probe.call("get_pool", f"p_{probe.mark}")
    same("slots", (pool.slots, pool.occupied_slots, pool.running_slots, pool.queued_slots), (4, 0, 0, 0))
    same("description", pool.description, "d")
    usual = probe.call("get_pool", "default_pool")
    same("default_pool", (usual.name, usual.slots), ("default_pool", 128))
    same("its slots", usual.open_slots + usual.occupied_slots, 128)
    probe.refused(404, "get_pool", "nothing")


@check
def get_pools(probe: Probe) -> None:
    found = [pool.name for pool in probe.call("get_pools", order_by=["name"]).pools]
    true("both are listed", {"default_pool", f"p_{probe.mark}"} <= set(found))
    some = probe.call("get_pools", pool_name_pattern=probe.mark)
    same("by pattern", ([pool.name for pool in some.pools], some.total_entries), ([f"p_{probe.mark}"], 1))


@check
def patch_pool(probe: Probe) -> None:
    name = f"p_{probe.mark}"
    patch = airflow.PoolPatchBody(pool=name, slots=6, include_deferred=False)
    changed = probe.call("patch_pool", name, patch, update_mask=["slots"])
    same("slots, description", (changed.slots, changed.description), (6, "d"))
    unknown = airflow.PoolPatchBody(pool="nothing", slots=1, include_deferred=True)
    probe.refused(404, "patch_pool", "nothing", unknown)


@check
def delete_pool(probe: Probe) -> None:
    probe.call("delete_pool", f"p_{probe.mark}")
    probe.refused(404, "get_pool", f"p_{probe.mark}")
    probe.refused(400, "delete_pool", "default_pool")


@check
def bulk_pools(probe: Probe) -> None:
    name = f"b_{probe.mark}"
    body = airflow.BulkBodyPoolBody.from_dict(
        {
            "actions": [
                {"action": "create", "entities": [{"name": name, "slots": 1}]},
                {"action": "update", "entities": [{"name": name, "slots": 9}]},
                {"action": "delete", "entities": [name]},
                {"action": "delete", "entities": ["nothing"]},
            ]
        }
    )
    done = probe.call("bulk_pools", body)
    same("created, changed, deleted", (done.create.success, done.update.success, done.delete.success), ([name],) * 3)
    same("errors", [error["status_code"] for error in done.delete.errors], [404])


# Assets -------------------------------------------------------------------------------------------------------------


def asset_of(probe: Probe, name: str) -> Any:
    (found,) = probe.call("get_assets", name_pattern=name).assets
    return found


@check
def get_assets(probe: Probe) -> None:
    found = probe.call("get_assets", name_pattern="probe_", order_by=["name"])
    same("names", [asset.name for asset in found.assets], ["probe_orders", "probe_rates"])
    same("their number", found.total_entries, 2)


@check
def get_asset(probe: Probe) -> None:
    asset = probe.call("get_asset", asset_of(probe, "probe_orders").id)
    producers = [(task.dag_id, task.task_id) for task in asset.producing_tasks]
    same("producers", producers, [("probe_producer", "produce")])
    same("consumers", sorted(dag.dag_id for dag in asset.scheduled_dags), ["probe_both", "probe_consumer"])
    probe.refused(404, "get_asset", 10**8)


@check
def materialize_asset(probe: Probe) -> None:
    run_id = f"asset_{probe.mark}"
    body = airflow.MaterializeAssetBody(dag_run_id=run_id)
    made = probe.call("materialize_asset", asset_of(probe, "probe_orders").id, body)
    same("the producer's run", (made.dag_id, made.dag_run_id), ("probe_producer", run_id))
    same("its end", probe.wait_for_end("probe_producer", run_id).state, "success")
    probe.kept["producer"] = run_id
    probe.refused(404, "materialize_asset", 10**8)


def consumed_run(probe: Probe) -> Any:
    """The run that the producer's run triggered."""

    def make() -> Any:
        before = probe.kept["producer"]

        def found() -> Any:
            # Airflow answers 500 until the run has started.
            status, content = probe.raw("get_asset_events", source_dag_id="probe_producer")
            events = json.loads(content)["asset_events"] if status == 200 else []
            made = [run for event in events if event["source_run_id"] == before for run in event["created_dagruns"]]
            return next((run["run_id"] for run in made if run["dag_id"] == "probe_consumer"), None)

        return probe.until(found)

    return probe.once("consumed", make)


@check
def get_asset_events(probe: Probe) -> None:
    consumed_run(probe)
    found = probe.call("get_asset_events", asset_id=asset_of(probe, "probe_orders").id, source_dag_id="probe_producer")
    (event,) = [each for each in found.asset_events if each.source_run_id == probe.kept["producer"]]
    same(
        "source", (event.source_dag_id, event.source_task_id, event.source_map_index), ("probe_producer", "produce", -1)
    )
    same("name", (event.name, event.asset_id), ("probe_orders", asset_of(probe, "probe_orders").id))
    same("of another", probe.call("get_asset_events", source_dag_id="probe_etl").asset_events, [])


@check
def get_upstream_asset_events(probe: Probe) -> None:
    run_id = consumed_run(probe)
    run = probe.wait_for_end("probe_consumer", run_id)
    same("the run it triggered", (run.run_type, run.state), ("asset_triggered", "success"))
    events = probe.call("get_upstream_asset_events", "probe_consumer", run_id).asset_events
    true("its source", probe.kept["producer"] in [each.source_run_id for each in events])
    probe.refused(404, "get_upstream_asset_events", "probe_consumer", "nothing")


@check
def get_dag_asset_queued_events(probe: Probe) -> None:
    probe.until(lambda: probe.raw("get_dag_asset_queued_events", "probe_both")[0] == 200)
    found = probe.call("get_dag_asset_queued_events", "probe_both")
    same(
        "queued",
        [(each.dag_id, each.asset_id) for each in found.queued_events],
        [("probe_both", asset_of(probe, "probe_orders").id)],
    )


@check
def get_dag_asset_queued_event(probe: Probe) -> None:
    event = probe.call("get_dag_asset_queued_event", "probe_both", asset_of(probe, "probe_orders").id)
    same("DAG", event.dag_id, "probe_both")
    probe.refused(404, "get_dag_asset_queued_event", "probe_both", asset_of(probe, "probe_rates").id)


@check
def get_asset_queued_events(probe: Probe) -> None:
    found = probe.call("get_asset_queued_events", asset_of(probe, "probe_orders").id).queued_events
    same("queued", [each.dag_id for each in found], ["probe_both"])


def queue_again(probe: Probe) -> None:
    """Another update of the first asset waits for the second."""
    body = airflow.CreateAssetEventsBody(asset_id=asset_of(probe, "probe_orders").id)
    probe.call("create_asset_event", body)
    probe.until(lambda: probe.raw("get_dag_asset_queued_event", "probe_both", body.asset_id)[0] == 200)


@check
def delete_dag_asset_queued_event(probe: Probe) -> None:
    asset = asset_of(probe, "probe_orders").id
    probe.call("delete_dag_asset_queued_event", "probe_both", asset)
    probe.refused(404, "get_dag_asset_queued_event", "probe_both", asset)


@check
def delete_dag_asset_queued_events(probe: Probe) -> None:
    queue_again(probe)
    probe.call("delete_dag_asset_queued_events", "probe_both")
    probe.refused(404, "get_dag_asset_queued_event", "probe_both", asset_of(probe, "probe_orders").id)
    probe.refused(404, "delete_dag_asset_queued_events", "probe_both")


@check
def delete_asset_queued_events(probe: Probe) -> None:
    queue_again(probe)
    probe.call("delete_asset_queued_events", asset_of(probe, "probe_orders").id)
    probe.refused(404, "get_dag_asset_queued_event", "probe_both", asset_of(probe, "probe_orders").id)


@check
def create_asset_event(probe: Probe) -> None:
    asset = asset_of(probe, "probe_rates").id
    made = probe.call("create_asset_event", airflow.CreateAssetEventsBody(asset_id=asset, extra={"rows": 7}))
    same("asset, extra", (made.asset_id, made.extra), (asset, {"rows": 7, "from_rest_api": True}))
    listed = probe.call("get_asset_events", asset_id=asset, order_by=["-timestamp"]).asset_events
    same("listed", listed[0].id, made.id)
    # A second probe of this server begins as the first did.
    probe.until(lambda: probe.raw("get_dag_asset_queued_event", "probe_both", asset)[0] == 200)
    probe.call("delete_dag_asset_queued_events", "probe_both")
    probe.refused(404, "create_asset_event", airflow.CreateAssetEventsBody(asset_id=10**8))


# Backfills ----------------------------------------------------------------------------------------------------------


def days(probe: Probe) -> list[datetime]:
    """Three days. Another probe of the same server has others."""
    first = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=3 * (int(probe.mark) % 250))
    return [first + timedelta(days=place) for place in range(3)]


def three_days(probe: Probe, **fields: Any) -> Any:
    found = days(probe)
    return airflow.BackfillPostBody(dag_id="probe_daily", from_date=found[0], to_date=found[-1], **fields)


def days_of(runs: list[Any]) -> list[datetime]:
    return sorted(run.logical_date for run in runs)


def backfill_runs(probe: Probe, body: Any) -> list[Any]:
    runs = probe.call("get_dag_runs", "probe_daily", logical_date_gte=body.from_date, logical_date_lte=body.to_date)
    return list(runs.dag_runs)


@check
def create_backfill_dry_run(probe: Probe) -> None:
    found = probe.call("create_backfill_dry_run", three_days(probe))
    same("number", (len(found.backfills), found.total_entries), (3, 3))
    same("days", days_of(found.backfills), days(probe))
    same("no run was made", backfill_runs(probe, three_days(probe)), [])


@check
def create_backfill(probe: Probe) -> None:
    body = three_days(probe, max_active_runs=3, dag_run_conf={"n": 1})
    made = probe.call("create_backfill", body)
    probe.kept["backfill"] = made.id
    same("range", (made.dag_id, made.from_date, made.to_date), ("probe_daily", body.from_date, body.to_date))
    same("limits", (made.max_active_runs, made.is_paused, made.reprocess_behavior), (3, False, "none"))
    same("conf", made.dag_run_conf, {"n": 1})
    # Airflow makes them with the backfill, a scheduler after it.
    probe.until(lambda: len(backfill_runs(probe, body)) == 3)
    runs = backfill_runs(probe, body)
    same("its runs", days_of(runs), days(probe))
    same("how", {run.run_type for run in runs} | {run.triggered_by for run in runs}, {"backfill"})
    same("they wait, as the DAG is paused", {run.state for run in runs}, {"queued"})
    same("their conf", [run.conf for run in runs], [{"n": 1}] * 3)
    ids = sorted(run.dag_run_id for run in runs)
    same("their ids", ids, [f"backfill__{day.isoformat()}" for day in days(probe)])
    probe.refused(409, "create_backfill", body)
    unknown = airflow.BackfillPostBody(dag_id="nowhere", from_date=NOON, to_date=NOON)
    probe.refused(404, "create_backfill", unknown)


@check
def get_backfill(probe: Probe) -> None:
    found = probe.call("get_backfill", probe.kept["backfill"])
    same("DAG, end", (found.dag_id, found.completed_at), ("probe_daily", None))
    probe.refused(404, "get_backfill", 10**8)


@check
def list_backfills(probe: Probe) -> None:
    found = probe.call("list_backfills", "probe_daily")
    true("it is listed", probe.kept["backfill"] in [each.id for each in found.backfills])


@check
def pause_backfill(probe: Probe) -> None:
    same("is_paused", probe.call("pause_backfill", probe.kept["backfill"]).is_paused, True)
    same("afterwards", probe.call("get_backfill", probe.kept["backfill"]).is_paused, True)


@check
def unpause_backfill(probe: Probe) -> None:
    same("is_paused", probe.call("unpause_backfill", probe.kept["backfill"]).is_paused, False)


@check
def cancel_backfill(probe: Probe) -> None:
    done = probe.call("cancel_backfill", probe.kept["backfill"])
    true("it is over", done.completed_at)
    same("its runs", {run.state for run in backfill_runs(probe, three_days(probe))}, {"failed"})
    probe.refused(409, "cancel_backfill", probe.kept["backfill"])


# The audit log ------------------------------------------------------------------------------------------------------


# What an operation is called in the log. Which objects Evertick cleared, and what for it started a run, is in other fields.
EVENTS = [
    *("patch_dag", "delete_dag", "trigger_dag_run", "patch_dag_run", "delete_dag_run"),
    *("post_clear_task_instances", "patch_task_instance", "update_hitl_detail"),
    *("create_xcom_entry", "update_xcom_entry", "delete_xcom_entry"),
    *("post_variable", "patch_variable", "delete_variable", "post_connection", "patch_connection"),
    *("delete_connection", "post_pool", "patch_pool", "delete_pool", "create_asset_event"),
    *("create_backfill", "pause_backfill", "unpause_backfill", "cancel_backfill"),
]


@check
def get_event_logs(probe: Probe) -> None:
    """Reads what the other checks did: they come first."""
    run_id = etl_run(probe)

    def found(**options: Any) -> list[Any]:
        return list(probe.call("get_event_logs", **options).event_logs)

    newest = found(dag_id="probe_etl", event="trigger_dag_run", order_by=["-when"])
    true("the triggered runs are there", newest)
    same("event, owner", (newest[0].event, newest[0].owner), ("trigger_dag_run", probe.user))
    true("when", newest[0].when)
    same("by pattern", {each.event for each in found(event_pattern="trigger_dag")}, {"trigger_dag_run"})
    same("of one run", {each.run_id for each in found(run_id=run_id)}, {run_id})
    same("of no DAG", found(dag_id="nowhere"), [])
    same("absent events", [name for name in EVENTS if not found(event=name, owner=probe.user, limit=1)], [])


@check
def get_event_log(probe: Probe) -> None:
    listed = probe.call("get_event_logs", event="trigger_dag_run", limit=1).event_logs[0]
    one = probe.call("get_event_log", listed.event_log_id)
    same("event, when", (one.event, one.when), (listed.event, listed.when))
    probe.refused(404, "get_event_log", 10**8)


# The program --------------------------------------------------------------------------------------------------------


def sign_in(address: str, user: str, password: str) -> httpx.Response:
    return httpx.post(address, json={"username": user, "password": password}, timeout=60)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v2/version", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def connected(url: str, user: str, password: str) -> Probe:
    """Signed in as this user, with a server that has read the files."""
    Probe.until(lambda: is_up(url))
    answer = sign_in(f"{url}/auth/token", user, password)
    if answer.status_code != 201:
        raise SystemExit(f"{url}/auth/token answers {answer.status_code}: {answer.text[:200]}")
    client = airflow.ApiClient(airflow.Configuration(host=url, access_token=answer.json()["access_token"]))
    probe = Probe(client=client, url=url, user=user, password=password, mark=str(int(time.time()) % 1_000_000))
    wanted = set(DAGS) - {"probe_gone"}
    probe.until(lambda: wanted <= {dag.dag_id for dag in probe.call("get_dags", tags=["probe"]).dags})
    probe.until(lambda: probe.call("get_import_errors").import_errors)
    return probe


def outcome(probe: Probe, name: str) -> str | None:
    """None if everything is as in Airflow, or the first difference."""
    try:
        CHECKS[name](probe)
    except CheckFailed as failed:
        return str(failed)
    except ApiException as error:
        return f"{error.status} {error.reason}: {str(error.body)[:300]}"
    except Exception as error:
        # The client's own models refuse a value, or a run does not end.
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--user", default="admin")
    parser.add_argument("--only", nargs="*", help="operations to check")
    chosen = parser.parse_args()
    password = os.environ.get("AIRFLOW_PROBE_PASSWORD") or parser.error("set AIRFLOW_PROBE_PASSWORD")
    probe = connected(chosen.url.rstrip("/"), chosen.user, password)
    names = chosen.only or list(CHECKS)
    failed = 0
    for name in names:
        found = outcome(probe, name)
        failed += found is not None
        print(f"{name}: {found or 'ok'}", flush=True)
    print(f"{len(names) - failed} of {len(names)} operations conform")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
