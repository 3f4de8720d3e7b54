"""The sources of a DAG's parameters: `params=` as a dict or a pydantic model, and `Param(...)` defaults in its signature."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, TypedDict, Union, Unpack, cast, get_args, get_origin

from evertick.domain.dags.params import Param as DeclaredParam
from evertick.sdk.options import check_names
from evertick.sdk.source_location import refused


class ParamOptions(TypedDict, total=False):
    """The options of `Param`."""

    type: type | str | None
    required: bool
    minimum: float | None
    maximum: float | None
    choices: Sequence[object] | None
    min_length: int | None
    max_length: int | None
    pattern: str | None
    nullable: bool
    description: str | None


def Param(default: object = None, **options: Unpack[ParamOptions]) -> Any:
    """A parameter of a DAG's runs: `params={"rows": Param(100, type=int, minimum=1)}`, or the default of an argument of the
    DAG's function: `rows: int = Param(100)`. For type checkers it therefore fits every annotation.

    `type` is int, float, str, bool, list, dict or a JSON name; if omitted, it is the default's type.
    A default of None allows null, and so does `nullable`. Length limits apply to texts and lists; `pattern` is a regular
    expression that must match the whole text.
    """
    check_names("Param", options, ParamOptions.__annotations__)
    return DeclaredParam(default, **options)


_PLAIN = (bool, int, float, str, list, dict)


def params_of(function: Callable[..., object], declared: object) -> tuple[tuple[str, ...], object]:
    """The names of the function's run parameters, and all declarations."""
    own = {
        name: _annotated(name, parameter.default, _annotation(function, name))
        for name, parameter in inspect.signature(function).parameters.items()
        if isinstance(parameter.default, DeclaredParam)
    }
    given = from_model(declared) if isinstance(declared, type) else declared
    if not own:
        return (), given
    if given is not None and not isinstance(given, Mapping):
        return tuple(own), given  # checked with the other options
    if twice := sorted(own.keys() & (given or {}).keys()):
        raise refused(f"param {twice[0]!r} is declared twice: in params= and in the function's signature.")
    return tuple(own), {**(given or {}), **own}


def from_model(model: type) -> dict[str, DeclaredParam]:
    """The fields of a pydantic model as parameters, by its JSON schema: its constraints are checked at every trigger."""
    if not callable(getattr(model, "model_json_schema", None)):
        raise refused(f"params={model.__name__} is not a pydantic model; otherwise pass a dict of Param(...) by name.")
    schema = cast(Any, model).model_json_schema()
    shared, required = schema.get("$defs", {}), schema.get("required", [])
    made = {
        each.alias or name: each.default_factory()
        for name, each in cast(Any, model).model_fields.items()
        if each.default_factory is not None
    }
    return {
        name: _from_schema(name, {"default": made.get(name), **raw}, shared, required=name in required)
        for name, raw in schema.get("properties", {}).items()
    }


def _from_schema(name: str, raw: Mapping[str, Any], shared: Mapping[str, Any], *, required: bool) -> DeclaredParam:
    options = [_resolved(each, shared) for each in raw.get("anyOf", [raw])]
    kinds = [each for each in options if each.get("type") != "null"]
    if "allOf" in raw and len(raw["allOf"]) == 1:
        kinds = [_resolved(raw["allOf"][0], shared)]
    one: Mapping[str, Any] = kinds[0] if len(kinds) == 1 else {}
    choices = one.get("enum") or ([one["const"]] if "const" in one else None)
    for bound in ("exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if bound in one and not (one.get("type") == "integer" and bound != "multipleOf"):
            raise refused(
                f"param {name!r}: {bound} cannot be checked when a run is triggered; use ge= and le= instead."
            )
    above, below = one.get("exclusiveMinimum"), one.get("exclusiveMaximum")
    return DeclaredParam(
        raw.get("default"),
        type=one.get("type", "any"),
        required=required,
        minimum=above + 1 if above is not None else one.get("minimum"),
        maximum=below - 1 if below is not None else one.get("maximum"),
        choices=choices,
        min_length=one.get("minLength", one.get("minItems")),
        max_length=one.get("maxLength", one.get("maxItems")),
        pattern=one.get("pattern"),
        nullable=len(kinds) < len(options),
        description=raw.get("description"),
    )


def _resolved(raw: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target of a reference, merged with the keys next to it."""
    reference = raw.get("$ref")
    return raw if reference is None else {**shared[str(reference).rsplit("/", 1)[-1]], **raw}


def _annotation(function: Callable[..., object], name: str) -> Any:
    try:
        return inspect.get_annotations(function, eval_str=True).get(name)
    except (NameError, TypeError, AttributeError):
        return None


def _annotated(name: str, param: DeclaredParam, annotation: Any) -> DeclaredParam:
    """The type, choices and nullability from the annotation. The declaration's own fields take precedence."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [each for each in get_args(annotation) if each is not type(None)]
        if len(others) < len(get_args(annotation)):
            param = replace(param, nullable=True)
        annotation = others[0] if len(others) == 1 else None
    if get_origin(annotation) is Literal and param.choices is None:
        return replace(param, choices=list(get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, Enum) and param.choices is None:
        return replace(param, choices=[member.value for member in annotation])
    origin = get_origin(annotation) or annotation
    if param.type is None and origin in _PLAIN:
        return replace(param, type=origin)
    if param.type is None and annotation not in (None, Any, object) and param.choices is None:
        raise refused(
            f"param {name!r}: a run parameter cannot have type {annotation!r}; use str, int, float, bool, list or dict."
        )
    return param
