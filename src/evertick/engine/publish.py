"""publish: a DAG becomes a version that runs can start from. Publishing the same thing again changes nothing.

What is due under schedules that the new version changes is settled first, in the same transaction.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.dag import DagSpec, NamedSchedule, structural_hash, to_json
from evertick.domain.params import check_params
from evertick.domain.routing import Routing, queues_of
from evertick.domain.schedule import next_after
from evertick.domain.states import TriggerRule
from evertick.engine.plan import JsonObject, is_same_spec, plan_if_possible, spec_json
from evertick.store import dags, schedules, shards
from evertick.store.dags import Published
from evertick.store.db import retry_on_deadlock

DEFAULT_WINDOW_SECONDS = 86_400.0


NO_RULES = Routing()


async def publish(
    conn: AsyncConnection, *, spec: DagSpec, file: str, bundle_hash: str, actor: str, routing: Routing = NO_RULES
) -> Published:
    """Make `spec` the current version of its DAG. Its bundle must be stored already.

    Other rules make no other version: they route the tasks of the version that is there.
    """
    row = dag_row(spec, file=file, bundle_hash=bundle_hash, routing=routing)

    async def once() -> Published:
        now = await shards.read_clock(conn)
        wanted = [schedule_row(spec, schedule, now) for schedule in spec.schedules]
        settle = await plan_changed(conn, spec.name, wanted, now)
        return await dags.publish(conn, dag={**row, "schedules": wanted}, settle=settle, actor=actor)

    return await retry_on_deadlock(once)


async def plan_changed(conn: AsyncConnection, dag: str, wanted: list[JsonObject], now: datetime) -> list[JsonObject]:
    """Plans for what is due under schedules that `wanted` changes or no longer has."""
    kept = {str(each["name"]): each for each in wanted}
    plans = []
    for old in await schedules.of_dag(conn, dag=dag):
        new = kept.get(old.name)
        if new is None or not is_same_spec(old.spec, new["spec"]) or new["params"] != old.params:
            plan = plan_if_possible(old, now)
            plans += [plan] if plan else []
    return plans


def dag_row(spec: DagSpec, *, file: str, bundle_hash: str, routing: Routing = NO_RULES) -> JsonObject:
    """The DAG as the tables hold it: everything that SQL must know without reading the spec."""
    upstream = Counter(down for _, down in spec.edges)
    setups = Counter(down for up, down in spec.edges if spec.tasks[up].is_setup)
    has_downstream = {up for up, _ in spec.edges}
    position = {task.name: index for index, task in enumerate(spec.tasks)}
    queues = queues_of(routing, spec)
    return {
        "name": spec.name,
        "file": file,
        "hash": structural_hash(spec),
        "bundle_hash": bundle_hash,
        "spec": json.loads(to_json(spec)),
        "max_active_runs": spec.max_active_runs,
        "run_timeout": spec.run_timeout_seconds,
        "starts_paused": spec.starts_paused,
        "tasks": [
            {
                "idx": index,
                "name": task.name,
                "queue": queues[index],
                "priority": task.priority,
                "rule": task.trigger_rule,
                "upstream_total": upstream[index],
                "setup_total": setups[index],
                "is_setup": task.is_setup,
                "is_leaf": index not in has_downstream,
                "starts_at_once": upstream[index] == 0 or task.trigger_rule is TriggerRule.ALWAYS,
                "max_attempts": task.retry.retries + 1,
                "rerun_on_loss": task.rerun_on_loss,
                "queue_timeout": task.queue_timeout_seconds,
            }
            for index, task in enumerate(spec.tasks)
        ],
        "edges": [list(edge) for edge in spec.edges],
        "inputs": [[index, position[name]] for index, task in enumerate(spec.tasks) for name in task.inputs],
    }


def schedule_row(spec: DagSpec, schedule: NamedSchedule, now: datetime) -> JsonObject:
    """One schedule of the DAG as the tables hold it, starting after `now`."""
    first = next_after(schedule.spec, now)
    window = spec.catchup_window_seconds
    at = schedule.spec.at
    return {
        "name": schedule.name,
        "spec": spec_json(schedule.spec),
        "params": check_params(spec.params, schedule.params),
        "misfire": spec.misfire,
        "window_seconds": DEFAULT_WINDOW_SECONDS if window is None else window,
        "next_due": first.isoformat() if first else None,
        "passed": at.isoformat() if at is not None and at <= now else None,
    }
