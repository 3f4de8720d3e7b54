"""`dag.test()`: a run of a DAG in this process, one task after the other. No server, no other process: breakpoints work.

By the same rules as the engine (`domain/shape.py`): trigger rules, mapping, branches, retries (without delays), parameters.
Gates, queues, timeouts and schedules have no meaning here. What waits is in `answering.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING
from uuid import UUID

from evertick.authoring.answering import answered, check_answers, polled
from evertick.authoring.context import TaskContext, entered
from evertick.authoring.signals import Fail, Skip
from evertick.domain.branching import skipped_by
from evertick.domain.dag import DagSpec, TaskKind
from evertick.domain.errors import BadChoice
from evertick.domain.mapping import ITEM
from evertick.domain.params import JsonValue, check_params
from evertick.domain.shape import READY, Key, Shape
from evertick.domain.waiting import WaitSpec

if TYPE_CHECKING:
    from evertick.authoring.resolve import BoundTask


_TYPED = (date, time, timedelta, Decimal, UUID, bytes, Enum, set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """How it went: the run's state, and by task (`load`, or `load[2]` for an instance) its state, result and reason."""

    state: str
    states: Mapping[str, str]
    results: Mapping[str, object]
    reasons: Mapping[str, str] = field(default_factory=dict)


def rehearse(
    spec: DagSpec,
    tasks: Mapping[str, BoundTask],
    *,
    params: Mapping[str, object] | None = None,
    fire_at: datetime | None = None,
    raise_errors: bool = False,
    answers: Mapping[str, object] | None = None,
) -> Rehearsal:
    """Run it to its end. `raise_errors` lets the first exception out that fails a task for good. `answers` has, by
    task, what came with an event, or what was filled into a form; False rejects."""
    check_answers(spec, answers or {})
    checked = check_params(spec.params, params or {})
    shape = Shape(spec)
    reasons: dict[Key, str] = {}
    epochs: Counter[Key] = Counter()
    while ready := [key for key, state in shape.states.items() if state == READY]:
        key = ready[0]
        epochs[key] += 1
        context = replace(_context(spec, key, shape.attempts[key] + 1, checked, fire_at), epoch=epochs[key])
        bound = tasks[spec.tasks[key.idx].name]
        try:
            value = _stored(_call(bound, _inputs(shape, key), context, spec.tasks[key.idx].wait, answers or {}))
            skipped_by(spec, key.idx, value)  # refuses a choice that is none
            ended, no_retry = "success", False
        except Skip as signal:
            ended, value, no_retry, reasons[key] = "skipped", None, False, signal.reason
        except (Exception, SystemExit) as error:
            no_retry = isinstance(error, BadChoice) or (isinstance(error, Fail) and error.no_retry)
            ended, value, reasons[key] = "failed", None, f"{type(error).__name__}: {error}"
            is_last = no_retry or context.attempt > spec.tasks[key.idx].retry.retries
            if raise_errors and is_last:
                raise
            if not isinstance(error, Fail | BadChoice):
                traceback.print_exception(error)
        shape.end(key, ended, value, no_retry=no_retry)
    return _told(spec, shape, reasons)


def _context(
    spec: DagSpec, key: Key, attempt: int, params: Mapping[str, JsonValue], fire_at: datetime | None
) -> TaskContext:
    return TaskContext(
        run_id=0,
        dag=spec.name,
        task=spec.tasks[key.idx].name,
        map_index=key.map_index,
        attempt=attempt,
        epoch=attempt,
        idempotency_key=f"evertick-test-{key.idx}-{key.map_index}",
        fire_at=fire_at,
        params=params,
    )


def _inputs(shape: Shape, key: Key) -> dict[str, object]:
    found = {name: shape.result_of(name) for name in shape.spec.tasks[key.idx].inputs}
    return {**found, ITEM: shape.items[key]} if key in shape.items else found


def _call(
    bound: BoundTask,
    inputs: Mapping[str, object],
    context: TaskContext,
    wait: WaitSpec | None,
    answers: Mapping[str, object],
) -> object:
    with entered(context):
        if bound.kind is TaskKind.TRIGGER:
            return None  # the other DAG is tried by its own test
        if bound.kind is TaskKind.WAIT:
            assert wait is not None
            return answered(bound.name, wait, answers)
        if bound.kind is TaskKind.SHELL:
            _shell(bound, inputs)
            return None
        args, kwargs = bound.call_arguments(inputs)
        function = bound.function
        assert function is not None

        def call() -> object:
            value = function(*args, **kwargs)
            return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

        return call() if wait is None else polled(call, wait)


async def _awaited(value: object) -> object:
    assert inspect.isawaitable(value)
    return await value


def _shell(bound: BoundTask, inputs: Mapping[str, object]) -> None:
    # `env` adds to what this process has, as a runner's child does.
    added = [f"{name}={value}" for name, value in bound.environment(inputs).items()]
    done = subprocess.run(["env", *added, "bash", "-eo", "pipefail", "-c", bound.command or ""], check=False)
    if done.returncode:
        raise RuntimeError(f"exited with code {done.returncode}")


def _stored(value: object) -> object:
    """As it would come back from the database: plain JSON as JSON does, what keeps its type as it is."""
    typed: list[object] = []

    def keep(part: object) -> None:
        if not isinstance(part, _TYPED) and not is_dataclass(part) and not hasattr(part, "model_dump"):
            raise TypeError(f"a result of type {type(part).__name__} cannot be stored")
        typed.append(part)

    text = json.dumps(value, allow_nan=False, default=keep)
    return value if typed else json.loads(text)


def _told(spec: DagSpec, shape: Shape, reasons: Mapping[Key, str]) -> Rehearsal:
    def named(key: Key) -> str:
        name = spec.tasks[key.idx].name
        return name if key.map_index < 0 else f"{name}[{key.map_index}]"

    states = shape.states
    keys = sorted(states)
    said = {**shape.reasons, **reasons}
    return Rehearsal(
        state=shape.run_state() or "running",
        states={named(key): states[key] for key in keys},
        results={named(key): shape.results[key] for key in keys if key in shape.results},
        reasons={named(key): said[key] for key in keys if said.get(key)},
    )
