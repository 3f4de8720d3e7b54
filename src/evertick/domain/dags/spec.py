"""A DAG as it is published: plain, immutable, canonical. It contains no code, no external defaults and no accidental order.

Two loads of the same source give the same `structural_hash`, whatever the iteration order of sets and dicts was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from typing import TypeVar

from evertick.domain.access import Role
from evertick.domain.attempt import Isolation
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.mapping import MappedList
from evertick.domain.dags.mapping import Mapping as TaskMapping
from evertick.domain.dags.params import JsonValue, ParamSpec
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.domain.errors import InvalidDag, InvalidSchedule
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.computed import without_instants
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.spec import ScheduleSpec
from evertick.domain.states import TriggerRule


class TaskKind(StrEnum):
    PYTHON = "python"
    SHELL = "shell"
    HTTP = "http"
    PROGRAM = "program"
    TRIGGER = "trigger"
    WAIT = "wait"


class DatabaseOutagePolicy(StrEnum):
    """What a runner does with an attempt while it cannot reach the database."""

    CONTINUE = "continue"
    STOP = "stop"


class BranchChoice(StrEnum):
    """A task whose result decides which downstream tasks are skipped: all but those it names, or all if it is false."""

    BRANCH = "branch"
    SHORT_CIRCUIT = "short_circuit"
    SHORT_CIRCUIT_DIRECT = "short_circuit_direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The DAG that a task starts, and whether it waits for that run to end. `given` are params known only at that time:
    `{"task": "count", "path": ["rows"]}` for a result or a part of it, `{"param": "day"}` for a parameter of its own run."""

    dag: str
    params: Mapping[str, JsonValue] = field(default_factory=dict)
    given: Mapping[str, JsonValue] = field(default_factory=dict)
    waits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task of the plan. `name` is the full id, with its groups: `extract.orders`. `inputs` are upstream names.

    `queue` is what the author declared; None leaves it to the routing rules. `wait` is what it waits for without a slot.
    `executor_options` take precedence over the DAG's: `domain/executor_options.py` merges them. `asks`: while it runs, it may
    ask for variables and connections that it does not declare, and about other runs. `knows_run`: each attempt is given the
    facts about its run, under the task's own name among its inputs.
    `aliases`: asset aliases through which it may update assets that only the running task knows.
    """

    name: str
    kind: TaskKind = TaskKind.PYTHON
    group: str | None = None
    queue: str | None = None
    priority: int = 5
    trigger_rule: TriggerRule = TriggerRule.ALL_SUCCESS
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: float | None = None
    queue_timeout_seconds: float | None = None
    finish_within_seconds: float | None = None
    stop_grace_seconds: float | None = None
    isolation: Isolation = Isolation.PROCESS
    rerun_on_loss: bool = True
    on_lost_contact: DatabaseOutagePolicy = DatabaseOutagePolicy.CONTINUE
    is_async: bool = False
    is_setup: bool = False
    is_teardown: bool = False
    fails_run: bool = False
    choice: BranchChoice | None = None
    command: str | None = None
    unsafe_template: bool = False
    summary: str | None = None
    inputs: tuple[str, ...] = ()
    outlets: tuple[str, ...] = ()
    inlets: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    connections: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    asks: bool = False
    knows_run: bool = False
    gates: tuple[GateSpec, ...] = ()
    mapping: TaskMapping | None = None
    child: ChildSpec | None = None
    notices: tuple[NotificationRuleSpec, ...] = ()
    wait: WaitSpec | None = None
    executor_options: Mapping[str, JsonValue] = field(default_factory=dict)
    doc: str | None = None

    @property
    def runs_nowhere(self) -> bool:
        """Whether the task never runs on a runner."""
        return self.kind in (TaskKind.TRIGGER, TaskKind.WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group of tasks that runs again as a whole when it fails, up to `retries` times. Other groups are only names."""

    name: str
    retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedGroup:
    """A group of tasks that expands as a whole: each of its tasks has an instance per element, which follows only the
    instances with its own index."""

    name: str
    mapping: TaskMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetSpec:
    """What a DAG file says about an asset besides its name. Without a `uri`, it is the name. `partitions`: which it has, see
    partition_keys.py."""

    name: str
    uri: str = ""
    group: str = "asset"
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    partitions: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """One of a DAG's schedules, with the parameters of its runs. A field that is None takes the DAG's value."""

    name: str
    spec: ScheduleSpec
    params: Mapping[str, JsonValue] = field(default_factory=dict)
    misfire: MisfirePolicy | None = None
    catchup_window_seconds: float | None = None
    catchup_limit: int | None = None
    overlap: OverlapPolicy | None = None
    start_within_seconds: float | None = None
    finish_within_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DagSpec:
    """The whole plan. Tasks are in topological order, and edges are sorted (upstream, downstream) positions in that order."""

    name: str
    tasks: tuple[TaskSpec, ...]
    edges: tuple[tuple[int, int], ...] = ()
    description: str | None = None
    owner: str | None = None
    tags: tuple[str, ...] = ()
    params: tuple[ParamSpec, ...] = ()
    accepts_unknown_params: bool = False
    schedules: tuple[NamedSchedule, ...] = ()
    timezone: str = "UTC"
    max_active_runs: int | None = None
    max_active_tasks: int | None = None
    run_timeout_seconds: float | None = None
    retries: int = 0
    misfire: MisfirePolicy = MisfirePolicy.LATEST
    catchup_window_seconds: float | None = None
    catchup_limit: int | None = None
    overlap: OverlapPolicy = OverlapPolicy.ALLOW
    start_within_seconds: float | None = None
    finish_within_seconds: float | None = None
    starts_paused: bool = False
    executor_options: Mapping[str, JsonValue] = field(default_factory=dict)
    notices: tuple[NotificationRuleSpec, ...] = ()
    groups: tuple[GroupSpec, ...] = ()
    mapped_groups: tuple[MappedGroup, ...] = ()
    assets: tuple[AssetSpec, ...] = ()
    run_types: tuple[str, ...] = ()


def to_json(spec: DagSpec) -> str:
    """The canonical text: sorted keys, no spaces, and only values that differ from the default, so that a later release
    that adds a field creates no new version of old DAGs."""
    return json.dumps(spec, default=_given, sort_keys=True, separators=(",", ":"), allow_nan=False)


def structural_hash(spec: DagSpec) -> str:
    """The same for every DAG with the same meaning: the order of declaration does not count."""
    order = sorted(range(len(spec.tasks)), key=lambda position: spec.tasks[position].name)
    rank = {position: place for place, position in enumerate(order)}
    canonical = replace(
        spec,
        tasks=tuple(replace(spec.tasks[i], inputs=tuple(sorted(spec.tasks[i].inputs))) for i in order),
        edges=tuple(sorted((rank[up], rank[down]) for up, down in spec.edges)),
        tags=tuple(sorted(spec.tags)),
        params=tuple(sorted(spec.params, key=lambda param: param.name)),
        schedules=tuple(sorted(spec.schedules, key=lambda schedule: schedule.name)),
        groups=tuple(sorted(spec.groups, key=lambda group: group.name)),
        mapped_groups=tuple(sorted(spec.mapped_groups, key=lambda group: group.name)),
        assets=tuple(sorted(spec.assets, key=lambda asset: asset.name)),
    )
    return hashlib.sha256(to_json(canonical).encode()).hexdigest()


def from_json(text: str) -> DagSpec:
    """Parse the spec that `to_json` wrote."""
    try:
        return _read(DagSpec, json.loads(text), _DAG)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, InvalidSchedule) as error:
        raise InvalidDag(
            f"this release cannot read the published DAG: {error!r}. If a later release published it, upgrade Evertick here;"
            " otherwise publish the DAG file again."
        ) from None


def _given(record: object) -> object:
    """A record's fields that differ from their defaults; a schedule serializes itself, without what is computed ahead."""
    if isinstance(record, ScheduleSpec):
        return json.loads(without_instants(record).to_json())
    known = _DEFAULTS[type(record)]
    return {name: value for name, default in known if (value := getattr(record, name)) != default}


_DEFAULTS: dict[type, list[tuple[str, object]]] = {
    kind: [
        (each.name, each.default_factory() if each.default_factory is not MISSING else each.default)
        for each in fields(kind)
    ]
    for kind in (
        DagSpec,
        TaskSpec,
        NamedSchedule,
        ParamSpec,
        RetryPolicy,
        GateSpec,
        TaskMapping,
        MappedList,
        ChildSpec,
        NotificationRuleSpec,
        WaitSpec,
        GroupSpec,
        MappedGroup,
        AssetSpec,
    )
}


T = TypeVar("T")
_Readers = Mapping[str, Callable[..., object]]


def _read(make: Callable[..., T], raw: Mapping[str, object], readers: _Readers) -> T:
    return make(**{key: readers[key](value) if key in readers else value for key, value in raw.items()})


def _read_all(make: Callable[..., T], readers: _Readers) -> Callable[[list[dict[str, object]]], tuple[T, ...]]:
    return lambda rows: tuple(_read(make, row, readers) for row in rows)


def _readers(kind: type, /, **others: Callable[..., object]) -> _Readers:
    """How the fields of a record are read: those whose default is an enum or a tuple by its type."""
    by_default = {name: type(default) for name, default in _DEFAULTS[kind] if isinstance(default, StrEnum | tuple)}
    return {**by_default, **others}


_PARAM = _readers(ParamSpec, choices=tuple)
_SCHEDULE = _readers(
    NamedSchedule,
    spec=lambda raw: ScheduleSpec.from_json(json.dumps(raw)),
    misfire=MisfirePolicy,
    overlap=OverlapPolicy,
)
_NOTICE = _readers(NotificationRuleSpec, event=NotificationEvent)
_WAIT = _readers(WaitSpec, kind=WaitKind, approvers=Role, form=_read_all(ParamSpec, _PARAM))
_RETRY = _readers(RetryPolicy)
_MAPPING = _readers(TaskMapping, lists=_read_all(MappedList, {}))
_TASK = _readers(
    TaskSpec,
    retry=lambda raw: _read(RetryPolicy, raw, _RETRY),
    choice=BranchChoice,
    gates=_read_all(GateSpec, {"kind": GateKind}),
    child=lambda raw: ChildSpec(**raw),
    wait=lambda raw: _read(WaitSpec, raw, _WAIT),
    mapping=lambda raw: _read(TaskMapping, raw, _MAPPING),
    notices=_read_all(NotificationRuleSpec, _NOTICE),
)


def read_form(wait: Mapping[str, object]) -> tuple[ParamSpec, ...]:
    """The form of an approval, from its published wait, or of a question that an attempt asked."""
    form: tuple[ParamSpec, ...] = _read_all(ParamSpec, _PARAM)(wait.get("form", []))  # type: ignore[arg-type]
    return form


_DAG = _readers(
    DagSpec,
    tasks=_read_all(TaskSpec, _TASK),
    edges=lambda rows: tuple((up, down) for up, down in rows),
    params=_read_all(ParamSpec, _PARAM),
    schedules=_read_all(NamedSchedule, _SCHEDULE),
    notices=_read_all(NotificationRuleSpec, _NOTICE),
    groups=_read_all(GroupSpec, {}),
    mapped_groups=_read_all(MappedGroup, {"mapping": lambda raw: _read(TaskMapping, raw, _MAPPING)}),
    assets=_read_all(AssetSpec, {}),
)
