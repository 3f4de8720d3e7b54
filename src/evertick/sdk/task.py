"""Tasks from functions, and `shell`: the callables that become tasks when a DAG's function calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack, overload

from evertick.domain.dags.mapping import DEFAULT_INSTANCES
from evertick.domain.dags.spec import TaskKind
from evertick.sdk.builder import TaskGroup, TaskRef, current_builder
from evertick.sdk.mapping import Expansion, Partial
from evertick.sdk.options import TaskOptions, task_spec
from evertick.sdk.runtime import BoundTask, ResultOf
from evertick.sdk.source_location import refused
from evertick.sdk.templates import check_template, is_template

_MAX_DOC = 10_000


class Task:
    """A function that becomes a task wherever a DAG calls it. `function` is the plain one, for tests and for other tasks."""

    def __init__(
        self, function: Callable[..., object], options: TaskOptions, role: Mapping[str, object] | None = None
    ) -> None:
        if not callable(function):
            raise refused(f"@task takes a function, not {function!r}; options need names, as in @task(retries=3).")
        self.function = function
        self.options = options
        self.role: Mapping[str, Any] = role or {}
        self.name = options.get("name", getattr(function, "__name__", "task"))
        self.signature = inspect.signature(function)
        names = list(self.signature.parameters)
        self._context_place = names.index("context") if "context" in names else None
        self.is_async = inspect.iscoroutinefunction(function)
        self.__doc__ = inspect.getdoc(function)
        # A wrong option is reported where it is written, not where the task is called.
        self.outputs = task_spec(self.name, options).outputs
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise refused(f"task {self.name!r} is a generator; return a list instead of using `yield`.")

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def override(self, **options: Unpack[TaskOptions]) -> Task:
        """The same function with other options: `load.override(name="load_orders", retries=5)(rows)`."""
        return Task(self.function, {**self.options, **options}, self.role)

    def __call__(self, *args: object, **kwargs: object) -> TaskRef:
        return self._place(args, kwargs, None)

    def partial(self, *args: object, **kwargs: object) -> Partial:
        """The arguments shared by all instances: `load.partial(table="x").expand(row=rows)`."""
        return Partial(self.name, self.signature, self._place, args, kwargs)

    def expand(self, **lists: object) -> TaskRef:
        """One instance of this task per element, or per combination of several lists; see `Partial.expand`."""
        return self.partial().expand(**lists)

    def expand_zip(self, **lists: object) -> TaskRef:
        return self.partial().expand_zip(**lists)

    def expand_kwargs(self, rows: object, /) -> TaskRef:
        return self.partial().expand_kwargs(rows)

    def _place(self, args: tuple[object, ...], kwargs: Mapping[str, object], expansion: Expansion | None) -> TaskRef:
        draft = current_builder(
            f"task {self.name!r}", f", or call {self.name}.function(...) to run the plain function here"
        )
        # Not passed by the caller: filled in when the task runs.
        wants_context = self._context_place is not None and len(args) <= self._context_place and "context" not in kwargs
        if expansion is None:
            self._check_arguments(args, kwargs, wants_context=wants_context)
        inputs: dict[str, TaskRef] = {}
        name = draft.claim_name(self.name, numbered=True)
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
        options = {**draft.task_defaults, **self.options}
        draft.note_callbacks(options)
        spec = replace(
            task_spec(name, options),
            group=draft.group,
            is_async=self.is_async,
            inputs=tuple(inputs),
            mapping=expansion.published(options.get("max_instances", DEFAULT_INSTANCES)) if expansion else None,  # type: ignore[arg-type]
            doc=self.__doc__[:_MAX_DOC] if self.__doc__ else None,
            **self.role,
        )
        ref = draft.add(spec, replace(bound, retry=spec.retry))
        for upstream in [*inputs.values(), *(expansion.sources if expansion else [])]:
            draft.connect(upstream, ref)
        return ref

    def _check_arguments(self, args: tuple[object, ...], kwargs: Mapping[str, object], *, wants_context: bool) -> None:
        try:
            self.signature.bind(*args, **kwargs, **({"context": None} if wants_context else {}))
        except TypeError as error:
            raise refused(f"task {self.name!r} cannot be called like this: {error}.") from None

    def __rshift__(self, other: object) -> object:
        raise self._not_called()

    __lshift__ = __rrshift__ = __rlshift__ = __rshift__

    def _not_called(self) -> Exception:
        return refused(f"task {self.name!r} must be called before it takes dependencies: `{self.name}() >> ...`.")


@overload
def shell(
    command: str,
    /,
    *,
    env: Mapping[str, object] = ...,
    inputs: Mapping[str, object] = ...,
    template: bool = ...,
    **options: Unpack[TaskOptions],
) -> TaskRef: ...
@overload
def shell(
    name: str,
    command: str,
    /,
    *,
    env: Mapping[str, object] = ...,
    inputs: Mapping[str, object] = ...,
    template: bool = ...,
    **options: Unpack[TaskOptions],
) -> TaskRef: ...
def shell(
    first: str,
    second: str | None = None,
    /,
    *,
    env: Mapping[str, object] | None = None,
    inputs: Mapping[str, object] | None = None,
    template: bool = True,
    **options: Unpack[TaskOptions],
) -> TaskRef:
    """A task that runs a shell command: `shell("archive", "tar czf out.tgz out")`, or without a name.

    `env` adds variables; a value may be another task's result, which arrives as text or as JSON. The command may be a template:
    `{{ params.table }}`, `{{ inputs.rows }}`. Its values are passed as quoted variables too, and never become code.
    """
    command = first if second is None else second
    given = options.get("name") if second is None else first
    draft = current_builder(f"shell task {given or command!r}")
    if wrong := [name for name in ("retry_on", "never_on", "outputs") if name in options]:
        raise refused(
            f"shell task {given or command!r}: {wrong[0]} is for Python tasks; a command has only an exit code."
        )
    if not isinstance(command, str) or not command.strip():
        raise refused("a shell task needs a command, as in shell('list', 'ls -l').")
    name = draft.claim_name(given or "shell", numbered=given is None)
    refs: dict[str, TaskRef] = {}
    variables = {key: marked(value, refs) for key, value in checked_env(f"shell task {name!r}", "env", env).items()}
    known = {key: marked(value, refs) for key, value in checked_env(f"shell task {name!r}", "inputs", inputs).items()}
    if template:
        can_name = template_names(known, {**draft.task_defaults, **options})
        draft.note_params(name, check_template(f"shell task {name!r}", "its command", command, can_name))
    draft.note_callbacks({**draft.task_defaults, **options})
    spec = replace(
        task_spec(name, {**draft.task_defaults, **options}),
        kind=TaskKind.SHELL,
        group=draft.group,
        command=command,
        inputs=tuple(refs),
    )
    ref = draft.add(
        spec,
        BoundTask(
            name=name,
            kind=TaskKind.SHELL,
            command=command,
            env=variables,
            is_template=template and is_template(command),
            template_inputs=known,
        ),
    )
    for upstream in refs.values():
        draft.connect(upstream, ref)
    return ref


def template_names(inputs: Collection[str], options: Mapping[str, object]) -> dict[str, Collection[str]]:
    """The names that a task's templates can use, by kind."""
    given: dict[str, Collection[str]] = {"inputs": inputs}
    for kind in ("secrets", "connections", "variables"):
        listed = options.get(kind, ())
        given[kind] = [str(each) for each in listed] if isinstance(listed, Iterable) else ()
    return given


def checked_env(owner: str, option: str, env: Mapping[str, object] | None) -> Mapping[str, object]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise refused(f"{owner}: {option} must be a dict of names and values, not {env!r}.")
    for key in env:
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise refused(f"{owner}: {option} has the key {key!r}, which is not an allowed name.")
    return env


def marked(value: object, inputs: dict[str, TaskRef]) -> object:
    """The argument with every future result replaced by its task's name; `inputs` collects the results found."""
    if isinstance(value, TaskRef):
        inputs[value.name] = value
        return ResultOf(value.name, value.path)
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
