"""The decorators that make a function a task: `@task`, its `.branch`, `.short_circuit` and `.sensor`, `@setup` and `@teardown`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack, overload

from evertick.domain.dags.spec import BranchChoice
from evertick.domain.states import TriggerRule
from evertick.sdk.options import Seconds, TaskOptions
from evertick.sdk.source_location import refused
from evertick.sdk.task import Task
from evertick.sdk.waits import PollResult

Function = Callable[..., object]


class Decorator:
    """`@it`, or `@it(retries=3)`."""

    def __init__(self, role: Mapping[str, object]) -> None:
        self._role = role

    @overload
    def __call__(self, function: Function, /) -> Task: ...
    @overload
    def __call__(self, /, **options: Unpack[TaskOptions]) -> Callable[[Function], Task]: ...
    def __call__(
        self, function: Function | None = None, /, **options: Unpack[TaskOptions]
    ) -> Task | Callable[[Function], Task]:
        return _made(function, options, self._role)


class ShortCircuit:
    """A task that skips everything downstream when it returns a false value. Without `ignore_downstream_trigger_rules` it
    skips only the tasks directly after it, and trigger rules decide the rest."""

    @overload
    def __call__(self, function: Function, /) -> Task: ...
    @overload
    def __call__(
        self, /, *, ignore_downstream_trigger_rules: bool = ..., **options: Unpack[TaskOptions]
    ) -> Callable[[Function], Task]: ...
    def __call__(
        self,
        function: Function | None = None,
        /,
        *,
        ignore_downstream_trigger_rules: bool = True,
        **options: Unpack[TaskOptions],
    ) -> Task | Callable[[Function], Task]:
        _check_flag("@task.short_circuit: ignore_downstream_trigger_rules", ignore_downstream_trigger_rules)
        choice = BranchChoice.SHORT_CIRCUIT if ignore_downstream_trigger_rules else BranchChoice.SHORT_CIRCUIT_DIRECT
        return _made(function, options, {"choice": choice})


class Teardown:
    """A task that cleans up once all upstream tasks have ended, if a setup among them succeeded. It does not affect the
    state of the run, unless `on_failure_fail_dagrun`."""

    @overload
    def __call__(self, function: Function, /) -> Task: ...
    @overload
    def __call__(
        self, /, *, on_failure_fail_dagrun: bool = ..., **options: Unpack[TaskOptions]
    ) -> Callable[[Function], Task]: ...
    def __call__(
        self,
        function: Function | None = None,
        /,
        *,
        on_failure_fail_dagrun: bool = False,
        **options: Unpack[TaskOptions],
    ) -> Task | Callable[[Function], Task]:
        _check_flag("@teardown: on_failure_fail_dagrun", on_failure_fail_dagrun)
        role = {"is_teardown": True, "fails_run": on_failure_fail_dagrun}
        return _made(function, options, {**role, "trigger_rule": TriggerRule.ALL_DONE_SETUP_SUCCESS})


class Sensor:
    """A function that is called every `interval` until it returns True or `Done(value)`; between calls its task takes no slot.

    `backoff` multiplies each interval, up to `max_interval` (an hour). After `timeout` the task fails, or is skipped.
    `poll_timeout` limits one call. Errors are retried like those of any task.
    """

    @overload
    def __call__(self, function: Function, /) -> Task: ...
    @overload
    def __call__(
        self,
        /,
        *,
        interval: Seconds = ...,
        on_timeout: str = ...,
        backoff: float = ...,
        max_interval: Seconds | None = ...,
        poll_timeout: Seconds | None = ...,
        **options: Unpack[TaskOptions],
    ) -> Callable[[Function], Task]: ...
    def __call__(
        self,
        function: Function | None = None,
        /,
        *,
        interval: Seconds = 60,
        on_timeout: str = "fail",
        backoff: float = 1.0,
        max_interval: Seconds | None = None,
        poll_timeout: Seconds | None = None,
        **options: Unpack[TaskOptions],
    ) -> Task | Callable[[Function], Task]:
        polling = PollResult(
            interval=interval,
            timeout=options.get("timeout"),
            on_timeout=on_timeout,
            backoff=backoff,
            max_interval=max_interval,
        )
        if poll_timeout is not None:
            options["timeout"] = poll_timeout
        return _made(function, options, {"wait": polling.wait()})


class TaskDecorator(Decorator):
    """`@task` makes a function a task. `@task.branch` returns the names of the tasks or groups directly after it that must
    run; the others are skipped. `@task.sensor` is called until its condition is met."""

    branch = Decorator({"choice": BranchChoice.BRANCH})
    short_circuit = ShortCircuit()
    sensor = Sensor()


task = TaskDecorator({})
setup = Decorator({"is_setup": True})
teardown = Teardown()


def _made(
    function: Function | None, options: TaskOptions, role: Mapping[str, object]
) -> Task | Callable[[Function], Task]:
    if function is not None:
        return Task(function, options, role)
    return lambda decorated: Task(decorated, options, role)


def _check_flag(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise refused(f"{what} must be True or False.")
