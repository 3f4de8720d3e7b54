"""What a task must pass before it becomes available: pools, mutex keys, limits. All are slots of a named gate.

Keys are templates over the run's parameters, as in "table:{params.table}". They are filled in by the database; here they are
only read and checked, and nothing of them is ever evaluated.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

# A mutex key has so many slots: whoever shares it takes one, whoever wants it alone takes all.
EXCLUSIVE = 1_000_000
MOST_SLOTS = 1_000_000
MOST_GATES = 20
MOST_KEY_CHARACTERS = 200
_POOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


class GateKind(StrEnum):
    POOL = "pool"
    MUTEX = "mutex"
    KEY = "key"
    GROUP = "group"
    TASK = "task"
    DAG = "dag"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """One gate of a task. `name` is that of a pool or a group, or the template of a key. A pool's capacity is not the DAG's."""

    kind: GateKind
    name: str
    weight: int = 1
    capacity: int | None = None


def key_parts(template: str) -> list[str | list[str]]:
    """The template as texts and paths into the parameters: "t:{params.a.b}" is ["t:", ["a", "b"]]. Braces are doubled to be
    meant as they are."""
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


def check_pool_name(name: object) -> str | None:
    """What is wrong with a pool's name."""
    if isinstance(name, str) and _POOL_NAME.fullmatch(name):
        return None
    return "a pool's name has letters, digits, '_', '-', '.' and at most 200 characters"


def check_gates(gates: Collection[GateSpec], params: Collection[str]) -> Iterator[str]:
    """What is wrong with a task's gates. `params` are the names that its DAG declares."""
    if len(gates) > MOST_GATES:
        yield f"it has {len(gates)} gates; at most {MOST_GATES} are allowed."
    for gate in gates:
        if not _is_count(gate.weight) or (gate.capacity is not None and not _is_count(gate.capacity)):
            yield f"{gate.kind} {gate.name!r}: slots and limits are whole numbers from 1 to {MOST_SLOTS:,}."
        if gate.kind is GateKind.POOL:
            if wrong := check_pool_name(gate.name):
                yield f"pool {gate.name!r}: {wrong}."
        elif gate.kind in (GateKind.MUTEX, GateKind.KEY):
            yield from _check_key(gate, params)


def _check_key(gate: GateSpec, params: Collection[str]) -> Iterator[str]:
    name = f"{gate.kind} {gate.name!r}"
    if not isinstance(gate.name, str) or not gate.name.strip() or len(gate.name) > MOST_KEY_CHARACTERS:
        yield f"{name}: a key is a text of 1 to {MOST_KEY_CHARACTERS} characters."
        return
    if not gate.name.isprintable():
        yield f"{name}: a key has printable characters only."
        return
    try:
        parts = key_parts(gate.name)
    except ValueError as error:
        yield f"{name}: {error}."
        return
    for path in parts:
        if isinstance(path, list) and path[0] not in params:
            yield f"{name}: the DAG declares no parameter {path[0]!r}; add it to params of @dag."


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SLOTS
