"""The parameters that a task passes to the run it starts: constants, results of upstream tasks, parameters of its own run."""

from __future__ import annotations

from collections.abc import Mapping

from evertick.domain.errors import UserError

_TAG = "$evertick"
# Types that JSON lacks and a parameter accepts as text.
_TEXTS = frozenset({"datetime", "date", "time", "decimal", "uuid"})


def fill_params(
    params: Mapping[str, object],
    given: Mapping[str, object],
    *,
    results: Mapping[str, object],
    own: Mapping[str, object],
) -> dict[str, object]:
    """Raises UserError if a result is missing or has a type that a parameter cannot have."""
    filled = dict(params)
    for name, source in given.items():
        assert isinstance(source, Mapping)
        if "param" in source:
            filled[name] = own.get(source["param"])
        else:
            filled[name] = _plain(
                name, source["task"], _part(name, source["task"], results.get(source["task"]), source["path"])
            )
    return filled


def _part(name: str, task: str, value: object, path: list[str | int]) -> object:
    if isinstance(value, Mapping) and value.get(_TAG) == "outputs":  # several of them, by name
        named = value.get("named")
        value = named if isinstance(named, Mapping) and path and path[0] in named else value.get("value")
    if value is None:
        raise UserError(
            f"param {name!r} takes the result of task {task}, which returned nothing: return a value from it."
        )
    for key in path:
        _plain(name, task, value)
        try:
            value = value[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            raise UserError(f"param {name!r}: the result of task {task} has no {key!r}.") from None
    return value


def _plain(name: str, task: str, value: object) -> object:
    if not isinstance(value, Mapping) or value.get(_TAG) is None:
        return value
    # An agent can send values that our own tasks never return: any such value must fail this one task and block no other.
    kind, text = str(value[_TAG]), value.get("value")
    if kind in _TEXTS and isinstance(text, str):
        return text
    what = (
        "so large that it was stored in a file" if kind == "file" else f"of type {kind:.50}, which a param cannot have"
    )
    raise UserError(
        f"param {name!r}: the result of task {task} is {what}; return text, a number, or a plain list or dict."
    )
