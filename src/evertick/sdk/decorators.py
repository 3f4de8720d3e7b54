"""The decorators that make a function a task: `@task`, its `.branch`, `.short_circuit` and `.sensor`, `@setup` and `@teardown`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Never, Protocol, TypeVar, Unpack, cast, overload

from evertick.domain.dags.spec import BranchChoice
from evertick.domain.dags.waits import TimeoutAction
from evertick.domain.errors import did_you_mean
from evertick.domain.states import TriggerRule
from evertick.sdk.builder import TaskRef
from evertick.sdk.options import CommonOptions, Seconds, TaskOptions, TimeoutName, check_options, read_flag, read_option
from evertick.sdk.runtime import TaskContext
from evertick.sdk.source_location import refused
from evertick.sdk.task import P, R, Task, Unannotated
from evertick.sdk.waits import sensor_wait

Function = Callable[..., object]


class _Context0(Protocol):
    def __call__(self, *, context: TaskContext) -> object: ...


class _Context1(Protocol):
    def __call__(self, a: Never, /, *, context: TaskContext) -> object: ...


class _Context2(Protocol):
    def __call__(self, a: Never, b: Never, /, *, context: TaskContext) -> object: ...


class _Context3(Protocol):
    def __call__(self, a: Never, b: Never, c: Never, /, *, context: TaskContext) -> object: ...


class _Context4(Protocol):
    def __call__(self, a: Never, b: Never, c: Never, d: Never, /, *, context: TaskContext) -> object: ...


# A function with the parameter `context`. Its calls omit it, which no type can express: their arguments are not checked.
C = TypeVar("C", bound=_Context0 | _Context1 | _Context2 | _Context3 | _Context4)


Async = Coroutine[Any, Any, R]


class _MakeTask(Protocol):
    """`@task` on a function: the task takes its parameters, and for type checkers a call returns its result."""

    @overload
    def __call__(self, function: C, /) -> Task[..., Any, C]: ...
    @overload
    def __call__(self, function: Callable[P, Unannotated], /) -> Task[P, Any, Callable[P, Any]]: ...
    @overload
    def __call__(self, function: Callable[P, Async[None]], /) -> Task[P, TaskRef, Callable[P, Async[None]]]: ...
    @overload
    def __call__(self, function: Callable[P, None], /) -> Task[P, TaskRef, Callable[P, None]]: ...
    @overload
    def __call__(self, function: Callable[P, Async[R]], /) -> Task[P, R, Callable[P, Async[R]]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, Callable[P, R]]: ...


class _MakeStep(Protocol):
    """The same for a task that decides, waits, sets up or has several results: a call returns `Any`, which also takes `>>`."""

    @overload
    def __call__(self, function: C, /) -> Task[..., Any, C]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, Any, Callable[P, R]]: ...


class Decorator:
    """`@it`, or `@it(retries=3)`."""

    def __init__(self, role: Mapping[str, object]) -> None:
        self._role = role

    @overload
    def __call__(self, function: C, /) -> Task[..., Any, C]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, Any, Callable[P, R]]: ...
    @overload
    def __call__(self, /, **options: Unpack[TaskOptions]) -> _MakeStep: ...
    def __call__(self, function: Function | None = None, /, **options: Unpack[TaskOptions]) -> Any:
        return _made(function, options, self._role)


class ShortCircuitOptions(TaskOptions, total=False):
    """The options of `@task.short_circuit`."""

    ignore_downstream_trigger_rules: bool


class TeardownOptions(TaskOptions, total=False):
    """The options of `@teardown`."""

    on_failure_fail_dagrun: bool


@overload
def teardown(function: C, /) -> Task[..., Any, C]: ...
@overload
def teardown(function: Callable[P, R], /) -> Task[P, Any, Callable[P, R]]: ...
@overload
def teardown(**options: Unpack[TeardownOptions]) -> _MakeStep: ...
def teardown(
    function: Function | None = None, /, *, on_failure_fail_dagrun: bool = False, **options: Unpack[TaskOptions]
) -> Any:
    """A task that cleans up once all upstream tasks have ended, if a setup among them succeeded. It does not affect the
    state of the run, unless `on_failure_fail_dagrun`."""
    read_option("@teardown", "on_failure_fail_dagrun", on_failure_fail_dagrun, read_flag)
    role = {"is_teardown": True, "fails_run": on_failure_fail_dagrun}
    return _made(function, options, {**role, "trigger_rule": TriggerRule.ALL_DONE_SETUP_SUCCESS}, teardown)


class SensorOptions(TaskOptions, total=False):
    """The options of `@task.sensor`."""

    interval: Seconds
    on_timeout: TimeoutAction | TimeoutName
    backoff: float
    max_interval: Seconds | None
    poll_timeout: Seconds | None


class TaskDecorator:
    """`@task` makes a function a task. `@task.branch` returns the names of the tasks or groups directly after it that must
    run; the others are skipped. `@task.sensor` is called until its condition is met."""

    @overload
    def __call__(self, function: C, /) -> Task[..., Any, C]: ...
    @overload
    def __call__(self, function: Callable[P, Unannotated], /) -> Task[P, Any, Callable[P, Any]]: ...
    @overload
    def __call__(self, function: Callable[P, Async[None]], /) -> Task[P, TaskRef, Callable[P, Async[None]]]: ...
    @overload
    def __call__(self, function: Callable[P, None], /) -> Task[P, TaskRef, Callable[P, None]]: ...
    @overload
    def __call__(self, function: Callable[P, Async[R]], /) -> Task[P, R, Callable[P, Async[R]]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, Callable[P, R]]: ...
    @overload
    def __call__(self, /, *, outputs: Iterable[str], **options: Unpack[CommonOptions]) -> _MakeStep: ...
    @overload
    def __call__(self, /, **options: Unpack[CommonOptions]) -> _MakeTask: ...
    def __call__(self, function: Function | None = None, /, **options: Any) -> Any:
        return _made(function, cast("TaskOptions", options), {})

    branch = Decorator({"choice": BranchChoice.BRANCH})

    def __getattr__(self, name: str) -> Never:
        from evertick.sdk.airflow_names import DECORATORS

        if name in DECORATORS:
            raise refused(f"@task has no {name!r}: {DECORATORS[name]}.")
        hint = did_you_mean(name, ("branch", "sensor", "short_circuit"), "it has branch, sensor and short_circuit.")
        raise AttributeError(f"@task has no {name!r}; {hint}")

    @overload
    def short_circuit(self, function: C, /) -> Task[..., Any, C]: ...
    @overload
    def short_circuit(self, function: Callable[P, R], /) -> Task[P, Any, Callable[P, R]]: ...
    @overload
    def short_circuit(self, /, **options: Unpack[ShortCircuitOptions]) -> _MakeStep: ...
    def short_circuit(
        self,
        function: Function | None = None,
        /,
        *,
        ignore_downstream_trigger_rules: bool = True,
        **options: Unpack[TaskOptions],
    ) -> Any:
        """A task that skips everything downstream when it returns a false value. Without `ignore_downstream_trigger_rules` it
        skips only the tasks directly after it, and trigger rules decide the rest."""
        read_option(
            "@task.short_circuit", "ignore_downstream_trigger_rules", ignore_downstream_trigger_rules, read_flag
        )
        choice = BranchChoice.SHORT_CIRCUIT if ignore_downstream_trigger_rules else BranchChoice.SHORT_CIRCUIT_DIRECT
        return _made(function, options, {"choice": choice}, self.short_circuit)

    @overload
    def sensor(self, function: C, /) -> Task[..., Any, C]: ...
    @overload
    def sensor(self, function: Callable[P, R], /) -> Task[P, Any, Callable[P, R]]: ...
    @overload
    def sensor(self, /, **options: Unpack[SensorOptions]) -> _MakeStep: ...
    def sensor(
        self,
        function: Function | None = None,
        /,
        *,
        interval: Seconds = 60,
        on_timeout: TimeoutAction | TimeoutName = "fail",
        backoff: float = 1.0,
        max_interval: Seconds | None = None,
        poll_timeout: Seconds | None = None,
        **options: Unpack[TaskOptions],
    ) -> Any:
        """A function that is called every `interval` until it returns True or `Done(value)`; between calls its task takes no slot.

        `backoff` multiplies each interval, up to `max_interval` (an hour). After `timeout` the task fails, or is skipped.
        `poll_timeout` limits one call. Errors are retried like those of any task.
        """
        wait = sensor_wait(interval, options.get("timeout"), on_timeout, backoff, max_interval)
        if poll_timeout is not None:
            options["timeout"] = poll_timeout
        return _made(function, options, {"wait": wait}, self.sensor)


task = TaskDecorator()
setup = Decorator({"is_setup": True})


def _made(
    function: Function | None, options: TaskOptions, role: Mapping[str, object], call: Function | None = None
) -> Any:
    """`call` is the decorator, if it has options of its own."""

    def make(decorated: Function) -> Task[..., Any, Any]:
        name = options.get("name", getattr(decorated, "__name__", "task"))
        if call is not None:
            check_options(f"task {name!r}", options, call, TaskOptions)
        return Task(decorated, options, role)

    return make if function is None else make(function)
