"""`dag.test()`: runs a whole DAG in the current process, without a database.

Times pass at once, sensors really poll, and events and approvals take the answers that the caller gives.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from time import monotonic, sleep
from typing import Any, TypedDict
from uuid import UUID

from evertick.domain.dags.graph import groups_of, skipped_by
from evertick.domain.dags.mapping import ITEM
from evertick.domain.dags.params import JsonValue, check_params, parse_param
from evertick.domain.dags.run_model import READY, RunModel, TaskId
from evertick.domain.dags.spec import DagSpec, TaskKind, TaskSpec
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec
from evertick.domain.errors import BadChoice, UserError
from evertick.domain.retry import class_names, may_retry
from evertick.domain.stored_values import Connection, as_environment, parse_connection
from evertick.extensions import find_serializer
from evertick.sdk.durable import MemoryStore
from evertick.sdk.http_task import send
from evertick.sdk.options import check_names
from evertick.sdk.program_task import run_program
from evertick.sdk.runtime import (
    BoundTask,
    Done,
    Fail,
    HttpCall,
    Outputs,
    ProgramCall,
    RetryAfter,
    Skip,
    TaskContext,
    Until,
    entered,
)
from evertick.sdk.shell_templates import render_shell


def check_decisions(spec: DagSpec, answers: Mapping[str, object]) -> None:
    """Refuse an answer for a task that does not wait for one."""
    asked = [task.name for task in spec.tasks if task.wait and task.wait.kind in (WaitKind.EVENT, WaitKind.APPROVAL)]
    if unknown := sorted(set(answers) - set(asked)):
        raise UserError(
            f"answers: task {unknown[0]!r} does not wait for an answer; tasks that do: {', '.join(asked) or 'none'}."
        )


def sensor_polled(call: Callable[[], object], wait: WaitSpec) -> object:
    """The value that a sensor found, with its real intervals and timeout."""
    began, pause = monotonic(), wait.seconds or 0.0
    while True:
        value = call()
        if isinstance(value, Done | Until) or value is True:
            return value.value if isinstance(value, Done) else None
        if value is not False:
            raise Fail(f"a sensor returns True, False or Done(value), not {value!r:.100}")
        left = float("inf") if wait.timeout_seconds is None else wait.timeout_seconds - (monotonic() - began)
        if left <= pause:
            reason = f"sensor_timeout: not true within {wait.timeout_seconds:g} s"
            raise Skip(reason) if wait.on_timeout is TimeoutAction.SKIP else Fail(reason)
        sleep(pause)
        pause = min(pause * wait.backoff, wait.longest_seconds or pause)


def _decided(name: str, wait: WaitSpec, given: object) -> object:
    if given is None:
        given = _asked(name, wait)
    if given is False:
        raise Skip("rejected") if wait.on_reject is TimeoutAction.SKIP else Fail("rejected")
    if not isinstance(given, Mapping):
        raise UserError(
            f"answers[{name!r}] must be a dict of the form's fields, or False to reject, not {given!r:.100}."
        )
    return {"by": "dag.test", "at": None, "note": None, "fields": check_params(wait.form, given)}


def _asked(name: str, wait: WaitSpec) -> object:
    """Ask on the terminal, if there is one; otherwise approve a form that needs no input."""
    if not sys.stdin.isatty():
        if any(field.required for field in wait.form):
            raise UserError(f"{wait.name!r} has a form: fill it in with dag.test(answers={{{name!r}: {{...}}}}).")
        return {}
    if input(f"{wait.name} Approve? [Y/n] ").strip().lower() in ("n", "no"):
        return False
    typed = {field.name: input(f"  {field.name} ({field.allowed}): ") for field in wait.form}
    return {key: parse_param(wait.form, key, text) for key, text in typed.items() if text}


_TYPED = (date, time, timedelta, Decimal, UUID, bytes, Enum, set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """The values that tasks of the test run can use by name."""

    params: Mapping[str, JsonValue] = field(default_factory=dict)
    answers: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, object] = field(default_factory=dict)
    connections: Mapping[str, Connection] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    fire_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def of(self, spec: TaskSpec, kind: str) -> dict[str, object]:
        """The task's declared values of one kind. A missing one would also fail it on a runner."""
        known: Mapping[str, object] = getattr(self, kind)
        names: tuple[str, ...] = getattr(spec, kind)
        if missing := [name for name in names if name not in known]:
            raise Fail(
                f"task {spec.name!r} declares {kind}={list(names)!r}, and this test has no {missing[0]!r}:"
                f" .test({kind}={{{missing[0]!r}: ...}})."
            )
        return {name: known[name] for name in names}


def read_inputs(options: Mapping[str, object], params: Mapping[str, JsonValue]) -> TaskInputs:
    """The arguments of `.test(...)`. Refuses values that no run could have."""
    found: dict[str, Any] = {
        name: _named(name, options.get(name)) for name in ("answers", "variables", "connections", "secrets")
    }
    if wrong := [name for name, value in found["secrets"].items() if not isinstance(value, str)]:
        raise UserError(f"secrets[{wrong[0]!r}] must be text, not {found['secrets'][wrong[0]]!r:.100}.")
    found["connections"] = {name: _connection(name, value) for name, value in found["connections"].items()}
    return TaskInputs(params=params, fire_at=_instant(options.get("fire_at")), **found)


def call_task(
    bound: BoundTask, spec: TaskSpec, inputs: Mapping[str, object], context: TaskContext, given: TaskInputs
) -> object:
    """The task's return value, as it would come back from the database. Raises the task's own exception."""
    with entered(context):
        value = stored(_result(bound, spec, inputs, context, given))
    for name, pushed in context.pushed.items():
        context.pushed[name] = stored(pushed)
    known = context.pushed.keys() | (value.keys() if isinstance(value, dict) else set())
    if missing := [name for name in bound.outputs if name not in known]:
        raise Fail(f"the task ended without its outputs {', '.join(missing)}", no_retry=False)
    return value


def _result(
    bound: BoundTask, spec: TaskSpec, inputs: Mapping[str, object], context: TaskContext, given: TaskInputs
) -> object:
    match bound.kind:
        case TaskKind.TRIGGER:
            return None  # the other DAG has its own test
        case TaskKind.WAIT:
            assert spec.wait is not None
            answer = given.answers.get(bound.name)
            return _decided(bound.name, spec.wait, answer) if spec.wait.kind is WaitKind.APPROVAL else answer
        case TaskKind.SHELL:
            _shell(bound, inputs, context)
            return None
        case TaskKind.HTTP:
            assert isinstance(bound.call, HttpCall)
            return send(bound.call, bound.template_names(inputs) if bound.is_template else None)
        case TaskKind.PROGRAM:
            assert isinstance(bound.call, ProgramCall)
            argv = ["env", *_environment(context, inputs, bound.environment(inputs)), *bound.call.argv]
            return run_program(ProgramCall(argv=tuple(argv)), {}, context, say=_say, explain=_explained)
        case TaskKind.PYTHON:
            return _called(bound, spec, inputs)


def _called(bound: BoundTask, spec: TaskSpec, inputs: Mapping[str, object]) -> object:
    args, kwargs = bound.call_arguments(inputs)
    function = bound.function
    assert function is not None

    def call() -> object:
        value = function(*args, **kwargs)
        return asyncio.run(_await_value(value)) if inspect.isawaitable(value) else value

    return call() if spec.wait is None else sensor_polled(call, spec.wait)


async def _await_value(value: Awaitable[object]) -> object:
    return await value


def _shell(bound: BoundTask, inputs: Mapping[str, object], context: TaskContext) -> None:
    command = bound.command or ""
    values: dict[str, str] = {}
    if bound.is_template:
        command, values = render_shell(command, bound.template_names(inputs), is_unsafe=bound.unsafe_template)
    added = _environment(context, inputs, {**bound.environment(inputs), **values})
    done = subprocess.run(["env", *added, "bash", "-eo", "pipefail", "-c", command], check=False)
    if done.returncode:
        raise RuntimeError(_explained(done.returncode))


def _environment(context: TaskContext, inputs: Mapping[str, object], own: Mapping[str, str]) -> list[str]:
    """The variables added to this process's environment, as a runner adds them for its child."""
    variables = {
        "EVERTICK_RUN_ID": str(context.run_id),
        "EVERTICK_DAG": context.dag,
        "EVERTICK_TASK": context.task,
        "EVERTICK_MAP_INDEX": str(context.map_index),
        "EVERTICK_ATTEMPT": str(context.attempt),
        "EVERTICK_EPOCH": str(context.epoch),
        "EVERTICK_IDEMPOTENCY_KEY": context.idempotency_key,
        "EVERTICK_FIRE_AT": context.fire_at.isoformat(),
        "EVERTICK_PARAMS": json.dumps(dict(context.params)),
        "EVERTICK_INPUTS": json.dumps(dict(inputs), default=str),
        **as_environment(context.variables, context.connections, context.secrets),
        **own,
    }
    return [f"{name}={value}" for name, value in variables.items()]


def _explained(code: int) -> str:
    return f"exited with code {code}" if code > 0 else f"killed by signal {-code}"


def _say(stream: str, text: str) -> None:
    (sys.stderr if stream == "ERR" else sys.stdout).write(f"{text}\n")


def stored(value: object) -> object:
    """Plain JSON after a round trip, typed values unchanged."""
    typed: list[object] = []

    def keep(part: object) -> None:
        is_known = isinstance(part, _TYPED) or is_dataclass(part) or hasattr(part, "model_dump")
        if not is_known and find_serializer(part) is None:
            raise TypeError(f"a result of type {type(part).__name__} cannot be stored")
        typed.append(part)

    text = json.dumps(value, allow_nan=False, default=keep)
    return value if typed else json.loads(text)


def _named(option: str, value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{option} must be a dict by name, not {value!r:.100}.")
    return value


def _instant(value: object) -> datetime:
    if value is None:
        return datetime.now(UTC)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value
    raise UserError(
        f"fire_at is {value!r:.100}; it must be a datetime with a time zone, as in datetime(2030, 1, 1, tzinfo=UTC)."
    )


def _connection(name: str, value: object) -> Connection:
    if isinstance(value, Connection):
        return value
    try:
        return parse_connection(str(value))
    except UserError as error:
        raise UserError(f"connections[{name!r}]: {error}.") from None


class LocalRunOptions(TypedDict, total=False):
    """The options of `.test(...)`. `raise_errors` raises the first exception that fails a task for good. `answers` has, by task,
    the payload of an event, or the fields of a form; False rejects. `variables`, `connections` and `secrets` are the values for
    tasks that declare them. `only`: run this task and its upstream tasks. `task_state` and `asset_state` have what an earlier run
    has kept, by owner and key."""

    params: Mapping[str, object]
    fire_at: datetime
    raise_errors: bool
    answers: Mapping[str, object]
    variables: Mapping[str, object]
    connections: Mapping[str, object]
    secrets: Mapping[str, str]
    only: str
    task_state: Mapping[str, Mapping[str, object]]
    asset_state: Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """The result: the run's state, and by task (`load`, or `load[2]` for an instance) its state, result, outputs pushed by name,
    and reason. `task_state` and `asset_state` have what the run has kept, by owner and key."""

    state: str
    states: Mapping[str, str]
    results: Mapping[str, object]
    outputs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    task_state: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    asset_state: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def run_locally(spec: DagSpec, tasks: Mapping[str, BoundTask], options: LocalRunOptions) -> LocalRun:
    """Run the DAG to its end."""
    check_names(".test()", options, LocalRunOptions.__annotations__)
    params = options.get("params")
    if params is not None and not isinstance(params, Mapping):
        raise UserError(f"params must be a dict by name, not {params!r:.100}.")
    given = read_inputs(options, check_params(spec.params, params or {}))
    check_decisions(spec, given.answers)
    run = _Run(spec, tasks, given, raise_errors=options.get("raise_errors", False))
    for known, option in ((run.kept.task_state, "task_state"), (run.kept.asset_state, "asset_state")):
        known.update(
            {owner: dict(_named(option, values)) for owner, values in _named(option, options.get(option)).items()}
        )
    if (only := options.get("only")) is not None:
        run.chosen = _with_upstream(spec, only)
    for attempt in range(spec.retries + 1):
        if attempt:
            run.model.clear(range(len(spec.tasks)))
        run.run_ready(is_last=attempt == spec.retries)
        if run.model.run_state() != "failed":
            break
    run.raise_first()
    return run.result()


def _with_upstream(spec: DagSpec, name: str) -> frozenset[int]:
    """The positions of a task and of all tasks upstream of it."""
    known = [task.name for task in spec.tasks]
    if name not in known:
        raise UserError(f"DAG {spec.name!r} has no task {name!r}; it has: {', '.join(known)}.")
    found, added = frozenset[int](), frozenset({known.index(name)})
    while added:
        found |= added
        added = frozenset(up for up, down in spec.edges if down in added) - found
    return found


class _Run:
    """One run in progress. `chosen`: the positions of the tasks that run."""

    def __init__(self, spec: DagSpec, tasks: Mapping[str, BoundTask], given: TaskInputs, *, raise_errors: bool) -> None:
        self.model = RunModel(spec)
        self._spec, self._tasks, self._given, self._raise_errors = spec, tasks, given, raise_errors
        self._epochs, self._group = Counter[TaskId](), groups_of(spec)
        self._reasons, self._errors = dict[TaskId, str](), dict[TaskId, BaseException]()
        self.chosen = frozenset(range(len(spec.tasks)))
        self.kept = MemoryStore()

    def run_ready(self, *, is_last: bool) -> None:
        """Run until no task is ready. `is_last`: the run is not retried."""
        while ready := [key for key, state in self.model.states.items() if state == READY and key.idx in self.chosen]:
            self._try(ready[0], is_last=is_last)

    def raise_first(self) -> None:
        """Raise the first error of a task that has failed for good."""
        for key, error in self._errors.items():
            if self.model.states.get(key) == "failed":
                raise error

    def _try(self, key: TaskId, *, is_last: bool) -> None:
        task = self._spec.tasks[key.idx]
        value: object = None
        pushed: dict[str, object] = {}
        self._epochs[key] += 1
        for known in (self._reasons, self._errors):
            known.pop(key, None)
        try:
            context = self._context(key, task)
            value = call_task(self._tasks[task.name], task, self._inputs(key), context, self._given)
            skipped_by(self._spec, key.idx, value)  # raises for an invalid choice
            ended, no_retry, pushed = "success", False, context.pushed
        except Skip as signal:
            ended, no_retry, self._reasons[key] = "skipped", False, signal.reason
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:
                ended, no_retry = "success", False
            else:
                ended, no_retry = "failed", _is_final(task, error)
                self._failed(key, error, is_last=is_last, is_tried_again=not no_retry and self._has_retry(key))
        self.model.end(key, ended, value, no_retry=no_retry)
        if pushed:
            self.model.results[key] = Outputs(value, pushed)

    def _failed(self, key: TaskId, error: BaseException, *, is_last: bool, is_tried_again: bool) -> None:
        self._reasons[key] = f"{type(error).__name__}: {error}"
        if not is_tried_again and self._raise_errors:
            # In a group with retries left, only the end of the group decides whether the failure is final.
            if is_last and self._group[key.idx] is None:
                raise error
            self._errors[key] = error
        if not isinstance(error, Fail | BadChoice):
            traceback.print_exception(error)

    def _has_retry(self, key: TaskId) -> bool:
        return self.model.attempts[key] < self._spec.tasks[key.idx].retry.retries

    def _context(self, key: TaskId, task: TaskSpec) -> TaskContext:
        granted: dict[str, Any] = {kind: self._given.of(task, kind) for kind in ("variables", "connections", "secrets")}
        return TaskContext(
            run_id=0,
            dag=self._spec.name,
            task=task.name,
            map_index=key.map_index,
            attempt=self.model.attempts[key] + 1,
            epoch=self._epochs[key],
            idempotency_key=f"evertick-test-{key.idx}-{key.map_index}",
            fire_at=self._given.fire_at,
            schedule=self._tasks[task.name].schedule,
            params=self._given.params,
            durable=self.kept.durable(task.name, key.map_index, is_first=self.model.attempts[key] == 0),
            **granted,
        )

    def _inputs(self, key: TaskId) -> dict[str, object]:
        found = {name: self.model.result_of(name, key) for name in self._spec.tasks[key.idx].inputs}
        return {**found, ITEM: self.model.items[key]} if key in self.model.items else found

    def result(self) -> LocalRun:
        states, results = self.model.states, self.model.results
        said = {**self.model.reasons, **self._reasons}
        names = {key: self._name(key) for key in sorted(states)}
        values = {key: found.value if isinstance(found, Outputs) else found for key, found in results.items()}
        return LocalRun(
            state=self.model.run_state() or "running",
            states={name: states[key] for key, name in names.items()},
            results={name: values[key] for key, name in names.items() if values.get(key) is not None},
            outputs={name: results[key].named for key, name in names.items() if isinstance(results.get(key), Outputs)},  # type: ignore[attr-defined]
            reasons={name: said[key] for key, name in names.items() if said.get(key)},
            task_state={owner: known for owner, known in self.kept.task_state.items() if known},
            asset_state={owner: known for owner, known in self.kept.asset_state.items() if known},
        )

    def _name(self, key: TaskId) -> str:
        name = self._spec.tasks[key.idx].name
        return name if key.map_index < 0 else f"{name}[{key.map_index}]"


def _is_final(task: TaskSpec, error: BaseException) -> bool:
    """Whether a retry is pointless, by a runner's rules."""
    if isinstance(error, Fail):
        return error.no_retry
    if isinstance(error, BadChoice):
        return True
    return not isinstance(error, RetryAfter) and not may_retry(task.retry, class_names(error))
