"""A DAG of Airflow as a DAG of Evertick, with the findings about everything that is not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from evertick.airflow.assets import asset_specs
from evertick.airflow.findings import Findings
from evertick.airflow.schedules import compile_schedules
from evertick.airflow.tasks import compile_mapping, compile_task, mapped_group_of, priorities_of, seconds
from evertick.domain.dags.params import ParamSpec, ParamType, check_params
from evertick.domain.dags.spec import DagSpec, MappedGroup, TaskSpec
from evertick.domain.dags.validation import MAX_TAG, MAX_TAGS, arrange, validate
from evertick.domain.errors import InvalidDag, UserError
from evertick.domain.notifications import DestinationKind, NotificationEvent, NotificationRuleSpec
from evertick.domain.schedules.misfire import MisfirePolicy

_MOST_LIMIT = 1_000_000
_CALLBACKS = {"on_failure_callback": NotificationEvent.FAILURE, "on_success_callback": NotificationEvent.SUCCESS}
_TYPES = {each.value: each for each in ParamType}
# What a param's schema may say without changing which values fit.
_PLAIN = frozenset(
    {"type", "title", "description", "description_md", "section", "examples", "values_display", "default"}
)


_LIMITS = {"minimum": "minimum", "maximum": "maximum", "minLength": "min_length", "maxLength": "max_length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """`spec` is None if the DAG is refused."""

    spec: DagSpec | None
    findings: Findings


def compile_dag(dag: Any, file: str, lines: dict[str, int], defaults: Mapping[str, Any]) -> Compiled:
    """`defaults` are Airflow's settings for DAGs that name none."""
    findings = Findings(file=file, dag=dag.dag_id, lines=lines)
    _find_ignored(dag, findings)
    if not dag.task_dict:
        findings.add("AF509")
    priorities = priorities_of(dag, findings)
    limit = _max_active_tasks(dag, defaults)
    tasks = [
        _noticed(compile_task(task, priorities, findings, max_active_tasks=limit), dag)
        for task in dag.task_dict.values()
    ]
    at = {task.name: position for position, task in enumerate(tasks)}
    edges = [(at[up], at[down]) for up, task in dag.task_dict.items() for down in sorted(task.downstream_task_ids)]
    paused = dag.is_paused_upon_creation
    made = DagSpec(
        name=dag.dag_id,
        tasks=tuple(tasks),
        edges=tuple(edges),
        description=dag.description or _first_line(dag.doc_md),
        tags=tuple(sorted(str(tag)[:MAX_TAG] for tag in dag.tags))[:MAX_TAGS],
        params=tuple(_param(name, dag.params.get_param(name), findings) for name in sorted(dag.params)),
        accepts_unknown_params=True,
        schedules=compile_schedules(dag, findings),
        max_active_runs=min(dag.max_active_runs, _MOST_LIMIT) if dag.max_active_runs > 0 else None,
        run_timeout_seconds=None if dag.dagrun_timeout is None else seconds(dag.dagrun_timeout),
        misfire=MisfirePolicy.ALL if dag.catchup else MisfirePolicy.LATEST,
        notices=tuple(_notices(dag)),
        assets=asset_specs(dag),
        starts_paused=bool(defaults["is_paused"] if paused is None else paused),
        mapped_groups=_mapped_groups(dag),
        run_types=tuple(
            sorted(str(getattr(each, "value", each)) for each in getattr(dag, "allowed_run_types", None) or ())
        ),
    )
    if findings.is_refused:
        return Compiled(spec=None, findings=findings)
    try:
        validate(made)
    except InvalidDag as error:
        raise InvalidDag(error.message, file=dag.fileloc, line=lines.get(dag.dag_id)) from None
    return Compiled(spec=arrange(made), findings=findings)


def called_events(dag: Any) -> dict[str, NotificationEvent]:
    """The callbacks that the DAG has, and what they are called for."""
    return {name: event for name, event in _CALLBACKS.items() if getattr(dag, name)}


def _noticed(task: TaskSpec, dag: Any) -> TaskSpec:
    if not dag.fail_fast or task.is_teardown:
        return task
    rule = NotificationRuleSpec(event=NotificationEvent.FAILURE, sink=f"{DestinationKind.FAIL_FAST}:", every_time=True)
    return replace(task, notices=(rule,))


def _notices(dag: Any) -> Iterator[NotificationRuleSpec]:
    for name, event in called_events(dag).items():
        yield NotificationRuleSpec(event=event, sink=f"{DestinationKind.CALL}:{name}", every_time=True)
    if (most := getattr(dag, "max_consecutive_failed_dag_runs", 0)) > 0:
        sink = f"{DestinationKind.PAUSE}:{most}"
        yield NotificationRuleSpec(event=NotificationEvent.FAILURE, sink=sink, every_time=True)


def _mapped_groups(dag: Any) -> tuple[MappedGroup, ...]:
    found = {group.group_id: group for task in dag.task_dict.values() if (group := mapped_group_of(task)) is not None}
    return tuple(
        MappedGroup(name=name, mapping=compile_mapping(group._expand_input)) for name, group in sorted(found.items())
    )


def _find_ignored(dag: Any, findings: Findings) -> None:
    options = (("AF502", "fail_fast"), ("AF503", "deadline"), ("AF505", "access_control"))
    for code, name in options:
        if value := getattr(dag, name, None):
            findings.add(code, value)


def _max_active_tasks(dag: Any, defaults: Mapping[str, Any]) -> int | None:
    """The limit of each run. Airflow has one by default; here there is none unless the DAG names another."""
    limit: int = dag.max_active_tasks
    if limit == defaults["max_active_tasks"] or not 1 <= limit <= _MOST_LIMIT:
        return None
    return limit


def _first_line(text: str | None) -> str | None:
    return next((line.strip("# ") for line in (text or "").strip().splitlines()), None)


def _param(name: str, param: Any, findings: Findings) -> ParamSpec:
    """Its type and default; the SDK checks the rest of the schema when a task starts."""
    schema = dict(param.schema)
    declared = schema.get("type")
    kinds = [declared] if isinstance(declared, str) else list(declared or ())
    plain = [kind for kind in kinds if kind != "null"]
    kind = _TYPES.get(plain[0], ParamType.ANY) if len(plain) == 1 else ParamType.ANY
    is_required = not hasattr(param, "has_value") or type(param.value).__name__ == "ArgNotSet"
    made = ParamSpec(
        name=name,
        type=kind,
        default=None if is_required else param.value,
        required=is_required,
        nullable="null" in kinds,
        description=param.description or schema.get("title"),
    )
    known = {field: schema[key] for key, field in _LIMITS.items() if key in schema}
    if isinstance(values := schema.get("enum"), list):
        known["choices"] = tuple(values)
    limited = replace(made, **known)
    if set(schema) - _PLAIN - {"enum", *_LIMITS} or len(plain) > 1 or not _fits(limited):
        findings.add("AF508", name)
        return made
    return limited


def _fits(spec: ParamSpec) -> bool:
    """Whether its default, which Airflow does not check, is a value that runs may have."""
    try:
        check_params((replace(spec, required=False),), {})
    except UserError:
        return False
    return True
