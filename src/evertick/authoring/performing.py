"""Executes one task in `dag.test()`: its function, command, request or program, with the inputs that a run would provide."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from uuid import UUID

from evertick.authoring.answering import answered, polled
from evertick.authoring.context import TaskContext, entered
from evertick.authoring.http_request import send
from evertick.authoring.program import run_program
from evertick.authoring.resolve import BoundTask, HttpCall, ProgramCall
from evertick.authoring.signals import Fail
from evertick.authoring.templates import render_shell
from evertick.domain.dag import TaskKind, TaskSpec
from evertick.domain.errors import UserError
from evertick.domain.params import JsonValue
from evertick.domain.stored_values import Connection, as_environment, parse_connection

_TYPED = (date, time, timedelta, Decimal, UUID, bytes, Enum, set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The values that tasks of the test run can use by name."""

    params: Mapping[str, JsonValue] = field(default_factory=dict)
    answers: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, object] = field(default_factory=dict)
    connections: Mapping[str, Connection] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    fire_at: datetime | None = None

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


def read_given(options: Mapping[str, object], params: Mapping[str, JsonValue]) -> Given:
    """The arguments of `.test(...)`. Refuses values that no run could have."""
    found = {name: _named(name, options.get(name)) for name in ("answers", "variables", "connections", "secrets")}
    if wrong := [name for name, value in found["secrets"].items() if not isinstance(value, str)]:
        raise UserError(f"secrets[{wrong[0]!r}] must be text, not {found['secrets'][wrong[0]]!r:.100}.")
    return Given(
        params=params,
        answers=found["answers"],
        variables=found["variables"],
        connections={name: _connection(name, value) for name, value in found["connections"].items()},
        secrets={name: str(value) for name, value in found["secrets"].items()},
        fire_at=_instant(options.get("fire_at")),
    )


def perform(
    bound: BoundTask, spec: TaskSpec, inputs: Mapping[str, object], context: TaskContext, given: Given
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
    bound: BoundTask, spec: TaskSpec, inputs: Mapping[str, object], context: TaskContext, given: Given
) -> object:
    match bound.kind:
        case TaskKind.TRIGGER:
            return None  # the other DAG has its own test
        case TaskKind.WAIT:
            assert spec.wait is not None
            return answered(bound.name, spec.wait, given.answers)
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
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

    return call() if spec.wait is None else polled(call, spec.wait)


async def _awaited(value: object) -> object:
    assert inspect.isawaitable(value)
    return await value


def _shell(bound: BoundTask, inputs: Mapping[str, object], context: TaskContext) -> None:
    command = bound.command or ""
    values: dict[str, str] = {}
    if bound.is_template:
        command, values = render_shell(command, bound.template_names(inputs))
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
        "EVERTICK_FIRE_AT": context.fire_at.isoformat() if context.fire_at else "",
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
        if not isinstance(part, _TYPED) and not is_dataclass(part) and not hasattr(part, "model_dump"):
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


def _instant(value: object) -> datetime | None:
    if value is None or (isinstance(value, datetime) and value.tzinfo is not None):
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
