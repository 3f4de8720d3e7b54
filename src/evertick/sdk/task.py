"""Tasks from functions, `shell`, and `.expand(...)`: the callables that become tasks when a DAG's function calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, Unpack, overload

from evertick.domain.dags.mapping import DEFAULT_INSTANCES, MapHow, MappedList
from evertick.domain.dags.mapping import Mapping as TaskMapping
from evertick.domain.dags.spec import TaskKind
from evertick.sdk.builder import TaskGroup, TaskRef, current_builder
from evertick.sdk.options import TaskOptions, check_options, task_spec
from evertick.sdk.runtime import BoundTask, ListArgument, Placeholder, ResultOf
from evertick.sdk.source_location import refused
from evertick.sdk.templates import check_template, is_template

_MAX_DOC = 10_000


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])


class Unannotated:
    """Never a result. Only `Any`, the result of a function without annotations, fits it: its overload comes first."""


class Expandable(Generic[R]):
    """What has instances: a task, also with some arguments given."""

    @overload
    def expand(self: Expandable[Unannotated], **lists: object) -> Any: ...
    @overload
    def expand(self: Expandable[TaskRef], **lists: object) -> TaskRef: ...  # type: ignore[overload-overlap]
    @overload
    def expand(self, **lists: object) -> list[R]: ...
    def expand(self, **lists: object) -> Any:
        """One instance per element; with several lists, one per combination: the last list varies fastest."""
        return self._given().over_lists(MapHow.PRODUCT, lists)

    @overload
    def expand_zip(self: Expandable[Unannotated], **lists: object) -> Any: ...
    @overload
    def expand_zip(self: Expandable[TaskRef], **lists: object) -> TaskRef: ...  # type: ignore[overload-overlap]
    @overload
    def expand_zip(self, **lists: object) -> list[R]: ...
    def expand_zip(self, **lists: object) -> Any:
        """One instance per position of the lists, which must have equal length."""
        return self._given().over_lists(MapHow.ZIP, lists)

    @overload
    def expand_kwargs(self: Expandable[Unannotated], rows: object, /) -> Any: ...
    @overload
    def expand_kwargs(self: Expandable[TaskRef], rows: object, /) -> TaskRef: ...  # type: ignore[overload-overlap]
    @overload
    def expand_kwargs(self, rows: object, /) -> list[R]: ...
    def expand_kwargs(self, rows: object, /) -> Any:
        """One instance per dict of a list, called with the dict as its arguments."""
        return self._given().over_dicts(rows)

    def _given(self) -> _Expanding:
        raise NotImplementedError


class _Expanding(Protocol):
    """A task or a group with the arguments that all instances share."""

    def over_lists(self, how: MapHow, lists: Mapping[str, object]) -> Any: ...

    def over_dicts(self, rows: object) -> Any: ...


class Task(Expandable[R], Generic[P, R, F]):
    """A function that becomes a task wherever a DAG calls it. `function` is the plain one, for tests and for other tasks.

    For type checkers, a call takes the function's own parameters and returns its result, so that what is passed on is checked.
    Without a result it returns what it is, a `TaskRef` (docs/decisions/0058-types-of-results.md).
    """

    def __init__(self, function: F, options: TaskOptions, role: Mapping[str, object] | None = None) -> None:
        if not callable(function):
            raise refused(f"@task takes a function, not {function!r}; options need names, as in @task(retries=3).")
        self.function: F = function
        self.options = options
        self.role: Mapping[str, Any] = role or {}
        self.name = options.get("name", getattr(function, "__name__", "task"))
        # `@task(name=...)` names a function that may be called several times, `.override(name=...)` one call of it.
        self.names_one_call = False
        self.signature = inspect.signature(function)
        names = list(self.signature.parameters)
        self._context_place = names.index("context") if "context" in names else None
        self.is_async = inspect.iscoroutinefunction(function)
        self.__doc__ = inspect.getdoc(function)
        # A wrong option is reported where it is written, not where the task is called.
        self.outputs = task_spec(self.name, options).outputs
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise refused(f"task {self.name!r} is a generator; return a list instead of using `yield`.")
        if any(each.kind is each.VAR_KEYWORD and each.name == "context" for each in self.signature.parameters.values()):
            raise refused(f"task {self.name!r} takes **context: declare the argument `context: TaskContext` instead.")

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def override(self, **options: Unpack[TaskOptions]) -> Task[P, R, F]:
        """The same function with other options: `load.override(name="load_orders", retries=5)(rows)`."""
        changed: Task[P, R, F] = Task(self.function, {**self.options, **options}, self.role)
        changed.names_one_call = self.names_one_call or "name" in options
        return changed

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.place(args, kwargs, None)  # type: ignore[return-value]

    def partial(self, *args: object, **kwargs: object) -> Partial[R]:
        """The arguments shared by all instances: `load.partial(table="x").expand(row=rows)`."""
        return Partial(self, args, kwargs)

    def _given(self) -> Partial[R]:
        return Partial(self, (), {})

    def place(self, args: tuple[object, ...], kwargs: Mapping[str, object], expansion: Expansion | None) -> TaskRef:
        """Add a call of the function to the DAG whose function is running."""
        builder = current_builder(
            f"task {self.name!r}", f", or call {self.name}.function(...) to run the plain function here"
        )
        # Not passed by the caller: filled in when the task runs.
        wants_context = self._context_place is not None and len(args) <= self._context_place and "context" not in kwargs
        if expansion is None:
            self.check_arguments(args, {**kwargs, **({"context": None} if wants_context else {})})
        inputs: dict[str, TaskRef] = {}
        name = builder.claim_name(self.name, numbered=not self.names_one_call)
        bound = BoundTask(
            name=name,
            function=self.function,
            args=tuple(marked(value, inputs) for value in args),
            kwargs={key: marked(value, inputs) for key, value in kwargs.items()},
            is_async=self.is_async,
            wants_context=wants_context,
            outputs=self.outputs,
            lists=expansion.bound() if expansion else (),
            polls="wait" in self.role,
        )
        options = {**builder.task_defaults, **self.options}
        ref = builder.add(
            bound,
            options,
            inputs,
            is_async=self.is_async,
            mapping=expansion.published(options.get("max_instances", DEFAULT_INSTANCES)) if expansion else None,  # type: ignore[arg-type]
            doc=self.__doc__[:_MAX_DOC] if self.__doc__ else None,
            **self.role,
        )
        for upstream in expansion.sources if expansion else []:
            builder.connect(upstream, ref)
        return ref

    def check_arguments(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], *, is_partial: bool = False
    ) -> None:
        try:
            (self.signature.bind_partial if is_partial else self.signature.bind)(*args, **kwargs)
        except TypeError as error:
            raise refused(f"wrong arguments for task {self.name!r}: {error}.{self._context_advice(kwargs)}") from None

    def _context_advice(self, given: Mapping[str, object]) -> str:
        """For parameters that Airflow would fill from its context."""
        from evertick.sdk.airflow_names import context_hint

        hints = {name: context_hint(name) for name in self.signature.parameters if name not in given}
        return "".join(f" For {name!r}, {hint}." for name, hint in hints.items() if hint)

    def __rshift__(self, other: object) -> object:
        raise refused(f"task {self.name!r} must be called before it takes dependencies: `{self.name}() >> ...`.")

    __lshift__ = __rrshift__ = __rlshift__ = __rshift__


def shell(
    name_or_command: str,
    command: str | None = None,
    /,
    *,
    env: Mapping[str, object] | None = None,
    inputs: Mapping[str, object] | None = None,
    template: bool = True,
    unsafe_template: bool = False,
    **options: Unpack[TaskOptions],
) -> TaskRef:
    """A task that runs a shell command: `shell("archive", "tar czf out.tgz out")`, or without a name.

    `env` adds variables; a value may be another task's result, which arrives as text or as JSON. The command may be a template:
    `{{ params.table }}`, `{{ inputs.rows }}`. Its values are passed as quoted variables too, and a command in which one could
    become code is refused. `unsafe_template` disables this check: then a parameter can run any command on the runner.
    """
    given: str | None = name_or_command
    if command is None:
        command, given = name_or_command, options.get("name")
    owner = f"shell task {given or command!r}"
    check_options(owner, options, shell, TaskOptions)
    builder = current_builder(owner)
    if wrong := [name for name in ("retry_on", "never_on", "outputs") if name in options]:
        raise refused(f"{owner}: {wrong[0]} is for Python tasks; a command has only an exit code.")
    if not isinstance(command, str) or not command.strip():
        raise refused("a shell task needs a command, as in shell('list', 'ls -l').")
    name = builder.claim_name(given or "shell", numbered=given is None)
    owner = f"shell task {name!r}"
    refs: dict[str, TaskRef] = {}
    settings = {**builder.task_defaults, **options}
    bound = BoundTask(
        name=name,
        kind=TaskKind.SHELL,
        command=command,
        env=marked_values(owner, "env", env, refs),
        is_template=template and is_template(command),
        unsafe_template=unsafe_template,
        template_inputs=marked_values(owner, "inputs", inputs, refs),
    )
    if bound.is_template:
        known = template_names(bound.template_inputs, settings)
        builder.note_params(name, check_template(owner, "its command", command, known))
        if not unsafe_template:
            _check_shell(owner, command)
    return builder.add(bound, settings, refs, command=command, unsafe_template=unsafe_template)


def _check_shell(owner: str, command: str) -> None:
    from evertick.sdk.shell_templates import check_shell_template

    check_shell_template(owner, command)


def template_names(inputs: Collection[str], options: Mapping[str, object]) -> dict[str, Collection[str]]:
    """The names that a task's templates can use, by kind."""
    given: dict[str, Collection[str]] = {"inputs": inputs}
    for kind in ("secrets", "connections", "variables"):
        listed = options.get(kind, ())
        given[kind] = [str(each) for each in listed] if isinstance(listed, Iterable) else ()
    return given


def marked_values(
    owner: str, option: str, values: Mapping[str, object] | None, inputs: dict[str, TaskRef]
) -> dict[str, object]:
    """The values of `env` or `inputs`, marked; refuses names that no variable can have."""
    if values is not None and not isinstance(values, Mapping):
        raise refused(f"{owner}: {option} must be a dict of names and values, not {values!r}.")
    for key in values or {}:
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise refused(f"{owner}: {option} has the key {key!r}, which is not an allowed name.")
    return {key: marked(value, inputs) for key, value in (values or {}).items()}


def marked(value: object, inputs: dict[str, TaskRef]) -> object:
    """The argument with every future result replaced by its task's name; `inputs` collects the results found."""
    if isinstance(value, TaskRef):
        inputs[value.task_name] = value
        return ResultOf(value.task_name, value.result_path)
    if isinstance(value, Placeholder):
        return value
    if type(value) is list:
        return [marked(each, inputs) for each in value]
    if type(value) is tuple:
        return tuple(marked(each, inputs) for each in value)
    if type(value) is dict:
        return {key: marked(each, inputs) for key, each in value.items()}
    if isinstance(value, Task | TaskGroup | Partial):
        raise refused(
            f"{value!r} cannot be passed to a task; pass the result of calling a task, as in load(extract())."
        )
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        each_value = value.values() if isinstance(value, Mapping) else value
        if any(isinstance(each, TaskRef) for each in each_value):
            raise refused(f"a {type(value).__name__} cannot contain results of tasks; use a plain list, tuple or dict.")
    return value


_EXAMPLE = "as in .expand(x=[1, 2, 3]) or .expand(x=other_task())"


class Expansion(NamedTuple):
    """The lists to expand over, by argument. A single list of dicts with all arguments has no argument name."""

    how: MapHow
    lists: Mapping[str | None, object]

    @property
    def sources(self) -> list[TaskRef]:
        return [each for each in self.lists.values() if isinstance(each, TaskRef)]

    def published(self, most: int) -> TaskMapping:
        lists = (
            MappedList(argument=name, task=each.task_name)
            if isinstance(each, TaskRef)
            else MappedList(argument=name, length=len(each))  # type: ignore[arg-type]
            for name, each in self.lists.items()
        )
        return TaskMapping(how=self.how, lists=tuple(lists), most=most)

    def bound(self) -> tuple[ListArgument, ...]:
        return tuple(
            ListArgument(name, None if isinstance(each, TaskRef) else tuple(each))  # type: ignore[arg-type]
            for name, each in self.lists.items()
        )


class Partial(Expandable[R]):
    """A task with the arguments shared by all its instances: `load.partial(table="x").expand(row=rows)`."""

    def __init__(self, task: Task[..., R, Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._task, self._args, self._kwargs = task, args, kwargs
        task.check_arguments(args, kwargs, is_partial=True)

    def __repr__(self) -> str:
        return f"<task {self._task.name}, not expanded yet>"

    def _given(self) -> Partial[R]:
        return self

    def over_dicts(self, rows: object) -> TaskRef:
        checked = checked_rows(f"task {self._task.name!r}", rows, self._check)
        return self._task.place(self._args, self._kwargs, Expansion(MapHow.KWARGS, {None: checked}))

    def over_lists(self, how: MapHow, lists: Mapping[str, object]) -> TaskRef:
        checked = checked_lists(f"task {self._task.name!r}", lists)
        self._check(lists)
        return self._task.place(self._args, self._kwargs, Expansion(how, checked))

    def _check(self, more: Mapping[str, object]) -> None:
        if twice := sorted(self._kwargs.keys() & more.keys()):
            raise refused(f"task {self._task.name!r} gets argument {twice[0]!r} twice: by partial and by expand.")
        wanted = {"context": None} if "context" in self._task.signature.parameters else {}
        self._task.check_arguments(self._args, {**wanted, **self._kwargs, **more})


def checked_rows(owner: str, rows: object, check: Callable[[Mapping[str, object]], None]) -> TaskRef | list[object]:
    """What `expand_kwargs` takes: dicts of arguments that pass `check`, or the result of a task."""
    checked = _checked_list(owner, "expand_kwargs", rows)
    for row in () if isinstance(checked, TaskRef) else checked:
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise refused(f"{owner}: expand_kwargs takes a list of dicts of arguments, but it contains {row!r}.")
        check(row)
    return checked


def checked_lists(owner: str, lists: Mapping[str, object]) -> dict[str | None, object]:
    if not lists:
        raise refused(f"{owner} expands over nothing: give it at least one list, {_EXAMPLE}.")
    return {name: _checked_list(owner, name, each) for name, each in lists.items()}


def _checked_list(owner: str, argument: str, given: object) -> TaskRef | list[object]:
    if isinstance(given, TaskRef):
        if given.result_path:
            raise refused(f"{owner}: {argument} is a part of a result; let a task return the list itself.")
        return given
    if isinstance(given, Mapping):
        raise refused(f"{owner}: {argument} is a dict; expand over list({argument}.items()) or its keys or values.")
    if not isinstance(given, list | tuple | range):
        raise refused(f"{owner}: {argument} must be a list or the result of a task, not {given!r}; {_EXAMPLE}.")
    if any(isinstance(each, TaskRef) for each in given):
        raise refused(
            f"{owner}: {argument} is a list that contains results of tasks; let one task return the whole list."
        )
    return list(given)
