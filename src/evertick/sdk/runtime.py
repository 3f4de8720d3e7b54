"""Inside a running task: its context, its outputs, the signals that end it, and the arguments of its call.

The process that runs the task sets the context; user code only reads it.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Unpack

from evertick.domain.dags.mapping import ITEM
from evertick.domain.dags.spec import DagSpec, TaskKind
from evertick.domain.errors import NotDeclared, NotFound, ResultLost, UserError
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.computed import Instant
from evertick.domain.schedules.dependencies import Source
from evertick.domain.schedules.misfire import latest_between
from evertick.domain.schedules.spec import EARLIEST, ScheduleSpec
from evertick.domain.schedules.time_zones import find_zone
from evertick.domain.state import StateScope
from evertick.domain.stored_values import Connection
from evertick.sdk.durable import Durable, MemoryStore, State
from evertick.sdk.source_location import refused

if TYPE_CHECKING:
    from evertick.sdk.local_run import LocalRun, LocalRunOptions

_running: ContextVar[TaskContext] = ContextVar("evertick_task")


class Declared(dict[str, Any]):
    """A task's declared values by name. The error for another name says how to declare it."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._kind = kind

    def __missing__(self, name: str) -> Any:
        if self._kind == "params":
            raise NotDeclared(f"the DAG declares no param {name!r}; it has: {', '.join(sorted(self)) or 'none'}.")
        raise NotDeclared(f"the task does not declare {name!r}; write @task({self._kind}=[{name!r}]).")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """One attempt of one task.

    `idempotency_key` is the same for every attempt: pass it to other systems, so that they recognize a repeated call.
    `epoch` rises with every attempt: a store that keeps the highest can refuse a writer that was replaced.
    `variables`, `connections` and `secrets` contain the values that the task declares.
    `fire_at` is the date of the run: its due time, the date that it was triggered for, or when it was triggered.
    `pushed` contains the values that `push(name, value)` has named so far.
    """

    run_id: int
    dag: str
    task: str
    map_index: int = -1
    attempt: int = 1
    epoch: int = 1
    idempotency_key: str = ""
    fire_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    schedule: ScheduleSpec | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("evertick.task"))
    cancelled: threading.Event = field(default_factory=threading.Event)
    variables: Mapping[str, Any] = field(default_factory=dict)
    connections: Mapping[str, Connection] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    pushed: dict[str, object] = field(default_factory=dict)
    durable: Durable = field(default_factory=lambda: MemoryStore().durable(""), repr=False, compare=False)

    def __post_init__(self) -> None:
        for kind in ("params", "variables", "connections", "secrets"):
            object.__setattr__(self, kind, Declared(kind, getattr(self, kind)))

    @property
    def ds(self) -> str:
        """The day of `fire_at` as 2030-01-31: in the time zone of the DAG's schedule, if its file has one, otherwise in UTC."""
        zone = self.schedule and find_zone(self.schedule.timezone)
        return self.fire_at.astimezone(zone or UTC).date().isoformat()

    @property
    def data_interval_start(self) -> datetime:
        """The due time before `fire_at`; `fire_at` itself if there is none, or if the DAG's file has not exactly one schedule."""
        moment_before = self.fire_at - timedelta(microseconds=1)
        return (self.schedule and latest_between(self.schedule, EARLIEST, moment_before)) or self.fire_at

    @property
    def data_interval_end(self) -> datetime:
        return self.fire_at

    @property
    def state(self) -> State:
        """The values that this task keeps between attempts and runs. The instances of a mapped task share them."""
        return State(self.durable, StateScope.TASK)

    def asset_state(self, asset: Source | str) -> State:
        """The values that tasks keep of an asset: `context.asset_state(Asset("orders")).get("cursor")`."""
        return State(self.durable, StateScope.ASSET, asset if isinstance(asset, str) else asset.name)

    @property
    def partition_key(self) -> str | None:
        """The partition that the run is for, such as 2030-01-31. None if it is for no partition."""
        return self.durable.partition_key()

    def update(self, asset: Source | str, *keys: str, extra: Mapping[str, Any] | None = None) -> None:
        """Say which partitions of an outlet the task updates, if not that of its run: `context.update(regions, "eu", "us")`."""
        self.durable.update(asset, keys, extra or {})

    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function once: a retry of the task gets the stored result instead. Its result is stored as a task's is, and
        committed before it is returned. With an async function, await it. A process that dies before the commit calls it again:
        pass `idempotency_key` to other systems.
        """
        return self.durable.step(name, function, args, kwargs)

    def commit(self, conn: Any, result: object = None) -> Any:
        """Commit the transaction of a DB-API connection to PostgreSQL and the success of this task as one. A replaced attempt
        changes nothing and gets LeaseLost. Return what this returns, and do nothing after it."""
        return self.durable.commit(conn, result)

    def ask(self, verb: str, /, **args: Any) -> Any:
        """Ask the runner about other runs, tasks and results. Needs `@task(asks=True)`."""
        return self.durable.ask(verb, args)

    def is_cancelled(self) -> bool:
        """Whether a stop was requested for this task; long loops check it from time to time."""
        return self.cancelled.is_set()

    def __getitem__(self, name: str) -> Never:
        """Refuse keys, which Airflow's context has."""
        from evertick.sdk.airflow_names import context_hint

        advice = context_hint(name) or f"write context.{name}"
        raise UserError(f"a context has attributes and no keys, so context[{name!r}] fails: {advice}.")


# The fields of a context that templates can use.
_NAMED = "params variables connections secrets run_id dag task map_index attempt idempotency_key"
CONTEXT_NAMES = (*_NAMED.split(), "fire_at", "ds", "data_interval_start", "data_interval_end")


def current_context() -> TaskContext:
    """The context of the task that is running in this thread or coroutine."""
    try:
        return _running.get()
    except LookupError:
        raise UserError(
            "no task is running here: current_context() works only inside a running task. "
            "To test a task's function on its own, import `entered` from evertick.testing, and wrap the call in "
            "`with entered(TaskContext(...)):`."
        ) from None


def enter(context: TaskContext) -> None:
    """Make `context` the current one, until it is replaced."""
    _running.set(context)


@contextmanager
def entered(context: TaskContext) -> Iterator[TaskContext]:
    """Make `context` the current one within the block."""
    token = _running.set(context)
    try:
        yield context
    finally:
        _running.reset(token)


MOST_OUTPUTS, _LONGEST_NAME = 1000, 200


class Outputs(NamedTuple):
    """A task's return value, and the values it pushed by name."""

    value: Any
    named: Mapping[str, Any]


def push(name: str, value: object) -> None:
    """Store a named result in addition to the return value; other tasks take it as `task["name"]`.

    It takes effect if the attempt succeeds, with all others of the attempt; a failed attempt stores none.
    """
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME:
        raise UserError(f"push() takes a name of 1 to {_LONGEST_NAME} characters first, not {name!r:.100}.")
    pushed = current_context().pushed
    if len(pushed) >= MOST_OUTPUTS and name not in pushed:
        raise UserError(f"a task can push at most {MOST_OUTPUTS:,} names; push a dict or a list under one.")
    pushed[name] = value


def part_of(task: str, result: object, path: tuple[str | int, ...]) -> object:
    """The part of a task's result that another task takes. A task without a result gives None, as with a whole result."""
    if isinstance(result, Outputs):
        if path and path[0] in result.named:
            result, path = result.named[str(path[0])], path[1:]
        else:
            result = result.value if not path or result.value is not None else result.named
    for key in path if result is not None else ():
        try:
            result = result[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            known = f"; it has: {', '.join(map(repr, list(result)[:10]))}" if isinstance(result, Mapping) else ""
            raise ResultLost(f"the result of task {task!r} has no {key!r}{known}.") from None
    return result


class Skip(Exception):
    """End this task as skipped: `raise Skip("nothing new since yesterday")`."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Fail(Exception):
    """End this task as failed, by default without using the remaining retries: they would not help."""

    def __init__(self, reason: str = "", *, no_retry: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.no_retry = no_retry


class RetryAfter(Exception):
    """Fail this attempt and retry it after this delay instead of the policy's: `raise RetryAfter(30, "throttled")`."""

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        super().__init__(reason)
        given = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
            raise UserError(f"RetryAfter takes seconds or a timedelta, 0 or more, not {seconds!r:.100}.")
        self.seconds = float(given)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Done:
    """A sensor's return value once its condition is met: `return Done(rows)`. The value becomes the task's result."""

    value: object = None


@dataclass(frozen=True, slots=True)
class Until:
    """The result of an attempt that computed until when its task waits."""

    instant: datetime


@dataclass(frozen=True, slots=True)
class ResultOf:
    """A placeholder in an argument for the result of the named upstream task, or for a part of it."""

    task: str
    path: tuple[str | int, ...] = ()


class Placeholder:
    """A value that exists only in a run. The DAG's function can pass it to tasks; every other use is refused, because a
    comparison or a text of the placeholder itself would be silently wrong."""

    __slots__ = ()

    def _known_when(self) -> str:
        raise NotImplementedError

    def _unknown(self, *_: object) -> Never:
        raise refused(f"{self._known_when()}: pass it to a task, and use it there.")

    def _undecided(self) -> Never:
        raise refused(
            f"{self._known_when()}: pass it to a task, and use it there. "
            "To choose between tasks, use @task.branch or @task.short_circuit."
        )

    def _unformatted(self, *_: object) -> Never:
        raise refused(
            f"{self._known_when()}, so it cannot become part of a text here: pass it to a task, and write the text there. "
            "A shell command takes it with inputs= or env=."
        )

    def _unlisted(self, *_: object) -> Never:
        raise refused(
            f"{self._known_when()}: a DAG's function cannot loop over it or count it. "
            "For one task per element, use .expand(x=...)."
        )

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):  # Python and libraries ask for optional protocols this way
            raise AttributeError(name)
        raise refused(
            f"{self._known_when()}, so it has no attribute {name!r} here: pass it to a task, and use it there."
        )

    __bool__ = _undecided
    __str__ = __format__ = _unformatted
    __iter__ = __len__ = __contains__ = __reversed__ = _unlisted
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __int__ = __float__ = __index__ = __neg__ = __abs__ = __round__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __and__ = __rand__ = __or__ = __ror__ = _unknown
    __hash__ = object.__hash__


class ParamRef(Placeholder):
    """A placeholder in an argument for a parameter of the run, which is known when the task runs."""

    __slots__ = ("param_name",)

    def __init__(self, name: str) -> None:
        self.param_name = name

    def __repr__(self) -> str:
        return f"<param {self.param_name}>"

    def _known_when(self) -> str:
        return f"param {self.param_name!r} is known only when a run starts"

    def __getitem__(self, key: object) -> Never:
        self._unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One request. Its texts may be templates, unless the task disables them."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    body: str | None = None
    expect: tuple[int, ...] = ()
    response: str = "auto"
    timeout_seconds: float = 30.0
    max_bytes: int = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """A program that uses the JSON lines protocol."""

    argv: tuple[str, ...]


class ListArgument(NamedTuple):
    """A mapped task's list for an argument; `elements` is None if another task returns it."""

    argument: str | None
    elements: tuple[object, ...] | None


class GroupItem(Placeholder):
    """A placeholder in an argument for what a mapped group is given for its index."""

    __slots__ = ("group_lists", "item_default", "item_name")

    def __init__(self, lists: tuple[ListArgument, ...], name: str, default: object) -> None:
        self.group_lists, self.item_name, self.item_default = lists, name, default

    def __repr__(self) -> str:
        return f"<element for {self.item_name}>"

    def _known_when(self) -> str:
        return f"argument {self.item_name!r} of a mapped group is known only when its tasks run"

    def __getitem__(self, key: object) -> Never:
        self._unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTask:
    """A task with the arguments of its call in the DAG. `function` is None for a task that is not a Python function.

    `template_inputs` are the `inputs` of its templates. `polls`: it is a sensor's condition, called repeatedly. `report` runs the
    whole attempt in place of a function, and returns its report: for DAG files that are not Evertick's own.
    """

    name: str
    kind: TaskKind = TaskKind.PYTHON
    function: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    is_async: bool = False
    wants_context: bool = False
    command: str | None = None
    env: Mapping[str, object] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    call: HttpCall | ProgramCall | None = None
    is_template: bool = False
    unsafe_template: bool = False
    schedule: ScheduleSpec | None = None
    template_inputs: Mapping[str, object] = field(default_factory=dict)
    lists: tuple[ListArgument, ...] = ()
    polls: bool = False
    report: Callable[..., Any] | None = None

    def call_arguments(self, inputs: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments for `function`. An upstream task without a result (skipped, failed) gives None.

        A parameter named `context` receives the current context, which must be entered before.
        """
        args = tuple(_filled(value, inputs) for value in self.args) if self.args else ()
        kwargs = {name: _filled(value, inputs) for name, value in self.kwargs.items()} if self.kwargs else {}
        if self.lists:
            kwargs.update(_of_instance(self.name, self.lists, inputs[ITEM]))
        if self.wants_context:
            kwargs["context"] = current_context()
        return args, kwargs

    def template_names(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """The names that the task's templates can use. The context must be entered."""
        context = current_context()
        values = {name: _filled(value, inputs) for name, value in self.template_inputs.items()}
        known = {name: getattr(context, name) for name in CONTEXT_NAMES}
        return {**known, "inputs": values}

    def environment(self, inputs: Mapping[str, object]) -> dict[str, str]:
        """The variables that a shell task adds to its environment. Text is unchanged, other values become JSON."""
        values = {name: _filled(value, inputs) for name, value in self.env.items()}
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledDag:
    """A compiled DAG: its published spec, and the code of each of its tasks."""

    spec: DagSpec
    tasks: Mapping[str, BoundTask]
    # The DAGs that call its callbacks; they are published with it.
    callbacks: tuple[CompiledDag, ...] = ()
    # By schedule: what computes its instants around now, when its file is loaded to be published.
    timetables: Mapping[str, Callable[[datetime], list[Instant]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    def test(self, **options: Unpack[LocalRunOptions]) -> LocalRun:
        """Run the whole DAG in this process, without a server; see `sdk/local_run.py`."""
        from evertick.sdk.local_run import run_locally

        return run_locally(self.spec, self.tasks, options)


def find_task(dags: Mapping[str, CompiledDag], dag_name: str, task_name: str) -> BoundTask:
    """The task by its published name."""
    if (dag := dags.get(dag_name)) is None:
        raise NotFound(f"the DAG file has no DAG {dag_name!r}; it has: {', '.join(sorted(dags)) or 'none'}.")
    if (bound := dag.tasks.get(task_name)) is None:
        raise NotFound(
            f"DAG {dag_name!r} has no task {task_name!r}. Does its file build the same tasks at every import?"
        )
    return bound


def _of_instance(name: str, lists: tuple[ListArgument, ...], item: object) -> dict[str, object]:
    """The arguments of one instance: for each list either the element itself or, for a list in the code, its index."""
    found: dict[str, object] = {}
    assert isinstance(item, list)
    for given, (argument, elements) in zip(item, lists, strict=True):
        if elements is not None and given >= len(elements):
            raise UserError(
                f"{name!r} had more elements to expand over when its DAG was published. "
                "Does its file build the same lists at every import?"
            )
        value = given if elements is None else elements[given]
        found.update(value if argument is None else {argument: value})
    return found


def _filled(value: object, inputs: Mapping[str, object]) -> object:
    """Only plain containers can hold results; any other object is passed unchanged."""
    if isinstance(value, ResultOf):
        return part_of(value.task, inputs.get(value.task), value.path)
    if isinstance(value, ParamRef):
        return current_context().params.get(value.param_name)
    if isinstance(value, GroupItem):
        items = _of_instance(value.item_name, value.group_lists, inputs[ITEM])
        return items.get(value.item_name, value.item_default)
    if type(value) is list:
        return [_filled(each, inputs) for each in value]
    if type(value) is tuple:
        return tuple(_filled(each, inputs) for each in value)
    if type(value) is dict:
        return {name: _filled(each, inputs) for name, each in value.items()}
    return value
