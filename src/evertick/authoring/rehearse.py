"""`dag.test()`: a run of a DAG in this process, one task after the other. No server, no other process: breakpoints work.

Uses the engine's rules (`domain/shape.py`): trigger rules, mapping, branches, retries of tasks, groups and the run
(without delays), parameters. Ignores gates, queues, timeouts and schedules. Waiting tasks are in `answering.py`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from evertick.authoring.answering import check_answers
from evertick.authoring.context import TaskContext
from evertick.authoring.options import check_names
from evertick.authoring.outputs import Outputs
from evertick.authoring.performing import Given, perform, read_given
from evertick.authoring.signals import Fail, RetryAfter, Skip
from evertick.domain.branching import skipped_by
from evertick.domain.dag import DagSpec, TaskSpec
from evertick.domain.errors import BadChoice, UserError
from evertick.domain.groups import groups_of
from evertick.domain.mapping import ITEM
from evertick.domain.params import check_params
from evertick.domain.retry import class_names, may_retry
from evertick.domain.shape import READY, Key, Shape

if TYPE_CHECKING:
    from evertick.authoring.resolve import BoundTask


class RehearsalOptions(TypedDict, total=False):
    """The options of `.test(...)`. `raise_errors` raises the first exception that fails a task for good. `answers` has, by task,
    the payload of an event, or the fields of a form; False rejects. `variables`, `connections` and `secrets` are the values for
    tasks that declare them."""

    params: Mapping[str, object]
    fire_at: datetime
    raise_errors: bool
    answers: Mapping[str, object]
    variables: Mapping[str, object]
    connections: Mapping[str, object]
    secrets: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result: the run's state, and by task (`load`, or `load[2]` for an instance) its state, result, outputs pushed by name,
    and reason."""

    state: str
    states: Mapping[str, str]
    results: Mapping[str, object]
    outputs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def rehearse(spec: DagSpec, tasks: Mapping[str, BoundTask], options: RehearsalOptions) -> Rehearsal:
    """Run the DAG to its end."""
    check_names(".test()", options, RehearsalOptions.__annotations__)
    params = options.get("params")
    if params is not None and not isinstance(params, Mapping):
        raise UserError(f"params must be a dict by name, not {params!r:.100}.")
    given = read_given(options, check_params(spec.params, params or {}))
    check_answers(spec, given.answers)
    stage = _Stage(spec, tasks, given, raise_errors=options.get("raise_errors", False))
    for begun in range(spec.retries + 1):
        if begun:
            stage.shape.clear(range(len(spec.tasks)))
        stage.play(is_last=begun == spec.retries)
        if stage.shape.run_state() != "failed":
            break
    stage.let_out()
    return stage.told()


class _Stage:
    """One run in progress."""

    def __init__(self, spec: DagSpec, tasks: Mapping[str, BoundTask], given: Given, *, raise_errors: bool) -> None:
        self.shape = Shape(spec)
        self._spec, self._tasks, self._given, self._raise_errors = spec, tasks, given, raise_errors
        self._epochs, self._group = Counter[Key](), groups_of(spec)
        self._reasons, self._errors = dict[Key, str](), dict[Key, BaseException]()

    def play(self, *, is_last: bool) -> None:
        """Run until no task is ready. `is_last`: the run is not retried."""
        while ready := [key for key, state in self.shape.states.items() if state == READY]:
            self._try(ready[0], is_last=is_last)

    def let_out(self) -> None:
        """Raise the first error of a task that has failed for good."""
        for key, error in self._errors.items():
            if self.shape.states.get(key) == "failed":
                raise error

    def _try(self, key: Key, *, is_last: bool) -> None:
        task = self._spec.tasks[key.idx]
        value: object = None
        pushed: dict[str, object] = {}
        self._epochs[key] += 1
        for known in (self._reasons, self._errors):
            known.pop(key, None)
        try:
            context = self._context(key, task)
            value = perform(self._tasks[task.name], task, self._inputs(key), context, self._given)
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
        self.shape.end(key, ended, value, no_retry=no_retry)
        if pushed:
            self.shape.results[key] = Outputs(value, pushed)

    def _failed(self, key: Key, error: BaseException, *, is_last: bool, is_tried_again: bool) -> None:
        self._reasons[key] = f"{type(error).__name__}: {error}"
        if not is_tried_again and self._raise_errors:
            # In a group with retries left, only the end of the group decides whether the failure is final.
            if is_last and self._group[key.idx] is None:
                raise error
            self._errors[key] = error
        if not isinstance(error, Fail | BadChoice):
            traceback.print_exception(error)

    def _has_retry(self, key: Key) -> bool:
        return self.shape.attempts[key] < self._spec.tasks[key.idx].retry.retries

    def _context(self, key: Key, task: TaskSpec) -> TaskContext:
        granted: dict[str, Any] = {kind: self._given.of(task, kind) for kind in ("variables", "connections", "secrets")}
        return TaskContext(
            run_id=0,
            dag=self._spec.name,
            task=task.name,
            map_index=key.map_index,
            attempt=self.shape.attempts[key] + 1,
            epoch=self._epochs[key],
            idempotency_key=f"evertick-test-{key.idx}-{key.map_index}",
            fire_at=self._given.fire_at,
            schedule=self._tasks[task.name].schedule,
            params=self._given.params,
            **granted,
        )

    def _inputs(self, key: Key) -> dict[str, object]:
        found = {name: self.shape.result_of(name) for name in self._spec.tasks[key.idx].inputs}
        return {**found, ITEM: self.shape.items[key]} if key in self.shape.items else found

    def told(self) -> Rehearsal:
        states, results = self.shape.states, self.shape.results
        said = {**self.shape.reasons, **self._reasons}
        names = {key: self._name(key) for key in sorted(states)}
        values = {key: found.value if isinstance(found, Outputs) else found for key, found in results.items()}
        return Rehearsal(
            state=self.shape.run_state() or "running",
            states={name: states[key] for key, name in names.items()},
            results={name: values[key] for key, name in names.items() if values.get(key) is not None},
            outputs={name: results[key].named for key, name in names.items() if isinstance(results.get(key), Outputs)},  # type: ignore[attr-defined]
            reasons={name: said[key] for key, name in names.items() if said.get(key)},
        )

    def _name(self, key: Key) -> str:
        name = self._spec.tasks[key.idx].name
        return name if key.map_index < 0 else f"{name}[{key.map_index}]"


def _is_final(task: TaskSpec, error: BaseException) -> bool:
    """Whether a retry is pointless, by a runner's rules."""
    if isinstance(error, Fail):
        return error.no_retry
    if isinstance(error, BadChoice):
        return True
    return not isinstance(error, RetryAfter) and not may_retry(task.retry, class_names(error))
