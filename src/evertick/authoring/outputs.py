"""Several named results of one task: `push("rows", 5)` in the task, `extract()["rows"]` in the DAG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from evertick.authoring.context import current_context
from evertick.domain.errors import ResultLost, UserError

MOST_OUTPUTS = 1000
_LONGEST_NAME = 200


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
