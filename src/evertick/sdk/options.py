"""The options of `@task` and `shell`: their names, their validation, and the fields of the spec that they set."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar, cast

from evertick.domain.attempt import Isolation
from evertick.domain.dags.gates import EXCLUSIVE, KEYED, GateKind, GateSpec, check_gates, paths_of, version_path
from evertick.domain.dags.spec import DatabaseOutagePolicy, TaskSpec
from evertick.domain.durations import parse_duration
from evertick.domain.errors import InvalidDag, UserError, did_you_mean
from evertick.domain.executor_options import read_executor_options
from evertick.domain.notifications import NotificationRuleSpec
from evertick.domain.retry import Backoff, RetryPolicy
from evertick.domain.schedules.dependencies import Source
from evertick.domain.states import TriggerRule
from evertick.domain.stored_values import ValueKind, check_name
from evertick.sdk.notify import NOTICE_OPTIONS, Recipients, callbacks_in, rule_specs
from evertick.sdk.source_location import refused

Seconds = float | timedelta | str
Exceptions = type[BaseException] | str | Iterable[type[BaseException] | str]
TimeoutName = Literal["fail", "skip"]
E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")
_NO_RETRIES = RetryPolicy()
# The values of an enum as texts, for type checkers and editors. A test compares them with the enum.
RuleName = Literal[
    "all_success",
    "all_failed",
    "all_done",
    "all_done_min_one_success",
    "all_done_setup_success",
    "all_skipped",
    "one_success",
    "one_failed",
    "one_done",
    "none_failed",
    "none_failed_min_one_success",
    "none_skipped",
    "always",
]


class WaitOptions(TypedDict, total=False):
    """The options of every task, also of one that only waits."""

    name: str
    trigger_rule: TriggerRule | RuleName
    finish_within: Seconds | None
    on_success: Recipients
    on_failure: Recipients
    on_skipped: Recipients
    on_deadline: Recipients


class CommonOptions(WaitOptions, total=False):
    """The options of every task that runs somewhere, without `outputs`: that changes the type of a task's result."""

    retries: int
    retry_delay: Seconds
    retry_backoff: Backoff | Literal["fixed", "linear", "exponential"]
    retry_max_delay: Seconds | None
    retry_jitter: float
    retry_on: Exceptions
    never_on: Exceptions
    timeout: Seconds | None
    queue_timeout: Seconds | None
    stop_grace: Seconds | None
    queue: str | None
    priority: int
    isolation: Isolation | Literal["process", "warm"]
    rerun_on_loss: bool
    on_lost_contact: DatabaseOutagePolicy | Literal["continue", "stop"]
    pool: str | Mapping[str, int] | None
    mutex: str | Iterable[str] | None
    mutex_shared: str | Iterable[str] | None
    parallel: Mapping[str, int] | None
    max_active: int | None
    order: Mapping[str, int | str] | None
    rate: Mapping[str, str] | None
    depends_on_past: bool | None
    max_instances: int
    setup: bool
    outlets: Iterable[Source | str]
    inlets: Iterable[Source | str]
    variables: Iterable[str]
    connections: Iterable[str]
    secrets: Iterable[str]
    asks: bool
    executor_options: Mapping[str, object]
    on_retry: Recipients


class TaskOptions(CommonOptions, total=False):
    """The options of `@task(...)`, `shell(...)`, `.override(...)` and `@dag(task_defaults=...)`."""

    outputs: Iterable[str]


def task_spec(name: str, options: Mapping[str, object]) -> TaskSpec:
    """The spec of a task with these options, each validated. `name` is only used in errors."""
    check_names(f"task {name!r}", options, TaskOptions.__annotations__)
    fields: dict[str, Any] = {}
    retry: dict[str, Any] = {}
    gates: dict[tuple[GateKind, str], GateSpec] = {}
    notices: list[NotificationRuleSpec] = []
    for option, value in options.items():
        if option in ("name", "max_instances"):  # the second belongs to expand, and is checked there
            continue
        if option in NOTICE_OPTIONS:
            notices += read_notices(f"task {name!r}", option, value)
            continue
        field, read = _READERS[option]
        if field == "gates" and value is None:
            continue  # `.override(pool=None)` removes a default
        converted = read_option(f"task {name!r}", option, value, read)
        if field == "gates":
            gates.update({(gate.kind, gate.name): gate for gate in cast("list[GateSpec]", converted)})
        else:
            (retry if option.startswith(("retr", "never_on")) else fields)[field] = converted
    if gates:
        fields["gates"] = tuple(gates[key] for key in sorted(gates))
        # Two running bodies with one key, or a smaller version after a larger one, must never happen.
        if any(kind in (GateKind.MUTEX, GateKind.ORDER) for kind, _ in gates):
            fields.setdefault("on_lost_contact", DatabaseOutagePolicy.STOP)
    if notices:
        fields["notices"] = tuple(notices)
    try:
        return TaskSpec(name=name, retry=RetryPolicy(**retry) if retry else _NO_RETRIES, **fields)
    except InvalidDag as error:
        message = error.message.replace("max_delay_seconds", "retry_max_delay").replace("delay_seconds", "retry_delay")
        raise refused(f"task {name!r}: {message}.") from None


def read_notices(owner: str, option: str, value: object) -> tuple[NotificationRuleSpec, ...]:
    """The rules of one event. The options of callback functions are a task's, and checked where they are written."""

    def read(value: object) -> tuple[NotificationRuleSpec, ...]:
        for each in callbacks_in({option: value}):
            task_spec(each.name, each.options)
        return rule_specs(NOTICE_OPTIONS[option], value)

    return read_option(owner, option, value, read)


def read_option(owner: str, option: str, value: object, read: Callable[[object], T]) -> T:
    """The value of an option. The error names both, unless it already points at a line of the user's file."""
    try:
        return read(value)
    except InvalidDag:
        raise
    except (TypeError, ValueError, UserError) as error:
        raise refused(f"{owner}: {option} is {value!r:.200}, but {error}.") from None


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse unknown options, all in one error, each with the name to use instead."""
    wrong = [name for name in given if name not in known]
    if not wrong:
        return
    from evertick.sdk.airflow_names import option_hint

    of_tasks = TaskOptions.__annotations__ if "task_defaults" in known else ()
    hints = {
        name: f"it is an option of @task; for all tasks of the DAG, use task_defaults={{{name!r}: ...}}."
        if name in of_tasks
        else option_hint(name, known)
        for name in wrong
    }
    listed = "" if all(hints.values()) else f"known options: {', '.join(known)}."
    if len(wrong) == 1:
        raise refused(f"{owner} has no option {wrong[0]!r}; {hints[wrong[0]] or listed}")
    advice = " ".join(f"{name}: {hint}" for name, hint in hints.items() if hint)
    raise refused(f"{owner} has no options {', '.join(map(repr, wrong))}. {advice} {listed}".rstrip())


def check_options(owner: str, given: Mapping[str, object], call: Callable[..., object], shared: type) -> None:
    """Refuse options that neither `call` itself has nor `shared`, a TypedDict."""
    if given.keys() - shared.__annotations__.keys():
        own = (name for name, each in signature(call).parameters.items() if each.kind is Parameter.KEYWORD_ONLY)
        check_names(owner, given, (*own, *shared.__annotations__))


def read_seconds(value: object) -> float:
    """Seconds from a number, a timedelta or a text such as "1h30m"."""
    if isinstance(value, str):
        value = parse_duration(value)
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("it must be seconds, a timedelta or a text such as '30s'")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("it must be 0 or more")
    return float(value)


def read_length(value: object) -> float:
    """The seconds of a limit, which cannot be zero."""
    if (seconds := read_seconds(value)) <= 0:
        raise ValueError("it must be more than 0")
    return seconds


def read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it must be True or False")
    return value


def read_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("it must be text")
    return value


def read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("it must be a whole number")
    return value


def read_choice(kind: type[E]) -> Callable[[object], E]:
    def read(value: object) -> E:
        try:
            return kind(str(value))
        except ValueError:
            hint = did_you_mean(value, map(str, kind), "")
            raise ValueError(f"it must be one of {', '.join(kind)}{hint and f' ({hint})'}") from None

    return read


def read_optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else read(value)


def read_list(value: object, wanted: str) -> Iterable[object]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"it must be {wanted}")
    return value


def read_dict(value: object, wanted: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"it must be {wanted}")
    return value


def _read_jitter(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("it must be a fraction of the delay from 0 to 1")
    return float(value)


def _read_exceptions(value: object) -> tuple[str, ...]:
    """Class names, so that a class whose module is imported only where it is needed can be given, too."""
    listed = [value] if isinstance(value, str | type) else value
    if not isinstance(listed, Iterable):
        raise TypeError('it must be exception classes or their names, as in [ConnectionError, "requests.Timeout"]')
    return tuple(sorted({_exception_name(each) for each in listed}))


def _exception_name(value: object) -> str:
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        raise TypeError(f"{value!r:.100} is neither an exception class nor the name of one")
    if "." in value:
        return value
    known = getattr(builtins, value, None)
    if not (isinstance(known, type) and issubclass(known, BaseException)):
        raise ValueError(f"{value!r} is not a built-in exception; add its module, as in 'requests.{value}'")
    return f"builtins.{value}"


def read_whole(least: int, most: int | None = None) -> Callable[[object], int]:
    def read(value: object) -> int:
        count = read_count(value)
        if count < least or (most is not None and count > most):
            raise ValueError(f"it must be {least} or more" if most is None else f"it must be from {least} to {most:,}")
        return count

    return read


def _read_assets(value: object) -> tuple[str, ...]:
    listed = read_list(value, "a list of Asset(...) or their names")
    names = [each.name if isinstance(each, Source) and each.kind == "asset" else each for each in listed]
    if wrong := [each for each in names if not isinstance(each, str) or not each.strip() or len(each) > 250]:
        raise TypeError(f"{wrong[0]!r} is not a valid name for an asset")
    return tuple(sorted({str(each) for each in names}))


def _read_outputs(value: object) -> tuple[str, ...]:
    names = [read_text(each) for each in read_list(value, "a list of names")]
    if wrong := [each for each in names if not each or len(each) > 200]:
        raise ValueError(f"{wrong[0]!r:.100} is not a valid name for an output")
    return tuple(dict.fromkeys(names))


def _read_names(kind: ValueKind) -> Callable[[object], tuple[str, ...]]:
    def read(value: object) -> tuple[str, ...]:
        names = read_list(value, f'a list of names of {kind}s, as in ["db"]')
        return tuple(sorted({check_name(kind, read_text(each)) for each in names}))

    return read


_SLOTS = 'a name, or a dict of slots by name, as in {"warehouse": 2}'


def _read_pool(value: object) -> list[GateSpec]:
    slots = read_dict({value: 1} if isinstance(value, str) else value, _SLOTS)
    return _checked(GateSpec(kind=GateKind.POOL, name=name, weight=count) for name, count in slots.items())


def _read_keys(weight: int) -> Callable[[object], list[GateSpec]]:
    def read(value: object) -> list[GateSpec]:
        keys = [value] if isinstance(value, str) else value
        if not isinstance(keys, Iterable) or isinstance(keys, Mapping):
            raise TypeError('it must be a key or a list of keys, as in "table:{params.table}"')
        return _checked(GateSpec(kind=GateKind.MUTEX, name=read_text(key), weight=weight) for key in keys)

    return read


def _read_by_key(kind: GateKind, field: str, wanted: str) -> Callable[[object], list[GateSpec]]:
    """A dict of gates by key: the values are one field of each gate."""

    def read(value: object) -> list[GateSpec]:
        given = read_dict(value, wanted)
        return _checked(GateSpec(kind=kind, name=read_text(key), **{field: each}) for key, each in given.items())

    return read


def _read_max_active(value: object) -> list[GateSpec]:
    return _checked([GateSpec(kind=GateKind.TASK, name="", capacity=read_count(value))])


def _read_rate(value: object) -> list[GateSpec]:
    rates = read_dict(value, 'a dict of rates by key, as in {"api:{params.host}": "10/1m"}')
    return _checked(_rate(read_text(key), each) for key, each in rates.items())


def _rate(key: str, text: object) -> GateSpec:
    count, slash, period = text.partition("/") if isinstance(text, str) else ("", "", "")
    if not slash or not count.strip().isdecimal():
        raise ValueError(f'{text!r} is not a rate: write a number per duration, as in "10/1m" or "100/1h"')
    seconds = read_seconds(period.strip())
    return GateSpec(kind=GateKind.RATE, name=key, capacity=int(count), period_seconds=seconds)


def _read_past(value: object) -> list[GateSpec]:
    return [GateSpec(kind=GateKind.PAST, name="")] if read_flag(value) else []


def _checked(gates: Iterable[GateSpec]) -> list[GateSpec]:
    """Validated where they are written. Their parameters are checked later, with the whole DAG."""
    found = list(gates)
    for gate in found:
        known = [path[0] for path in paths_of(gate.name)] if gate.kind in KEYED else []
        if isinstance(gate.version, str):
            known += version_path(gate.version)
        for problem in check_gates([gate], known):
            raise ValueError(problem.removesuffix("."))
    return found


_LIMITS = 'a dict of limits by key, as in {"api:{params.host}": 5}'
_VERSIONS = 'a dict of versions by key, as in {"account:{params.account}": "{params.seq}"}'

_READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "retries": ("retries", read_whole(0)),
    "retry_delay": ("delay_seconds", read_seconds),
    "retry_backoff": ("backoff", read_choice(Backoff)),
    "retry_max_delay": ("max_delay_seconds", read_optional(read_seconds)),
    "retry_jitter": ("jitter", _read_jitter),
    "retry_on": ("retry_on", _read_exceptions),
    "never_on": ("never_on", _read_exceptions),
    "timeout": ("timeout_seconds", read_optional(read_seconds)),
    "queue_timeout": ("queue_timeout_seconds", read_optional(read_seconds)),
    "stop_grace": ("stop_grace_seconds", read_optional(read_seconds)),
    "finish_within": ("finish_within_seconds", read_optional(read_seconds)),
    # None leaves it to the routing rules, whatever the DAG's defaults say.
    "queue": ("queue", read_optional(read_text)),
    "priority": ("priority", read_count),
    "trigger_rule": ("trigger_rule", read_choice(TriggerRule)),
    "isolation": ("isolation", read_choice(Isolation)),
    "rerun_on_loss": ("rerun_on_loss", read_flag),
    "on_lost_contact": ("on_lost_contact", read_choice(DatabaseOutagePolicy)),
    "pool": ("gates", _read_pool),
    "mutex": ("gates", _read_keys(EXCLUSIVE)),
    "mutex_shared": ("gates", _read_keys(1)),
    "parallel": ("gates", _read_by_key(GateKind.KEY, "capacity", _LIMITS)),
    "max_active": ("gates", _read_max_active),
    "order": ("gates", _read_by_key(GateKind.ORDER, "version", _VERSIONS)),
    "rate": ("gates", _read_rate),
    "depends_on_past": ("gates", _read_past),
    "setup": ("is_setup", read_flag),
    "outlets": ("outlets", _read_assets),
    "inlets": ("inlets", _read_assets),
    "outputs": ("outputs", _read_outputs),
    "variables": ("variables", _read_names(ValueKind.VARIABLE)),
    "connections": ("connections", _read_names(ValueKind.CONNECTION)),
    "secrets": ("secrets", _read_names(ValueKind.SECRET)),
    "asks": ("asks", read_flag),
    "executor_options": ("executor_options", read_executor_options),
}
