"""The options of `@task` and `shell`: their names, their validation, and the fields of the spec that they set."""

from __future__ import annotations

import builtins
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypedDict, TypeVar, cast

from evertick.domain.attempt import Isolation
from evertick.domain.dags.gates import EXCLUSIVE, KEYED, GateKind, GateSpec, check_gates, key_parts, version_path
from evertick.domain.dags.spec import OnLostContact, TaskSpec
from evertick.domain.durations import parse_duration
from evertick.domain.errors import InvalidDag, UserError
from evertick.domain.executor_options import read_executor_options
from evertick.domain.notifications import NotificationRuleSpec
from evertick.domain.retry import Backoff, RetryPolicy
from evertick.domain.schedules.dependencies import Source
from evertick.domain.states import TriggerRule
from evertick.domain.stored_values import ValueKind, check_name
from evertick.sdk.notify import NOTICE_OPTIONS, read_rules, rule_specs
from evertick.sdk.source_location import refused

Seconds = float | timedelta | str
E = TypeVar("E", bound=StrEnum)
_NO_RETRIES = RetryPolicy()


class TaskOptions(TypedDict, total=False):
    """The options of `@task(...)`, `shell(...)`, `.override(...)` and `@dag(task_defaults=...)`."""

    name: str
    retries: int
    retry_delay: Seconds
    retry_backoff: Backoff | str
    retry_max_delay: Seconds | None
    retry_jitter: float
    retry_on: object
    never_on: object
    timeout: Seconds | None
    queue_timeout: Seconds | None
    finish_within: Seconds | None
    queue: str | None
    priority: int
    trigger_rule: TriggerRule | str
    isolation: Isolation | str
    rerun_on_loss: bool
    on_lost_contact: OnLostContact | str
    pool: str | Mapping[str, int]
    mutex: str | Iterable[str]
    mutex_shared: str | Iterable[str]
    parallel: Mapping[str, int]
    max_active: int
    order: Mapping[str, int | str]
    rate: Mapping[str, str]
    depends_on_past: bool
    max_instances: int
    setup: bool
    outlets: Iterable[Source | str]
    outputs: Iterable[str]
    variables: Iterable[str]
    connections: Iterable[str]
    secrets: Iterable[str]
    executor_options: Mapping[str, object]
    on_success: object
    on_failure: object
    on_retry: object
    on_skipped: object
    on_deadline: object


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
            notices += _read_notices(name, option, value)
            continue
        field, read = _READERS[option]
        if field == "gates" and value is None:
            continue  # `.override(pool=None)` removes a default
        try:
            converted = read(value)
        except (TypeError, ValueError, UserError) as error:
            raise refused(f"task {name!r}: {option} is {value!r:.200}, but {error}.") from None
        if field == "gates":
            gates.update({(gate.kind, gate.name): gate for gate in cast("list[GateSpec]", converted)})
        else:
            (retry if option.startswith(("retr", "never_on")) else fields)[field] = converted
    if gates:
        fields["gates"] = tuple(gates[key] for key in sorted(gates))
        # Two running bodies with one key, or a smaller version after a larger one, must never happen.
        if any(kind in (GateKind.MUTEX, GateKind.ORDER) for kind, _ in gates):
            fields.setdefault("on_lost_contact", OnLostContact.STOP)
    if notices:
        fields["notices"] = tuple(notices)
    try:
        return TaskSpec(name=name, retry=RetryPolicy(**retry) if retry else _NO_RETRIES, **fields)
    except InvalidDag as error:
        message = error.message.replace("max_delay_seconds", "retry_max_delay").replace("delay_seconds", "retry_delay")
        raise refused(f"task {name!r}: {message}.") from None


def _read_notices(name: str, option: str, value: object) -> tuple[NotificationRuleSpec, ...]:
    try:
        check_callbacks(value)
        return rule_specs(NOTICE_OPTIONS[option], value)
    except (TypeError, ValueError) as error:
        raise refused(f"task {name!r}: {option} is {value!r:.200}, but {error}.") from None


def check_callbacks(value: object) -> None:
    """The options of callback functions: they are a task's, and checked where they are written."""
    for each in read_rules(value):
        if each.callback is not None:
            task_spec(each.callback.name, each.callback.options)


def check_names(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an unknown option, and suggest a similar name."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}."
            raise refused(f"{owner} has no option {name!r}; {hint}")


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
            near = difflib.get_close_matches(str(value), [choice.value for choice in kind], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"it must be one of {', '.join(kind)}{hint}") from None

    return read


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


def _read_retries(value: object) -> int:
    if (count := read_count(value)) < 0:
        raise ValueError("it must be 0 or more")
    return count


def _read_cap(value: object) -> float | None:
    return None if value is None else read_seconds(value)


def _read_queue(value: object) -> str | None:
    """None leaves it to the routing rules, whatever the DAG's defaults say."""
    return None if value is None else read_text(value)


def _read_outlets(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError("it must be a list of Asset(...) or their names")
    names = [each.name if isinstance(each, Source) and each.kind == "asset" else each for each in value]
    if wrong := [each for each in names if not isinstance(each, str) or not each.strip() or len(each) > 250]:
        raise TypeError(f"{wrong[0]!r} is not a valid name for an asset")
    return tuple(sorted({str(each) for each in names}))


def _read_outputs(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError("it must be a list of names")
    names = [read_text(each) for each in value]
    if wrong := [each for each in names if not each or len(each) > 200]:
        raise ValueError(f"{wrong[0]!r:.100} is not a valid name for an output")
    return tuple(dict.fromkeys(names))


def _read_names(kind: ValueKind) -> Callable[[object], tuple[str, ...]]:
    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError(f'it must be a list of names of {kind}s, as in ["db"]')
        return tuple(sorted({check_name(kind, read_text(each)) for each in value}))

    return read


def _read_pool(value: object) -> list[GateSpec]:
    slots = {value: 1} if isinstance(value, str) else value
    if not isinstance(slots, Mapping):
        raise TypeError('it must be a name, or a dict of slots by name, as in {"warehouse": 2}')
    return _checked(GateSpec(kind=GateKind.POOL, name=name, weight=count) for name, count in slots.items())


def _read_keys(weight: int) -> Callable[[object], list[GateSpec]]:
    def read(value: object) -> list[GateSpec]:
        keys = [value] if isinstance(value, str) else value
        if not isinstance(keys, Iterable) or isinstance(keys, Mapping):
            raise TypeError('it must be a key or a list of keys, as in "table:{params.table}"')
        return _checked(GateSpec(kind=GateKind.MUTEX, name=read_text(key), weight=weight) for key in keys)

    return read


def _read_parallel(value: object) -> list[GateSpec]:
    if not isinstance(value, Mapping):
        raise TypeError('it must be a dict of limits by key, as in {"api:{params.host}": 5}')
    return _checked(GateSpec(kind=GateKind.KEY, name=read_text(key), capacity=value[key]) for key in value)


def _read_max_active(value: object) -> list[GateSpec]:
    return _checked([GateSpec(kind=GateKind.TASK, name="", capacity=read_count(value))])


def _read_order(value: object) -> list[GateSpec]:
    if not isinstance(value, Mapping):
        raise TypeError('it must be a dict of versions by key, as in {"account:{params.account}": "{params.seq}"}')
    return _checked(GateSpec(kind=GateKind.ORDER, name=read_text(key), version=value[key]) for key in value)


def _read_rate(value: object) -> list[GateSpec]:
    if not isinstance(value, Mapping):
        raise TypeError('it must be a dict of rates by key, as in {"api:{params.host}": "10/1m"}')
    return _checked(_rate(read_text(key), value[key]) for key in value)


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
        known = [part[0] for part in key_parts(gate.name) if isinstance(part, list)] if gate.kind in KEYED else []
        if isinstance(gate.version, str):
            known += version_path(gate.version)
        for problem in check_gates([gate], known):
            raise ValueError(problem.removesuffix("."))
    return found


_READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "retries": ("retries", _read_retries),
    "retry_delay": ("delay_seconds", read_seconds),
    "retry_backoff": ("backoff", read_choice(Backoff)),
    "retry_max_delay": ("max_delay_seconds", _read_cap),
    "retry_jitter": ("jitter", _read_jitter),
    "retry_on": ("retry_on", _read_exceptions),
    "never_on": ("never_on", _read_exceptions),
    "timeout": ("timeout_seconds", _read_cap),
    "queue_timeout": ("queue_timeout_seconds", _read_cap),
    "finish_within": ("finish_within_seconds", _read_cap),
    "queue": ("queue", _read_queue),
    "priority": ("priority", read_count),
    "trigger_rule": ("trigger_rule", read_choice(TriggerRule)),
    "isolation": ("isolation", read_choice(Isolation)),
    "rerun_on_loss": ("rerun_on_loss", read_flag),
    "on_lost_contact": ("on_lost_contact", read_choice(OnLostContact)),
    "pool": ("gates", _read_pool),
    "mutex": ("gates", _read_keys(EXCLUSIVE)),
    "mutex_shared": ("gates", _read_keys(1)),
    "parallel": ("gates", _read_parallel),
    "max_active": ("gates", _read_max_active),
    "order": ("gates", _read_order),
    "rate": ("gates", _read_rate),
    "depends_on_past": ("gates", _read_past),
    "setup": ("is_setup", read_flag),
    "outlets": ("outlets", _read_outlets),
    "outputs": ("outputs", _read_outputs),
    "variables": ("variables", _read_names(ValueKind.VARIABLE)),
    "connections": ("connections", _read_names(ValueKind.CONNECTION)),
    "secrets": ("secrets", _read_names(ValueKind.SECRET)),
    "executor_options": ("executor_options", read_executor_options),
}
