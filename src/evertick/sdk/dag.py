"""`@dag`: a function whose body calls tasks. It runs once, when its file is loaded, and is compiled to a spec.

The DAGs of a file are collected while it loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypedDict, Unpack, overload

from evertick.domain.dags.dag_files import is_airflow_file
from evertick.domain.dags.findings import Finding
from evertick.domain.dags.params import Param as DeclaredParam
from evertick.domain.dags.params import as_json, declare_params
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.dags.validation import arrange, validate
from evertick.domain.errors import InvalidDag, UserError
from evertick.domain.executor_options import read_executor_options
from evertick.domain.notifications import RUN_EVENTS, callback_dag
from evertick.domain.schedules.calendars import CalendarSchedule
from evertick.domain.schedules.computed import Instant
from evertick.domain.schedules.dependencies import Condition, Source
from evertick.domain.schedules.events import EventTrigger
from evertick.domain.schedules.misfire import MOST_MISSED, MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.partition_keys import Partitions
from evertick.domain.schedules.spec import parse_schedule, with_partitions
from evertick.domain.schedules.time_zones import find_zone
from evertick.sdk.builder import DagBuilder, building
from evertick.sdk.notify import NOTICE_OPTIONS, Callback, Recipients
from evertick.sdk.options import (
    Seconds,
    TaskOptions,
    check_names,
    read_choice,
    read_count,
    read_dict,
    read_flag,
    read_length,
    read_list,
    read_notices,
    read_seconds,
    read_text,
    read_whole,
    task_spec,
)
from evertick.sdk.params import params_of
from evertick.sdk.runtime import CompiledDag, ParamRef
from evertick.sdk.source_location import module_file, refused
from evertick.sdk.task import P, Task
from evertick.sdk.timetables import Timetable, computed_fields, instants, is_timetable

if TYPE_CHECKING:
    from evertick.sdk.local_run import LocalRun, LocalRunOptions


# The options of a single schedule, which the DAG can also set for all its schedules.
_WHEN = ("timezone", "start_at", "end_at", "anchor_at", "jitter", "catchup", "partitions")


_RULES: dict[str, tuple[str, Callable[[object], object]]] = {
    "misfire": ("misfire", read_choice(MisfirePolicy)),
    "catchup_window": ("catchup_window_seconds", read_seconds),
    "catchup_limit": ("catchup_limit", read_whole(1, MOST_MISSED)),
    "overlap": ("overlap", read_choice(OverlapPolicy)),
    "start_within": ("start_within_seconds", read_length),
    "finish_within": ("finish_within_seconds", read_length),
}


_SCHEDULE_FIELDS = ("schedule", "params", *_WHEN, *_RULES)


Schedule: TypeAlias = (
    str
    | timedelta
    | datetime
    | Collection[str | datetime]
    | Mapping[str, object]
    | Condition
    | Source
    | EventTrigger
    | CalendarSchedule
    | Timetable
)


class DagOptions(TypedDict, total=False):
    """The options of `@dag(...)`. `executor_options` are merged with those of each task.

    `schedule` is a cron expression, "@every 5s", a timedelta, a datetime, a list of datetimes, `after(...)`, `on_event(...)`, or a
    function that returns the instant after a given one; `schedules` names
    several, each such a value or a dict with one (`{"schedule": ..., "params": ...}`), which may have its own time zone, bounds,
    jitter, catchup, partitions and policies (misfire, catchup_window, catchup_limit, overlap, start_within, finish_within).
    `partitions=daily()`: each run of a schedule with times is for a partition, see `context.partition_key`. `task_defaults` are
    options for every task that does not set them.
    """

    name: str
    description: str
    owner: str
    schedule: Schedule | None
    schedules: Mapping[str, Schedule | Mapping[str, object]]
    timezone: str
    start_at: datetime | str
    end_at: datetime | str
    anchor_at: datetime | str
    jitter: Seconds
    catchup: bool
    partitions: Partitions
    misfire: MisfirePolicy | Literal["latest", "all", "skip"]
    catchup_window: Seconds
    catchup_limit: int
    overlap: OverlapPolicy | Literal["allow", "skip", "queue_one", "queue_all", "cancel"]
    start_within: Seconds
    finish_within: Seconds
    params: Mapping[str, object] | type
    tags: Iterable[str]
    max_active_runs: int
    max_active_tasks: int
    run_timeout: Seconds
    retries: int
    paused: bool
    executor_options: Mapping[str, object]
    on_success: Recipients
    on_failure: Recipients
    on_retry: Recipients
    on_deadline: Recipients
    task_defaults: TaskOptions


@dataclass(slots=True)
class Collected:
    """The DAGs that one import created, with the file whose top-level code was running."""

    definitions: list[tuple[str | None, DagDefinition[...]]] = field(default_factory=list)
    built: list[tuple[str | None, DagDefinition[...], CompiledDag]] = field(default_factory=list)


_collecting: ContextVar[Collected | None] = ContextVar("evertick_collection", default=None)


@contextmanager
def collecting() -> Iterator[Collected]:
    """Record every `@dag` that is declared or called within the block."""
    collection = Collected()
    token = _collecting.set(collection)
    try:
        yield collection
    finally:
        _collecting.reset(token)


class DagDefinition(Generic[P]):
    """The result of `@dag` on a function. Calling it returns the DAG; the loader calls it if the file does not."""

    def __init__(self, function: Callable[P, object], options: DagOptions) -> None:
        if not callable(function):
            raise refused(
                f"@dag takes a function, not {function!r}; options need names, as in @dag(schedule='@daily')."
            )
        self.function = function
        self.name = options.get("name", getattr(function, "__name__", "dag"))
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise refused(f"DAG {self.name!r} must be a plain function; only its tasks can be async.")
        self.param_names, declared = params_of(function, options.get("params"))
        self.frame = _read_options(self.name, function, {**options, "params": declared} if declared else options)
        self.task_defaults: Mapping[str, object] = self.frame.pop("task_defaults", {})
        several: Mapping[str, Any] = options.get("schedules") or {"default": options.get("schedule")}
        self.functions = {
            key: raw["schedule"] if isinstance(raw, Mapping) and "schedule" in raw else raw
            for key, raw in several.items()
        }
        self.notices = {option: value for option, value in options.items() if option in NOTICE_OPTIONS}
        if (collection := _collecting.get()) is not None:
            collection.definitions.append((module_file(), self))

    def __repr__(self) -> str:
        return f"<dag {self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> CompiledDag:
        if self.name == "<lambda>":
            raise self._at_definition(
                "a lambda has no name for its DAG: pass one, as in dag(name='nightly')(lambda: load())."
            )
        builder = DagBuilder(self.name, self.task_defaults)
        builder.note_callbacks(self.notices)
        with building(builder):
            self.function(*args, **self._with_params(args, kwargs))  # type: ignore[arg-type]
        groups = tuple(builder.retried_groups)
        spec = DagSpec(
            **self.frame,
            tasks=tuple(builder.specs),
            edges=tuple(sorted(builder.edges)),
            groups=groups,
            mapped_groups=tuple(builder.mapped_groups),
            assets=tuple(builder.assets[name] for name in sorted(builder.assets)),
        )
        self._check_template_params(builder, {param.name for param in spec.params})
        try:
            validate(spec)
        except InvalidDag as error:
            raise self._at_definition(error.message) from None
        one = spec.schedules[0].spec if len(spec.schedules) == 1 else None
        only = None if one is None or one.after or one.event else one
        bound = [replace(each, schedule=only) if only is not None else each for each in builder.bound]
        called = tuple(_called_by(self.name, each) for each in builder.callbacks.values())
        made = {each.name: each for each in bound}
        dag = CompiledDag(spec=arrange(spec), tasks=made, callbacks=called, timetables=self._timetables())
        if (collection := _collecting.get()) is not None:
            collection.built.append((module_file(), self, dag))
        return dag

    def test(self, **options: Unpack[LocalRunOptions]) -> LocalRun:
        """Run the DAG in this process, without a server: `print(nightly.test(params={"rows": 3}).state)`."""
        return self.build().test(**options)

    def _check_template_params(self, builder: DagBuilder, declared: set[str]) -> None:
        for name, task in builder.template_params.items():
            if name not in declared:
                known = f"it has: {', '.join(sorted(declared))}" if declared else f"declare it as {name}=Param(...)"
                raise self._at_definition(
                    f"DAG {self.name!r}: a template of task {task!r} uses params.{name}, which the DAG does not declare; {known}."
                )

    def _with_params(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        """The function's arguments: a run parameter is represented by a reference."""
        if not self.param_names:
            return kwargs
        given = inspect.signature(self.function).bind_partial(*args, **kwargs).arguments
        if fixed := [name for name in self.param_names if name in given]:
            raise refused(f"DAG {self.name!r}: {fixed[0]!r} is a parameter of its runs and cannot be set here.")
        return {**kwargs, **{name: ParamRef(name) for name in self.param_names}}

    def _timetables(self) -> dict[str, Callable[[datetime], list[Instant]]]:
        found: dict[str, Callable[[datetime], list[Instant]]] = {}
        for each in self.frame["schedules"]:
            raw = self.functions.get(each.name)
            if is_timetable(raw):
                found[each.name] = partial(instants, raw, each.spec)
        return found

    def build(self) -> CompiledDag:
        """Compile a DAG that its file declares but never calls."""
        try:
            inspect.signature(self.function).bind()
        except TypeError as error:
            raise self._at_definition(
                f"DAG {self.name!r}: {error}; call {self.name}(...) in the file, or give its arguments defaults."
            ) from None
        return self()  # type: ignore[call-arg]

    def _at_definition(self, message: str) -> InvalidDag:
        code = getattr(self.function, "__code__", None)
        return InvalidDag(message, file=code.co_filename, line=code.co_firstlineno) if code else InvalidDag(message)


class _MakeDag(Protocol):
    """`@dag(...)` on a function."""

    def __call__(self, function: Callable[P, object], /) -> DagDefinition[P]: ...


@overload
def dag(function: Callable[P, object], /) -> DagDefinition[P]: ...


@overload
def dag(**options: Unpack[DagOptions]) -> _MakeDag: ...


def dag(function: Callable[..., object] | None = None, /, **options: Unpack[DagOptions]) -> Any:
    """Make a function a DAG: `@dag`, or `@dag(schedule="0 6 * * *", timezone="Europe/Berlin")`."""
    if function is not None:
        return DagDefinition(function, options)
    return lambda decorated: DagDefinition(decorated, options)


def _read_options(name: str, function: Callable[..., object], options: Mapping[str, object]) -> dict[str, Any]:
    """The fields of the spec that do not depend on its tasks, each checked where the decorator is."""
    owner = f"DAG {name!r}"
    check_names(owner, options, DagOptions.__annotations__)
    fields: dict[str, Any] = {"name": name, "description": inspect.getdoc(function)}
    for option, (target, read) in _READERS.items():
        if (value := options.get(option)) is not None:
            try:
                fields[target] = read(value)
            except (TypeError, ValueError) as error:
                raise refused(f"{owner}: {option} is {value!r:.200}, but {error}.") from None
            except UserError as error:
                raise refused(f"{owner}: {error}") from None
    try:
        fields["schedules"] = tuple(_schedules(options))
    except (TypeError, ValueError, UserError) as error:
        raise refused(f"{owner}: {error}") from None
    notices = [rule for event in RUN_EVENTS for rule in read_notices(owner, f"on_{event}", options.get(f"on_{event}"))]
    return {**fields, "notices": tuple(notices)}


_EVENT = DeclaredParam({}, type=dict)


def _called_by(dag: str, callback: Callback) -> CompiledDag:
    """The DAG whose runs call a callback: user code runs on runners, with logs and a time limit like any other."""
    task: Task[..., Any, Any] = Task(callback.function, {**callback.options, "name": callback.name})  # type: ignore[typeddict-item]

    def call_back(event: object = _EVENT) -> None:
        task(event)

    call_back.__doc__ = f"Calls {callback.name} when something happens in {dag}."
    # Collected apart: it is published with its DAG, whether the file or the loader builds that DAG.
    with collecting():
        return DagDefinition(call_back, {"name": callback_dag(dag, callback.name), "tags": ["callback"]})()


def _schedules(options: Mapping[str, object]) -> Iterator[NamedSchedule]:
    one, several = options.get("schedule"), options.get("schedules")
    if one is not None and several is not None:
        raise ValueError("use `schedule` for one or `schedules` for several, not both.")
    named = several if several is not None else {} if one is None else {"default": one}
    if not isinstance(named, Mapping):
        raise TypeError("`schedules` must be a dict of schedules by name, as in {'nightly': '0 2 * * *'}.")
    shared = {key: options[key] for key in _WHEN if key in options}
    for name, raw in sorted(named.items()):
        yield _schedule(name, raw if isinstance(raw, Mapping) and "schedule" in raw else {"schedule": raw}, shared)


def _schedule(name: str, own: Mapping[str, object], shared: Mapping[str, object]) -> NamedSchedule:
    check_names(f"schedule {name!r}", own, _SCHEDULE_FIELDS)
    params = own.get("params", {})
    if not isinstance(params, Mapping):
        raise TypeError(f"schedule {name!r}: params must be a dict, not {params!r}.")
    # The DAG's options about times apply only to schedules that have times.
    inherited = {} if isinstance(own["schedule"], Condition | Source | EventTrigger) else shared
    when: dict[str, Any] = {**inherited, **{key: own[key] for key in own if key in _WHEN}}
    rules: dict[str, Any] = {}
    try:
        if (jitter := when.pop("jitter", None)) is not None:
            when["jitter_seconds"] = read_seconds(jitter)
        if (partitions := when.pop("partitions", None)) is not None:
            partitions = _read_partitions(partitions)
        for option, (target, read) in _RULES.items():
            if option in own:
                rules[target] = read(own[option])
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule {name!r}: {error}.") from None
    raw = own["schedule"]
    spec = parse_schedule(computed_fields(raw) if is_timetable(raw) else raw, **when)
    spec = spec if partitions is None else with_partitions(spec, partitions)
    named = {key: as_json(value) for key, value in params.items()}
    return NamedSchedule(name=name, spec=spec, params=named, **rules)


def _read_partitions(value: object) -> str:
    if not isinstance(value, Partitions) or value.keys:
        raise TypeError(f"partitions is {value!r:.60}: write hourly(), daily(), weekly() or monthly()")
    return value.to_text()


def _read_task_defaults(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or "name" in value:
        raise TypeError("it must be a dict of task options without a name")
    task_spec("task_defaults", value)
    return value


def _read_zone(value: object) -> str:
    find_zone(name := read_text(value))
    return name


def _read_tags(value: object) -> tuple[str, ...]:
    return tuple(sorted({read_text(tag) for tag in read_list(value, "a list of texts")}))


def _read_params(value: object) -> object:
    return declare_params(read_dict(value, "a dict of defaults or Param(...) by name"))


_READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "description": ("description", read_text),
    "owner": ("owner", read_text),
    "timezone": ("timezone", _read_zone),
    **_RULES,
    "params": ("params", _read_params),
    "tags": ("tags", _read_tags),
    "max_active_runs": ("max_active_runs", read_count),
    "max_active_tasks": ("max_active_tasks", read_count),
    "run_timeout": ("run_timeout_seconds", read_seconds),
    "retries": ("retries", read_count),
    "paused": ("starts_paused", read_flag),
    "executor_options": ("executor_options", read_executor_options),
    "task_defaults": ("task_defaults", _read_task_defaults),
}


class Rehearsal(Protocol):
    """Goes the way of an attempt without running a task of the file: once when called, and often enough for a process that
    forks others in `warm_up`."""

    def __call__(self) -> None: ...

    def warm_up(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DagFile:
    """The DAGs of a file by name, and what Evertick does otherwise than the engine that the file was written for."""

    dags: Mapping[str, CompiledDag]
    findings: tuple[Finding, ...] = ()
    rehearsal: Rehearsal | None = None


def load_dag_file(folder: Path, file: str) -> DagFile:
    """The DAGs of a file, which may be one of Airflow: without Airflow in this interpreter, its import is the error."""
    path = folder / file
    if path.is_file() and is_airflow_file(path.read_bytes()) and importlib.util.find_spec("airflow") is not None:
        # Imports Airflow, which Evertick's own processes never do.
        loaded: DagFile = importlib.import_module("evertick.airflow.loader").load_dag_file(folder, file)
        return loaded
    return DagFile(dags=load_dags(folder, file))


def load_dags(folder: Path, file: str) -> Mapping[str, CompiledDag]:
    """The DAGs of `folder/file` by name, with `folder` first on the import path."""
    folder = folder.absolute()
    if not (folder / file).is_file():
        raise InvalidDag(f"there is no file {file} in {folder}.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with collecting() as collection:
        module_file = _import(folder, Path(file))
    dags: dict[str, CompiledDag] = {}
    for dag in _own_dags(collection, module_file):
        if dag.name in dags:
            raise InvalidDag(
                f"two DAGs are named {dag.name!r}; give one a different name with @dag(name=...).",
                file=module_file,
                line=1,
            )
        dags[dag.name] = dag
    return dags


def _own_dags(collection: Collected, module_file: str) -> list[CompiledDag]:
    built = [dag for owner, _, dag in collection.built if owner == module_file]
    called = {id(definition) for _, definition, _ in collection.built}
    uncalled = [
        definition
        for owner, definition in collection.definitions
        if owner == module_file and id(definition) not in called
    ]
    found = built + [definition.build() for definition in uncalled]
    return [each for dag in found for each in (dag, *dag.callbacks)]


def _import(folder: Path, file: Path) -> str:
    """Import by the module's own name, so that other modules of the folder see the same module; returns its file."""
    path = folder / file
    parts = file.with_suffix("").parts
    name = ".".join(parts)
    top = parts[0]
    if all(part.isidentifier() for part in parts) and top not in sys.modules and top not in sys.stdlib_module_names:
        module = importlib.import_module(name)
        if module.__file__ is not None and Path(module.__file__) == path:
            return module.__file__
    # The name is taken (`json.py`) or cannot be imported (`my-dag.py`): use any other name.
    spec = importlib.util.spec_from_file_location(f"evertick_dag_file_{name}", path)
    if spec is None or spec.loader is None:
        raise InvalidDag(f"{file} is not a Python file.", file=str(path), line=1)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return str(path)
