"""Validates a DAG before it is published, and orders its tasks. Linear in tasks and edges, never recursive.

Each error names everything that is involved, so that the message alone is enough to repair the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import NoneType

from evertick.domain.attempt import storable_text
from evertick.domain.dags.gates import GateKind, check_gates, check_versions
from evertick.domain.dags.graph import check_groups, check_mapped_groups
from evertick.domain.dags.mapping import check_mapping
from evertick.domain.dags.params import JsonValue, check_params, shown
from evertick.domain.dags.spec import BranchChoice, DagSpec, NamedSchedule, TaskKind, TaskSpec
from evertick.domain.dags.waits import WaitKind, check_wait
from evertick.domain.errors import InvalidDag, InvalidParams, UserError
from evertick.domain.notifications import NotificationEvent
from evertick.domain.schedules import events
from evertick.domain.schedules.dependencies import read_text, sources_of
from evertick.domain.schedules.misfire import MisfirePolicy

MAX_NAME = 200
MAX_TASKS = 100_000
MAX_EDGES = 1_000_000
MAX_TAGS = 50
MAX_RUN_RETRIES = 100
MAX_TAG = 100
MAX_TEXT = 100_000
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_NAME_RULE = f"use ASCII letters, digits, '_', '-', '.' and at most {MAX_NAME} characters"
_TEXT_RULE = f"valid text without NUL, of at most {MAX_TEXT:,} characters"
_FIELD_TYPES: tuple[tuple[tuple[type, ...], tuple[str, ...]], ...] = (
    ((str,), ("name",)),
    ((int,), ("priority",)),
    ((bool,), ("rerun_on_loss", "is_async", "is_setup", "unsafe_template")),
    (
        (int, float, NoneType),
        ("timeout_seconds", "queue_timeout_seconds", "finish_within_seconds", "stop_grace_seconds"),
    ),
    ((str, NoneType), ("queue", "group", "command", "summary", "doc")),
)
_SHOWN = 10
_LONGEST_LIMIT_SECONDS = 10 * 365 * 86_400.0
_LIMIT_RULE = "it must be more than 0 and at most ten years, or omitted"


def validate(spec: DagSpec) -> None:
    """Raise InvalidDag with every problem found."""
    problems = [*_check_dag(spec), *_check_size(spec), *_check_tasks(spec)]
    if not problems:
        problems = [*_check_edges(spec), *_check_schedules(spec)]
    if not problems:
        problems = [*check_groups(spec), *check_mapped_groups(spec)]
    if problems:
        raise InvalidDag(f"DAG {shown(spec.name)}: {' '.join(problems)}")


def arrange(spec: DagSpec) -> DagSpec:
    """The valid spec with its tasks by topological level, then by declaration, and its edges sorted and unique."""
    level = _levels(len(spec.tasks), spec.edges)
    order = sorted(range(len(spec.tasks)), key=lambda position: level[position])
    place = {position: new for new, position in enumerate(order)}
    edges = sorted({(place[up], place[down]) for up, down in spec.edges})
    return replace(spec, tasks=tuple(spec.tasks[position] for position in order), edges=tuple(edges))


def _check_dag(spec: DagSpec) -> Iterator[str]:
    if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name):
        yield f"the DAG's name is not allowed: {_NAME_RULE}."
    if len(spec.tags) > MAX_TAGS:
        yield f"it has {len(spec.tags)} tags; at most {MAX_TAGS} are allowed."
    named = [("tag", tag) for tag in spec.tags] + ([] if spec.owner is None else [("owner", spec.owner)])
    for what, text in named:
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_TAG or not text.isprintable():
            yield f"{what} {shown(text)} must be 1 to {MAX_TAG} printable characters."
    for name, limit in (("max_active_runs", spec.max_active_runs), ("max_active_tasks", spec.max_active_tasks)):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1_000_000):
            yield f"{name} is {limit!r}; it must be from 1 to 1,000,000, or omitted."
    if isinstance(spec.retries, bool) or not isinstance(spec.retries, int) or not 0 <= spec.retries <= MAX_RUN_RETRIES:
        yield f"retries is {spec.retries!r}; a run can be retried 0 to {MAX_RUN_RETRIES} times."
    if not _is_limit(spec.run_timeout_seconds):
        yield f"run_timeout is {spec.run_timeout_seconds!r} s; {_LIMIT_RULE}."
    if not _is_storable(spec.description):
        yield f"the description must be {_TEXT_RULE}."
    if bad := [param.name for param in spec.params if not _is_storable(param.description)]:
        yield f"the descriptions of params must be {_TEXT_RULE}: {_listed(bad)}."


def _is_limit(seconds: object) -> bool:
    """Whether a time limit is valid: None, or finite and positive."""
    return seconds is None or (
        isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= _LONGEST_LIMIT_SECONDS
    )


def _check_size(spec: DagSpec) -> Iterator[str]:
    if not spec.tasks:
        yield "it has no tasks; call at least one task in its function."
    if len(spec.tasks) > MAX_TASKS:
        yield f"it has {len(spec.tasks):,} tasks; at most {MAX_TASKS:,} are allowed."
    if len(spec.edges) > MAX_EDGES:
        yield f"it has {len(spec.edges):,} dependencies; at most {MAX_EDGES:,} are allowed: put a joining task between groups."


def _check_tasks(spec: DagSpec) -> Iterator[str]:
    wrong_type = [
        f"{shown(task.name)}.{name}"
        for task in spec.tasks
        for kind, names in _FIELD_TYPES
        for name in names
        if not isinstance(getattr(task, name), kind)
    ]
    if wrong_type:
        yield f"wrong types: {_listed(wrong_type)}."
        return
    yield from _check_names(spec.tasks)
    params = {param.name for param in spec.params}
    for task in spec.tasks:
        yield from _check_task(task)
        yield from (f"task {task.name!r}: {problem}" for problem in check_gates(task.gates, params))
        if task.wait is not None:
            yield from (f"task {task.name!r}: {problem}" for problem in check_wait(task.wait, params))


def _check_names(tasks: Sequence[TaskSpec]) -> Iterator[str]:
    if bad := [shown(task.name) for task in tasks if not _NAME.fullmatch(task.name)]:
        yield f"task names are not allowed: {_listed(bad)}; {_NAME_RULE}."
    if twice := [name for name, times in Counter(task.name for task in tasks).items() if times > 1]:
        yield f"task names are used twice: {_listed(twice)}; give each task a unique name."
    if both := sorted({task.name for task in tasks} & _groups(tasks)):
        yield f"names are used for both a task and a group: {_listed(both)}; rename one of the two."
    if misnamed := [task.name for task in tasks if task.group and not task.name.startswith(task.group + ".")]:
        yield f"task names do not start with the name of their group: {_listed(misnamed)}."


def _groups(tasks: Sequence[TaskSpec]) -> set[str]:
    """Every group and every group around it."""
    found: set[str] = set()
    for group in {task.group for task in tasks if task.group}:
        parts = group.split(".")
        found.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return found


def _check_task(task: TaskSpec) -> Iterator[str]:
    if isinstance(task.priority, bool) or not 0 <= task.priority <= 9:
        yield f"task {task.name!r}: priority is {task.priority!r}; it must be from 0 to 9 (9 is the most urgent)."
    for name in ("timeout", "queue_timeout", "finish_within", "stop_grace"):
        if not _is_limit(limit := getattr(task, f"{name}_seconds")):
            yield f"task {task.name!r}: {name} is {limit!r} s; {_LIMIT_RULE}."
    if task.finish_within_seconds is None and NotificationEvent.DEADLINE in {each.event for each in task.notices}:
        yield f"task {task.name!r}: on_deadline needs a deadline; add one, as in finish_within='30m'."
    if task.queue is not None and not _NAME.fullmatch(task.queue):
        yield f"task {task.name!r}: queue {shown(task.queue)} is not allowed; {_NAME_RULE}."
    if (task.kind is TaskKind.SHELL) != bool(task.command):
        yield f"task {task.name!r}: a shell task needs a command, and only a shell task has one."
    if (task.kind is TaskKind.TRIGGER) != (task.child is not None):
        yield f"task {task.name!r}: a task that starts a DAG must name that DAG, and only such a task does."
    has_runner = task.gates or task.retry.retries or task.mapping or task.choice or task.is_setup
    if task.child is not None and has_runner:
        yield (
            f"task {task.name!r} starts a DAG and does not run on a runner: set retries, pools, keys, limits and mapping on the"
            f" tasks of {task.child.dag!r}."
        )
    expected = {TaskKind.PYTHON} if task.wait and task.wait.kind is WaitKind.POLL else {TaskKind.WAIT}
    if (task.kind is TaskKind.WAIT and task.wait is None) or (task.wait is not None and task.kind not in expected):
        yield f"task {task.name!r}: a task that waits must say what it waits for, and only such a task does."
    if task.kind is TaskKind.WAIT and has_runner:
        yield f"task {task.name!r} only waits and does not run on a runner: it takes no retries, pools, keys, limits or mapping."
    if not (_is_storable(task.command) and _is_storable(task.summary) and _is_storable(task.doc)):
        yield f"task {task.name!r}: its command and its docstring must be {_TEXT_RULE}."


def _check_edges(spec: DagSpec) -> Iterator[str]:
    size = len(spec.tasks)
    names = [task.name for task in spec.tasks]
    if outside := [f"{up} >> {down}" for up, down in spec.edges if not (0 <= up < size and 0 <= down < size)]:
        yield f"dependencies name tasks that are not in the DAG: {_listed(outside)}."
        return
    known, edges = set(names), {(names[up], names[down]) for up, down in spec.edges}
    for task in spec.tasks:
        if unknown := [name for name in task.inputs if name not in known]:
            yield f"task {task.name!r} takes the result of unknown tasks: {_listed(unknown)}."
        elif loose := [name for name in task.inputs if (name, task.name) not in edges]:
            yield f"task {task.name!r} takes the result of tasks that are not upstream of it: {_listed(loose)}."
        if task.mapping is not None:
            upstream = {up for up, down in edges if down == task.name}
            yield from (
                f"task {task.name!r}: {problem}"
                for problem in check_mapping(task.mapping, rule=task.trigger_rule, upstream=upstream)
            )
            if task.is_setup or task.is_teardown or task.choice is not None:
                what = task.choice or ("setup" if task.is_setup else "teardown")
                what = what.replace("_", "-").removesuffix("-direct")
                yield f"task {task.name!r} is a {what} and cannot be mapped."
            if any(gate.kind is GateKind.ORDER for gate in task.gates):
                yield f"task {task.name!r} is mapped: `order` is not allowed on a mapped task."
        if task.is_setup and task.is_teardown:
            yield f"task {task.name!r} is both a setup and a teardown; make two tasks of it."
        if task.choice is BranchChoice.BRANCH and not any(up == task.name for up, _ in edges):
            yield f"branch {task.name!r} has no downstream tasks to choose from; add some, as in {task.name}() >> [a(), b()]."
    if itself := [task.name for task in spec.tasks if task.child is not None and task.child.dag == spec.name]:
        yield f"tasks start their own DAG: {_listed(itself)}; each run would start the next."
    if cycle := _find_cycle(size, spec.edges):
        shown = [names[position] for position in cycle]
        if len(shown) > 2 * _SHOWN:
            shown[2 * _SHOWN - 1 : -1] = ["..."]
        yield f"its tasks form a cycle: {' >> '.join(shown)}. Remove one of these dependencies."


def check_schedule(spec: DagSpec, schedule: NamedSchedule) -> None:
    """Raise InvalidDag if the schedule cannot belong to this DAG."""
    if problems := list(_check_schedules(replace(spec, schedules=(schedule,)))):
        raise InvalidDag(f"DAG {spec.name!r}: {problems[0]}")


def past_hints(spec: DagSpec, now: datetime) -> list[str]:
    """For schedules whose author may expect runs for the past: without `catchup` a schedule begins when it is published."""
    hints = []
    for each in spec.schedules:
        start = each.spec.start_at
        is_all = (each.misfire or spec.misfire) is MisfirePolicy.ALL and not each.spec.catchup
        if is_all and start is not None and start < now:
            chosen = f" --schedule {each.name}" if len(spec.schedules) > 1 else ""
            hints.append(
                f"schedule {each.name!r} of DAG {spec.name!r} starts at {start.isoformat()}, in the past, and creates no runs for"
                " that time. Set catchup=True before you publish it, or use a backfill: evertick backfills create"
                f" {spec.name} --from {start.isoformat()}{chosen}"
            )
    return hints


def check_run_type(spec: DagSpec, kind: str) -> None:
    """`kind`: manual, operator_triggered or backfill. Runs of its schedules are always allowed."""
    if spec.run_types and kind not in spec.run_types:
        allowed = ", ".join(spec.run_types)
        raise UserError(f"DAG {spec.name!r} allows only runs of these types: {allowed}. This one would be {kind}.")


def check_run_params(
    spec: DagSpec, given: Mapping[str, object], *, accepts_unknown: bool = False
) -> dict[str, JsonValue]:
    """The validated parameters of a run, including the values that its tasks derive from them."""
    values = check_params(spec.params, given, accepts_unknown=accepts_unknown or spec.accepts_unknown_params)
    for task in spec.tasks:
        for problem in check_versions(task.gates, values):
            raise InvalidParams(f"task {task.name!r}: {problem}.")
    return values


def _check_schedules(spec: DagSpec) -> Iterator[str]:
    names = [schedule.name for schedule in spec.schedules]
    if bad := [shown(name) for name in names if not (isinstance(name, str) and _NAME.fullmatch(name))]:
        yield f"schedule names are not allowed: {_listed(bad)}; {_NAME_RULE}."
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        yield f"schedule names are used twice: {_listed(twice)}."
    for schedule in spec.schedules:
        sources = sources_of(read_text(schedule.spec.after)) if schedule.spec.after else ()
        if any(each.name == spec.name and each.kind != "asset" for each in sources):
            yield f"schedule {schedule.name!r} waits for its own DAG: each run would start the next. Name another DAG."
        if schedule.spec.event is not None:
            trigger = events.read_text(schedule.spec.event)
            for problem in events.check_declared(trigger, {param.name for param in spec.params}):
                yield f"schedule {schedule.name!r} {problem}."
            continue  # its events give the parameters
        try:
            check_run_params(spec, schedule.params)
        except InvalidParams as error:
            yield f"schedule {schedule.name!r} cannot start a run: {error}"


def _levels(size: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The longest path from a root to each task; -1 for tasks on a cycle or downstream of one."""
    downstream: list[list[int]] = [[] for _ in range(size)]
    waiting_for = [0] * size
    for up, down in edges:
        downstream[up].append(down)
        waiting_for[down] += 1
    level = [0 if count == 0 else -1 for count in waiting_for]
    ready = [position for position in range(size) if waiting_for[position] == 0]
    for up in ready:
        for down in downstream[up]:
            waiting_for[down] -= 1
            if waiting_for[down] == 0:
                # The last upstream to arrive is on the longest path: `ready` is in level order.
                level[down] = level[up] + 1
                ready.append(down)
    return level


def _find_cycle(size: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """One cycle, with its first task repeated at the end; empty if there is none."""
    level = _levels(size, edges)
    # Each task that never became ready has an upstream that did not either: walk back until a task repeats.
    before = {down: up for up, down in edges if level[up] == -1 and level[down] == -1}
    position = next((position for position in range(size) if level[position] == -1), None)
    if position is None:
        return []
    path: dict[int, None] = {}
    while position not in path:
        path[position] = None
        position = before[position]
    walked = list(path)
    cycle = walked[walked.index(position) :][::-1]
    first = cycle.index(min(cycle))
    return [*cycle[first:], *cycle[:first], cycle[first]]


def _is_storable(text: object) -> bool:
    """Whether PostgreSQL can store the text: no NUL, no lone surrogate, and within the size limit."""
    return text is None or (isinstance(text, str) and len(text) <= MAX_TEXT and storable_text(text) == text)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
