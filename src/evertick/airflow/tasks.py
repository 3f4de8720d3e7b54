"""One operator of Airflow as a task of Evertick. The operator itself runs through Airflow's SDK; see `attempt.py`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from evertick.airflow.assets import asset_name, is_alias
from evertick.airflow.findings import Findings
from evertick.domain.attempt import Isolation
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.mapping import MapHow, MappedList
from evertick.domain.dags.mapping import Mapping as TaskMapping
from evertick.domain.dags.params import JsonValue
from evertick.domain.dags.spec import TaskSpec
from evertick.domain.dags.waits import LONGEST_INTERVAL_SECONDS, SHORTEST_INTERVAL_SECONDS, WaitKind, WaitSpec
from evertick.domain.retry import Backoff, RetryPolicy
from evertick.domain.states import TriggerRule

# Airflow's own limit of an execution acts first, with `on_kill`; this margin later the process is killed.
TIMEOUT_MARGIN_SECONDS = 15.0
# An operator that ends a remote job in `on_kill` needs this long.
_STOP_GRACE_SECONDS = 60.0
_LONGEST_RETRY_DELAY_SECONDS = 86_400.0
_DEFAULT_PRIORITY, _MOST_PRIORITY = 5, 9
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
OWN_OPTIONS = "evertick"
_ALL_TASKS = "max_active_tasks"  # the gate's name: the tasks of one run


def compile_task(
    task: Any, priorities: Mapping[str, int], findings: Findings, *, max_active_tasks: int | None = None
) -> TaskSpec:
    """`max_active_tasks` limits the tasks of each run."""
    name = task.task_id
    if not _NAME.fullmatch(name):
        findings.add("AF100", name, task=name)
    _find_ignored(task, findings)
    _find_operators(task, findings)
    return TaskSpec(
        name=name,
        group=_group(task, findings),
        queue=_queue(task, findings),
        priority=priorities.get(name, _DEFAULT_PRIORITY),
        trigger_rule=TriggerRule(str(getattr(task.trigger_rule, "value", task.trigger_rule))),
        retry=_retry(task),
        timeout_seconds=_timeout(task),
        isolation=_isolation(task, findings),
        stop_grace_seconds=_STOP_GRACE_SECONDS if has_on_kill(task) else None,
        is_setup=task.is_setup,
        is_teardown=task.is_teardown,
        fails_run=task.is_teardown and task.on_failure_fail_dagrun,
        summary=task.task_type,
        outlets=_outlets(task, findings),
        aliases=tuple(sorted({str(each.name) for each in task.outlets or () if is_alias(each)})),
        asks=True,
        knows_run=True,
        gates=tuple(_gates(task, max_active_tasks)),
        mapping=compile_mapping(task._get_specified_expand_input()) if task.is_mapped else None,
        wait=_wait(task),
        doc=task.doc_md or task.doc or None,
    )


def priorities_of(dag: Any, findings: Findings) -> dict[str, int]:
    """Airflow's weights in order, spread over 0 to 9. Tasks of a DAG without weights all have the default priority."""
    weights: dict[str, int] = {}
    has_own_rule = False
    for name, task in dag.task_dict.items():
        rule = str(getattr(task.weight_rule, "value", task.weight_rule))
        if rule not in ("downstream", "upstream", "absolute"):
            if type(task.weight_rule).__module__.startswith("airflow."):
                rule = type(task.weight_rule).__name__.strip("_").partition("Priority")[0].lower()
            else:
                weights[name], has_own_rule = _custom_weight(task, findings), True
                continue
        relatives = () if rule == "absolute" else task.get_flat_relative_ids(upstream=rule == "upstream")
        weights[name] = task.priority_weight + sum(dag.task_dict[each].priority_weight for each in relatives)
    is_plain = all(task.priority_weight == 1 for task in dag.task_dict.values()) and not has_own_rule
    if is_plain or len(set(weights.values())) < 2:
        return {}
    ranks = {weight: rank for rank, weight in enumerate(sorted(set(weights.values())))}
    most = max(ranks.values())
    return {name: round(ranks[weight] * _MOST_PRIORITY / most) for name, weight in weights.items()}


def _custom_weight(task: Any, findings: Findings) -> int:
    """What a strategy says about the first tries of the task, without a run."""
    found: list[int] = []
    try:
        for attempt in (1, 2, 3):
            instance = SimpleNamespace(task=task, task_id=task.task_id, try_number=attempt, map_index=-1)
            found.append(int(task.weight_rule.get_weight(instance)))
    except Exception:  # user code that asks for more
        found = found or [1]
    if len(found) < 3 or len(set(found)) > 1:
        findings.add("AF110", type(task.weight_rule).__name__, task=task.task_id)
    return found[0]


def _find_ignored(task: Any, findings: Findings) -> None:
    name = task.task_id
    settings: list[tuple[str, object]] = [
        ("AF101", task.run_as_user),
        ("AF102", task.executor),
        ("AF103", {key: value for key, value in (task.executor_config or {}).items() if key != OWN_OPTIONS} or None),
        ("AF104", task.resources),
        ("AF117", task.wait_for_past_depends_before_skipping or None),
    ]
    for code, value in settings:
        if value is not None:
            findings.add(code, value, task=name)
    if task.end_date is not None and task.end_date != task.get_dag().end_date:
        findings.add("AF115", task.end_date, task=name)


def _find_operators(task: Any, findings: Findings) -> None:
    name, kind = task.task_id, task.operator_class if task.is_mapped else type(task)
    if task.is_mapped and option(task, "start_from_trigger"):
        findings.add("AF409", task=name)
    if any(base.__name__ == "ExternalTaskMarker" for base in kind.__mro__):
        findings.add("AF403", kind.__name__, task=name)
    if option(task, "reset_dag_run"):
        findings.add("AF408", task=name)
    if mapped_group_of(task) is not None and any(base.__name__ == "SkipMixin" for base in kind.__mro__):
        findings.add("AF305", task=name)
    if has_instances(task):
        for is_one, what in ((task.is_setup, "setup"), (task.is_teardown, "teardown")):
            if is_one:
                findings.add("AF303", what, task=name)


def has_on_kill(task: Any) -> bool:
    """Whether its operator does something when it is stopped."""
    kind = task.operator_class if task.is_mapped else type(task)
    return not kind.on_kill.__qualname__.startswith(("BaseOperator.", "AbstractOperator."))


def option(task: Any, name: str) -> Any:
    """An option of an operator, or of the operator that is mapped."""
    if task.is_mapped:
        return task.partial_kwargs.get(name, getattr(task.operator_class, name, None))
    return getattr(task, name, None)


def mapped_group_of(task: Any) -> Any:
    """The mapped task group that the task is in, or None."""
    around = task.task_group
    while around is not None and type(around).__name__ != "MappedTaskGroup":
        around = getattr(around, "parent_group", None)
    return around


def has_instances(task: Any) -> bool:
    """Whether the task is mapped, by itself or with its group."""
    return bool(task.is_mapped) or mapped_group_of(task) is not None


def _group(task: Any, findings: Findings) -> str | None:
    group, mapped = getattr(task.task_group, "group_id", None), mapped_group_of(task)
    if group is None:
        return None
    if not task.task_id.startswith(f"{group}."):
        findings.add("AF301" if mapped is not None else "AF111", group, task=task.task_id)
        return None
    return str(group)


def _queue(task: Any, findings: Findings) -> str | None:
    if task.queue in (None, "default"):
        return None
    findings.add("AF120", task.queue, task=task.task_id)
    return str(task.queue)


def _retry(task: Any) -> RetryPolicy:
    """A factor other than 2 is applied by the attempt, which knows the task."""
    growth, most = task.retry_exponential_backoff, task.max_retry_delay
    delay = min(seconds(task.retry_delay), _LONGEST_RETRY_DELAY_SECONDS)
    longest = min(_LONGEST_RETRY_DELAY_SECONDS if most is None else seconds(most), _LONGEST_RETRY_DELAY_SECONDS)
    return RetryPolicy(
        retries=task.retries or 0,
        delay_seconds=min(delay, longest),
        backoff=Backoff.EXPONENTIAL if growth else Backoff.FIXED,
        max_delay_seconds=longest,
    )


def _isolation(task: Any, findings: Findings) -> Isolation:
    """`executor_config={"evertick": {"isolation": "warm"}}`: Airflow's own place for the options of an executor."""
    options = (task.executor_config or {}).get(OWN_OPTIONS, {})
    chosen = options.get("isolation", "process") if isinstance(options, Mapping) and len(options) < 2 else options
    if chosen not in list(Isolation):
        findings.add("AF105", options, task=task.task_id)
        return Isolation.PROCESS
    return Isolation(chosen)


def seconds(length: Any) -> float:
    return float(length.total_seconds() if hasattr(length, "total_seconds") else length)


def _timeout(task: Any) -> float | None:
    limit = task.execution_timeout
    return None if limit is None else seconds(limit) + TIMEOUT_MARGIN_SECONDS


def _outlets(task: Any, findings: Findings) -> tuple[str, ...]:
    names = []
    for outlet in task.outlets or ():
        if (name := asset_name(outlet)) is not None:
            names.append(name)
        elif not is_alias(outlet):
            findings.add("AF404", type(outlet).__name__, task=task.task_id)
    return tuple(names)


def growing_delay(task: Any, attempt: int) -> float | None:
    """The seconds before the next attempt of a task with a growth factor of its own."""
    growth, most = task.retry_exponential_backoff, task.max_retry_delay
    if growth in (False, None, 0, 1, True, 2):
        return None
    longest = _LONGEST_RETRY_DELAY_SECONDS if most is None else seconds(most)
    try:
        return float(min(seconds(task.retry_delay) * growth ** (attempt - 1), longest))
    except OverflowError:
        return longest


def _gates(task: Any, max_active_tasks: int | None) -> list[GateSpec]:
    gates = []
    if task.pool and task.pool != "default_pool":
        gates.append(GateSpec(kind=GateKind.POOL, name=task.pool, weight=task.pool_slots))
    if (limit := task.max_active_tis_per_dag) is not None:
        gates.append(GateSpec(kind=GateKind.TASK, name="", capacity=limit))
    # A group's gate counts within one run.
    if (limit := task.max_active_tis_per_dagrun) is not None:
        gates.append(GateSpec(kind=GateKind.GROUP, name=task.task_id, capacity=limit))
    if max_active_tasks is not None:
        gates.append(GateSpec(kind=GateKind.GROUP, name=_ALL_TASKS, capacity=max_active_tasks))
    if task.depends_on_past or task.wait_for_downstream:
        gates.append(GateSpec(kind=GateKind.PAST, name=""))
    if task.wait_for_downstream:
        gates += [GateSpec(kind=GateKind.PAST, name=each) for each in sorted(task.downstream_task_ids)]
    return gates


def _wait(task: Any) -> WaitSpec | None:
    """A sensor in mode `reschedule` names the next time itself; `seconds` only has to be valid."""
    if option(task, "mode") != "reschedule" or has_instances(task):
        return None
    interval = seconds(option(task, "poke_interval") or 60.0)
    return WaitSpec(kind=WaitKind.POLL, seconds=min(max(interval, SHORTEST_INTERVAL_SECONDS), LONGEST_INTERVAL_SECONDS))


def compile_mapping(expanded: Any) -> TaskMapping:
    """Of a task or a group. The SDK picks the element of each instance; Evertick needs to know only how many there are."""
    given = expanded.value
    is_kwargs = not isinstance(given, Mapping)
    lists = [_mapped_list(name, value) for name, value in ({None: given} if is_kwargs else given).items()]
    return TaskMapping(how=MapHow.KWARGS if is_kwargs else MapHow.PRODUCT, lists=tuple(lists))


def _mapped_list(argument: str | None, value: Any) -> MappedList:
    if isinstance(value, Collection):
        return MappedList(argument=argument, length=len(value))
    return MappedList(argument=argument, size=_size(value))


def _size(value: Any) -> dict[str, JsonValue]:
    """How the length of an expression follows from the XComs that it is made of; a function of `.map` changes no length."""
    kind = type(value).__name__
    if kind == "PlainXComArg":
        return {"task": value.operator.task_id}
    if kind == "MapXComArg":
        return _size(value.arg)
    parts: list[JsonValue] = [_size(each) for each in value.args]
    if kind == "ConcatXComArg":
        return {"sum": parts}
    is_filled = type(value.fillvalue).__name__ != "ArgNotSet"
    return {"max" if is_filled else "min": parts}
