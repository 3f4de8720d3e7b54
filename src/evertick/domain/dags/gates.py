"""The gates that a task must pass before it becomes available: pools, mutex keys and limits, which are slots of a named gate;
and ordered keys, rates and the previous run (`depends_on_past`), of which a task holds no slot.

Keys are templates over the run's parameters, as in "table:{params.table}". The database fills them in; this module only
parses and checks them, and never evaluates anything in them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

# The slots of a mutex key: a shared holder takes one, an exclusive holder takes all.
EXCLUSIVE = 1_000_000
MOST_SLOTS = 1_000_000
MOST_GATES = 20
MOST_KEY_CHARACTERS = 200
LONGEST_PERIOD_SECONDS = 366 * 86_400.0
# A version is a 64-bit integer.
MOST_VERSION = 2**63 - 1
_POOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


class GateKind(StrEnum):
    POOL = "pool"
    MUTEX = "mutex"
    KEY = "key"
    GROUP = "group"
    TASK = "task"
    DAG = "dag"
    ORDER = "order"
    RATE = "rate"
    PAST = "past"


# The kinds whose name is a template.
KEYED = (GateKind.MUTEX, GateKind.KEY, GateKind.ORDER, GateKind.RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """One gate of a task. `name` is that of a pool or a group, or the template of a key; of the previous run, another task to
    wait for. The DAG does not set a pool's capacity.

    `version` is the position on an ordered key: a number, or a template such as "{params.seq}". A rate admits `capacity`
    tasks in any `period_seconds`.
    """

    kind: GateKind
    name: str
    weight: int = 1
    capacity: int | None = None
    version: int | str | None = None
    period_seconds: float | None = None


def awaits_past(gates: Collection[GateSpec]) -> bool:
    """Whether a task with these gates waits for the previous run."""
    return any(gate.kind is GateKind.PAST for gate in gates)


def version_path(template: str) -> list[str]:
    """The path of the parameter that a version reads: "{params.seq}" is ["seq"]."""
    parts = key_parts(template)
    if len(parts) != 1 or not isinstance(parts[0], list):
        raise ValueError(
            f'{template!r} is not a version: write a whole number, or one parameter as in "{{params.seq}}"'
        )
    return parts[0]


def check_versions(gates: Collection[GateSpec], params: Mapping[str, object]) -> Iterator[str]:
    """The problems with a run's parameters as versions of ordered keys."""
    for gate in gates:
        if isinstance(gate.version, str):
            path, found = version_path(gate.version), dict(params)
            value: object = found
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if not _is_version(value):
                yield (
                    f"order {gate.name!r} takes its version from {'.'.join(path)}, which is {value!r}:"
                    " it must be a whole number of at most 64 bits"
                )


def key_parts(template: str) -> list[str | list[str]]:
    """The template as texts and paths into the parameters: "t:{params.a.b}" is ["t:", ["a", "b"]]. Doubled braces stand
    for literal ones."""
    parts: list[str | list[str]] = []
    for text, field, form, conversion in string.Formatter().parse(template):
        if text:
            parts.append(text)
        if field is None:
            continue
        path = field.split(".")
        if path[0] != "params" or len(path) < 2 or not all(path) or form or conversion or "[" in field:
            raise ValueError(f"{{{field}}} is not a parameter: write {{params.NAME}}")
        parts.append(path[1:])
    return parts


def paths_of(template: str) -> list[list[str]]:
    """The paths of the parameters that the template reads."""
    return [part for part in key_parts(template) if isinstance(part, list)]


def check_pool_name(name: object) -> str | None:
    """The problem with a pool's name, or None."""
    if isinstance(name, str) and _POOL_NAME.fullmatch(name):
        return None
    return "a pool name consists of letters, digits, '_', '-', '.' and at most 200 characters"


def check_gates(gates: Collection[GateSpec], params: Collection[str]) -> Iterator[str]:
    """The problems with a task's gates. `params` are the names that its DAG declares."""
    if len(gates) > MOST_GATES:
        yield f"it has {len(gates)} gates; at most {MOST_GATES} are allowed."
    for gate in gates:
        if not _is_count(gate.weight) or (gate.capacity is not None and not _is_count(gate.capacity)):
            yield f"{gate.kind} {gate.name!r}: slots and limits are whole numbers from 1 to {MOST_SLOTS:,}."
        if gate.kind is GateKind.POOL:
            if wrong := check_pool_name(gate.name):
                yield f"pool {gate.name!r}: {wrong}."
        elif gate.kind in KEYED:
            yield from _check_key(gate, params)
        if gate.kind is GateKind.ORDER:
            yield from _check_version(gate, params)
        if gate.kind is GateKind.RATE and not 0 < (gate.period_seconds or 0) <= LONGEST_PERIOD_SECONDS:
            yield f"rate {gate.name!r}: its period must be more than 0 and at most a year."


def _check_key(gate: GateSpec, params: Collection[str]) -> Iterator[str]:
    name = f"{gate.kind} {gate.name!r}"
    if not isinstance(gate.name, str) or not gate.name.strip() or len(gate.name) > MOST_KEY_CHARACTERS:
        yield f"{name}: a key must be text of 1 to {MOST_KEY_CHARACTERS} characters."
        return
    if not gate.name.isprintable():
        yield f"{name}: a key must consist of printable characters."
        return
    yield from check_template(name, lambda: paths_of(gate.name), params)


def _check_version(gate: GateSpec, params: Collection[str]) -> Iterator[str]:
    if isinstance(version := gate.version, str):
        yield from check_template(f"order {gate.name!r}", lambda: [version_path(version)], params)
    elif not _is_version(version):
        yield f"order {gate.name!r}: version {version!r} is not a whole number of at most 64 bits."


def check_template(owner: str, read: Callable[[], list[list[str]]], params: Collection[str]) -> Iterator[str]:
    """The problems with the paths that `read` finds in a template. `params` are the names that its DAG declares."""
    try:
        unknown = [path[0] for path in read() if path[0] not in params]
    except ValueError as error:
        unknown = []
        yield f"{owner}: {error}."
    yield from (f"{owner}: the DAG declares no parameter {name!r}; add it to params of @dag." for name in unknown)


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MOST_VERSION <= value <= MOST_VERSION


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SLOTS
