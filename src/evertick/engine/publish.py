"""Publish and roll back: a DAG becomes a version that runs can start from. Publishing the same thing again changes nothing.

Fires that are due under schedules changed by the new version are decided first, in the same transaction.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import dags, deployments, gates, secrets
from evertick.db.queries.dags import ListedVersion
from evertick.db.queries.schedules import DagSchedule
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.gates import KEYED, GateKind, GateSpec, awaits_past, key_parts, version_path
from evertick.domain.dags.graph import group_leaves, groups_of, leaves, map_heads
from evertick.domain.dags.mapping_rows import edge_scope, mapped_group_rows, mapping_rows
from evertick.domain.dags.spec import ChildSpec, DagSpec, TaskSpec, from_json, structural_hash, to_json
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec
from evertick.domain.deployments import DEFAULT, DeploymentChange, DeploymentKind
from evertick.domain.errors import Conflict, MissingPool, NotFound, NotOwned
from evertick.domain.notifications import DestinationKind, callback_dag, read_destination
from evertick.domain.routing import Routing, queues_of
from evertick.domain.states import TriggerRule
from evertick.domain.stored_values import ValueKind
from evertick.engine.fire_schedules import JsonObject, is_same_spec, plan_end
from evertick.engine.runs import find_dag_row
from evertick.engine.schedules import (
    Planner,
    outlets_of,
    plan_replaced,
    read_snapshot,
    refuse_loops,
    schedule_row,
    until_unmoved,
)

NO_RULES = Routing()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDag:
    """A DAG that is to be published. Its bundle must already be stored."""

    spec: DagSpec
    file: str
    bundle_hash: str


@dataclass(frozen=True, slots=True)
class Published:
    """`is_new`: the deployment has a new version. `done`: the DAGs, in the order of their names."""

    version: int
    is_new: bool
    done: list[JsonObject]


@dataclass(frozen=True, slots=True)
class StoredDag:
    dag: str
    dag_id: int
    version_id: int
    is_new: bool
    rerouted: int


@sql_function(retries=False)
async def publish_dags(
    conn: AsyncConnection,
    *,
    deployment: JsonObject,
    dags: list[JsonObject],
    retired: list[str],
    seen: JsonObject,
    settle: list[JsonObject],
    actor: Actor,
) -> Published: ...


DEPLOYMENT_CHANGED, _OTHER_KIND, _OTHER_OWNER = "EV004", "EV005", "EV006"


async def publish(
    conn: AsyncConnection,
    *,
    spec: DagSpec,
    file: str,
    bundle_hash: str,
    actor: Actor,
    routing: Routing = NO_RULES,
    deployment: str = DEFAULT,
) -> StoredDag:
    """Make `spec` the current version of one DAG of a deployment."""
    given = PublishedDag(spec=spec, file=file, bundle_hash=bundle_hash)
    done = await publish_all(conn, DeploymentChange(name=deployment), [given], actor=actor, routing=routing)
    return stored_dags(done)[0]


def stored_dags(done: Published) -> list[StoredDag]:
    return [StoredDag(**each) for each in done.done]  # type: ignore[arg-type]


async def publish_all(
    conn: AsyncConnection,
    change: DeploymentChange,
    given: Sequence[PublishedDag],
    *,
    retired: Collection[str] = (),
    actor: Actor,
    routing: Routing = NO_RULES,
) -> Published:
    """Make each of these the current version of its DAG and retire others of the deployment, all in one transaction.

    Changed routing rules create no new version: they route the tasks of the existing one.
    """
    await refuse_unpublishable(conn, change.name, [each.spec for each in given])
    rows = {each.spec.name: (each.spec, _row_of(each, routing)) for each in given}

    async def once() -> Published:
        wanted, seen, settle = [], dict[str, object](), list[JsonObject]()
        for name, (spec, row) in rows.items():
            before = await read_snapshot(conn, dag=name, plan=_ends_of_changed(spec))
            known = {old.name: old for old in before.rows}
            planned = [schedule_row(spec, each, before.now, old=known.get(each.name)) for each in spec.schedules]
            wanted.append({**row, "schedules": planned})
            seen[name], settle = before.seen, [*settle, *before.settle]
        for name in retired:
            before = await read_snapshot(conn, dag=name, plan=plan_end)
            seen[name], settle = before.seen, [*settle, *before.settle]
        return await publish_dags(
            conn,
            deployment={name: value for name, value in asdict(change).items() if value is not None},
            dags=wanted,
            retired=list(retired),
            seen=seen,
            settle=settle,
            actor=actor,
        )

    try:
        return await until_unmoved(once)
    except psycopg.Error as error:
        if error.sqlstate not in (DEPLOYMENT_CHANGED, _OTHER_KIND, _OTHER_OWNER):
            raise
        await refuse_unpublishable(conn, change.name, [each.spec for each in given])
        raise await refusal(conn, change.name, change.expected) from None


async def refuse_unpublishable(conn: AsyncConnection, deployment: str, specs: Sequence[DagSpec]) -> None:
    """Refuse DAGs that belong to another deployment, that lack a pool, or that would start each other endlessly."""
    for row in await dags.owners(conn, names=[spec.name for spec in specs]):
        if row.deployment != deployment:
            raise NotOwned(
                f"DAG {row.name!r} belongs to deployment {row.deployment!r} ({row.file}), so deployment {deployment!r} cannot"
                f" publish it. Rename one of them, or delete the published one first: evertick dags delete {row.name}"
            )
    for spec in specs:
        await check_pools(conn, spec)
    await refuse_loops(
        conn,
        wanted={spec.name: spec.schedules for spec in specs},
        outlets={spec.name: outlets_of(spec) for spec in specs},
        stays=lambda wait: wait.origin == "user",
    )


async def refusal(conn: AsyncConnection, name: str, expected: int | None) -> Conflict:
    """Why the database refused the change of a deployment."""
    found = await deployments.find(conn, name)
    if found is None or (expected is not None and found.version != expected):
        version = found.version if found else 0
        return Conflict(
            f"Deployment {name!r} is at version {version}, not at {expected}: another change finished first. Nothing was"
            " changed. Check it, and try again."
        )
    return Conflict(
        f"The DAGs of deployment {name!r} come from {DeploymentKind(found.kind).about}. Choose another name."
    )


def _ends_of_changed(spec: DagSpec) -> Planner:
    declared = {schedule.name: schedule for schedule in spec.schedules}

    def plan(old: DagSchedule, now: datetime) -> JsonObject | None:
        """The due fires of a schedule that this changes or removes."""
        new = declared.get(old.name)
        is_kept = old.origin == "user" or (new is not None and not differs(old, schedule_row(spec, new, now, old=old)))
        return None if is_kept else plan_replaced(old, new, now)

    return plan


def _row_of(given: PublishedDag, routing: Routing) -> JsonObject:
    row = dag_row(given.spec, file=given.file, bundle_hash=given.bundle_hash, routing=routing)
    return {**row, "assets": asset_rows(given.spec)}


def differs(old: DagSchedule, new: JsonObject) -> bool:
    """Whether publishing creates a new version of the schedule."""
    rules = ("params", "misfire", "window_seconds", "catchup_limit", "overlap", "start_within", "finish_within")
    return not is_same_spec(old.spec, new["spec"]) or any(getattr(old, each) != new[each] for each in rules)


def dag_row(spec: DagSpec, *, file: str, bundle_hash: str, routing: Routing = NO_RULES) -> JsonObject:
    """The DAG as the tables hold it: everything that SQL must know without parsing the spec."""
    upstream = Counter(down for _, down in spec.edges)
    setups = Counter(down for up, down in spec.edges if spec.tasks[up].is_setup)
    decisive, queues = leaves(spec), queues_of(routing, spec)
    position = {task.name: index for index, task in enumerate(spec.tasks)}
    group_of, ends_of_groups, heads = groups_of(spec), group_leaves(spec), map_heads(spec)
    of_mapped_groups = mapped_group_rows(spec, heads)
    # The end of these wakes tasks of the next run.
    past = {gate.name for task in spec.tasks for gate in task.gates if gate.kind is GateKind.PAST}
    return {
        "name": spec.name,
        "file": file,
        "hash": structural_hash(spec),
        "bundle_hash": bundle_hash,
        "spec": json.loads(to_json(spec)),
        "max_active_runs": spec.max_active_runs,
        "run_timeout": spec.run_timeout_seconds,
        "run_retries": spec.retries,
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
                "is_leaf": index in decisive,
                "starts_at_once": upstream[index] == 0 or task.trigger_rule is TriggerRule.ALWAYS,
                "max_attempts": task.retry.retries + 1,
                "rerun_on_loss": task.rerun_on_loss,
                "queue_timeout": task.queue_timeout_seconds,
                "outlets": list(task.outlets) or ([] if task.aliases else None),
                # A task that waits for something outside runs on no runner: no gate holds it, but it is decided with the gates.
                "is_gated": bool(task.gates) or spec.max_active_tasks is not None or task.runs_nowhere,
                "is_ordered": any(gate.kind is GateKind.ORDER for gate in task.gates),
                "awaits_past": awaits_past(task.gates) or task.name in past,
                "defers": task.runs_nowhere,
                "is_mapped": task.mapping is not None,
                "notifies": bool(task.notices),
                "group_id": group_of[index],
                "decides_grp": index in ends_of_groups,
                **of_mapped_groups[index],
            }
            for index, task in enumerate(spec.tasks)
        ],
        **group_rows(spec, group_of, heads),
        "gates": [row for index in range(len(spec.tasks)) for row in gate_rows(spec, index)],
        "inputs": input_rows(spec, position),
        **mapping_rows(spec, position),
        "notices": notice_rows(spec),
        "deadlines": deadline_rows(spec),
        "children": [
            child_row(task, index, task.child) for index, task in enumerate(spec.tasks) if task.child is not None
        ],
        "waits": [wait_row(spec, index, task.wait) for index, task in enumerate(spec.tasks) if task.wait is not None],
    }


def input_rows(spec: DagSpec, position: Mapping[str, int]) -> list[list[int]]:
    """Its own position stands for the facts about its run."""
    given = [(index, name) for index, task in enumerate(spec.tasks) for name in task.inputs]
    given += [(index, task.name) for index, task in enumerate(spec.tasks) if task.knows_run]
    return [[index, position[name]] for index, name in given]


def asset_rows(spec: DagSpec) -> list[JsonObject]:
    return [
        {
            "name": each.name,
            "uri": each.uri or each.name,
            "group": each.group,
            "extra": dict(each.extra),
            "partitions": None if each.partitions is None else dict(each.partitions),
        }
        for each in spec.assets
    ]


def group_rows(spec: DagSpec, group_of: Sequence[int | None], heads: Sequence[int | None]) -> JsonObject:
    """The groups with retries, and the edges that lead out of a group."""
    outside = [None if group_of[up] == group_of[down] else group_of[up] for up, down in spec.edges]
    edges = zip(spec.edges, outside, strict=True)
    return {
        "edges": [
            [up, down, left, *([edge_scope(spec, up, down, heads)] if heads[down] is not None else [])]
            for (up, down), left in edges
        ],
        "groups": [
            {
                "group_id": number,
                "name": group.name,
                "retries": group.retries,
                "members": [index for index, each in enumerate(group_of) if each == number],
            }
            for number, group in enumerate(spec.groups)
        ],
    }


def child_row(task: TaskSpec, index: int, child: ChildSpec) -> JsonObject:
    """The DAG that a task starts."""
    return {
        "idx": index,
        "dag": child.dag,
        "params": dict(child.params),
        "given": dict(child.given) or None,
        "waits": child.waits,
        "timeout": task.timeout_seconds,
    }


_ENDS = {TimeoutAction.FAIL: "failed", TimeoutAction.SKIP: "skipped"}


def wait_row(spec: DagSpec, index: int, wait: WaitSpec) -> JsonObject:
    """The condition that a task waits for. A time of day is in the DAG's time zone."""
    is_clock = wait.kind is WaitKind.CLOCK
    return {
        "idx": index,
        "kind": wait.kind,
        "until": None if is_clock else wait.until,
        "seconds": wait.seconds,
        "at": wait.until if is_clock else None,
        "timezone": spec.timezone if is_clock else None,
        "parts": None if wait.name is None else key_parts(wait.name),
        "lookback": wait.lookback_seconds,
        "timeout": wait.timeout_seconds,
        "on_timeout": _ENDS[wait.on_timeout],
        "on_reject": _ENDS[wait.on_reject],
        "backoff": wait.backoff,
        "longest": wait.longest_seconds,
    }


def notice_rows(spec: DagSpec) -> list[JsonObject]:
    """The notification rules of the run as a whole (-1) and of its tasks."""
    told = [(-1, notice) for notice in spec.notices]
    told += [(index, notice) for index, task in enumerate(spec.tasks) for notice in task.notices]
    rows: list[JsonObject] = []
    for index, notice in told:
        sink = read_destination(notice.sink)
        if sink.kind is DestinationKind.CALL:
            sink = replace(sink, target=callback_dag(spec.name, sink.target))
        rows.append({"idx": index, "event": notice.event, "sink": sink.text, "every_time": notice.every_time})
    return rows


def deadline_rows(spec: DagSpec) -> list[JsonObject]:
    """The deadlines of tasks."""
    given = [(index, task.finish_within_seconds) for index, task in enumerate(spec.tasks)]
    return [{"idx": index, "seconds": seconds} for index, seconds in given if seconds is not None]


def gate_rows(spec: DagSpec, index: int) -> list[JsonObject]:
    """The gates that one task must pass. A limit of the whole DAG is a gate of each of its tasks."""
    task, needed = spec.tasks[index], list(spec.tasks[index].gates)
    if spec.max_active_tasks is not None and not task.runs_nowhere:
        needed.append(GateSpec(kind=GateKind.DAG, name="", capacity=spec.max_active_tasks))
    rows: list[JsonObject] = []
    for place, gate in enumerate(needed):
        parts = key_parts(gate.name) if gate.kind in KEYED else []
        is_made = any(isinstance(part, list) for part in parts)
        names = {GateKind.DAG: spec.name, GateKind.TASK: f"{spec.name}::{task.name}"}
        fixed = "".join(map(str, parts)) or names.get(gate.kind, gate.name)
        version = version_path(gate.version) if isinstance(gate.version, str) else gate.version
        row: JsonObject = {
            "idx": index,
            "place": place,
            "kind": gate.kind,
            "weight": gate.weight,
            "capacity": gate.capacity,
            "version": version,
            "period": gate.period_seconds,
        }
        rows.append({**row, "parts": parts} if is_made else {**row, "name": fixed})
    return rows


async def check_pools(conn: AsyncConnection, spec: DagSpec) -> None:
    """Refuse a DAG whose tasks need a missing pool, or more slots than a pool has."""
    needed = [(task.name, gate) for task in spec.tasks for gate in task.gates if gate.kind is GateKind.POOL]
    if not needed:
        return
    slots = {pool.name: pool.slots for pool in await gates.list_gates(conn, kinds=["pool"])}
    for task, gate in needed:
        if gate.name not in slots:
            near = difflib.get_close_matches(gate.name, slots, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "no pool has that name."
            raise MissingPool(
                f"DAG {spec.name!r}: task {task!r} needs pool {gate.name!r}; {hint}"
                f" Create it with `evertick pools set {gate.name} SLOTS`."
            )
        if gate.weight > slots[gate.name]:
            raise MissingPool(
                f"DAG {spec.name!r}: task {task!r} needs {gate.weight} slots of pool {gate.name!r}, which has"
                f" {slots[gate.name]}; it could never start. Raise it with `evertick pools set {gate.name} {gate.weight}`."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackResult:
    before: int
    now: int
    file: str
    deployment: str


async def find_version(conn: AsyncConnection, dag: str, number: int | None) -> ListedVersion:
    """A version by its number; without one, the version before the current."""
    row = await find_dag_row(conn, dag)
    listed = await dags.versions(conn, dag_id=row.dag_id)
    if number is None:
        earlier = [each for each in listed if each.number < (row.number or 0)]
        if not earlier:
            raise NotFound(f"DAG {dag!r} has no version before {row.number}.")
        return earlier[0]
    for each in listed:
        if each.number == number:
            return each
    known = ", ".join(str(each.number) for each in listed[:10])
    raise NotFound(f"DAG {dag!r} has no version {number}; it has: {known}. Old versions are pruned.")


async def roll_back(
    conn: AsyncConnection, *, dag: str, number: int | None, actor: Actor, routing: Routing
) -> RollbackResult:
    row = await find_dag_row(conn, dag)
    wanted = await find_version(conn, dag, number)
    if wanted.is_current:
        raise Conflict(f"DAG {dag!r} is already at version {wanted.number}.")
    found = await dags.version(conn, wanted.version_id)
    if found is None:
        raise NotFound(f"Version {wanted.number} of DAG {dag!r} was pruned just now.")
    spec = from_json(json.dumps(found.spec))
    await publish(
        conn,
        spec=spec,
        file=row.file,
        bundle_hash=found.bundle_hash,
        actor=actor,
        routing=routing,
        deployment=row.deployment,
    )
    return RollbackResult(before=row.number or 0, now=wanted.number, file=row.file, deployment=row.deployment)


async def not_stored(conn: AsyncConnection, spec: DagSpec) -> list[str]:
    """Each missing value once, with the object that names it and the command that sets it."""
    named: dict[tuple[str, str], str] = {}
    for notice in [*spec.notices, *(notice for task in spec.tasks for notice in task.notices)]:
        sink = read_destination(notice.sink)
        named |= {(ValueKind.SECRET, name): f"sink {sink.text}" for name in (sink.secret, sink.sign_with) if name}
    for task in spec.tasks:
        kinds = {
            ValueKind.SECRET: task.secrets,
            ValueKind.CONNECTION: task.connections,
            ValueKind.VARIABLE: task.variables,
        }
        named |= {(kind, name): f"task {task.name}" for kind, names in kinds.items() for name in names}
    if not named:
        return []
    stored = {
        (row.kind, row.name)
        for row in await secrets.find(conn, kinds=[kind for kind, _ in named], names=[name for _, name in named])
    }
    return [
        f"{who} of {spec.name} needs {kind} {name!r}, which is not set: evertick {kind}s set {name}"
        for (kind, name), who in named.items()
        if (kind, name) not in stored
    ]
