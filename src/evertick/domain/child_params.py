"""The parameters that a task gives to the run it starts: constants, results of tasks before it, parameters of its own run."""

from __future__ import annotations

from collections.abc import Mapping

from evertick.domain.errors import UserError

_TAG = "$evertick"
# What JSON lacks and a parameter takes as text.
_TEXTS = frozenset({"datetime", "date", "time", "decimal", "uuid"})


def fill_params(
    params: Mapping[str, object],
    given: Mapping[str, object],
    *,
    results: Mapping[str, object],
    own: Mapping[str, object],
) -> dict[str, object]:
    """UserError where a result is not there, or is nothing that a parameter can be."""
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
        value = value["named"] if path and path[0] in value["named"] else value["value"]
    if value is None:
        raise UserError(f"param {name!r} is the result of task {task}, and that returned nothing.")
    for key in path:
        _plain(name, task, value)
        try:
            value = value[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            raise UserError(f"param {name!r}: the result of task {task} has no {key!r}.") from None
    return value


def _plain(name: str, task: str, value: object) -> object:
    kind = value.get(_TAG) if isinstance(value, Mapping) else None
    if kind is None or not isinstance(value, Mapping):
        return value
    if kind in _TEXTS:
        return value["value"]
    what = "so large that it was put into a file" if kind == "file" else f"a {kind}, which no param can be"
    raise UserError(
        f"param {name!r}: the result of task {task} is {what}; return text, a number, or a plain list or dict."
    )
