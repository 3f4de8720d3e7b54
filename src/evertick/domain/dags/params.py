"""A DAG's declared parameters, the validation of given values, and the parameters of a triggered run.

Values are JSON and nothing else, small enough to store with every run. User input is never evaluated, and a pattern is
matched in bounded time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import TypeAlias, cast

from evertick.domain.errors import InvalidDag, InvalidParams, UserError, did_you_mean

# CPU time, not elapsed time: a busy machine does not change the result. A normal pattern takes far less than one
# thousandth of it.
MOST_SECONDS = 0.1


class PatternTimeout(ValueError):
    """The expression needs too much backtracking on this text."""


def _timed_regex() -> ModuleType:
    """`regex`, which is compiled for one version of Python. A DAG file that is loaded by another has `re`: there the time
    limit of the import bounds the match, and the API checks each value again."""
    try:
        return import_module("regex")
    except ImportError:
        return re


def compile_pattern(pattern: str) -> None:
    """Raises ValueError if the pattern is not a valid regular expression."""
    timed = _timed_regex()
    try:
        re.compile(pattern)
        timed.compile(pattern)
    except (re.error, timed.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None


def matches_whole(pattern: str, text: str) -> bool:
    """Raises ValueError if the pattern is invalid."""
    timed = _timed_regex()
    if timed is re:
        return re.fullmatch(pattern, text) is not None
    try:
        return timed.fullmatch(pattern, text, timeout=MOST_SECONDS) is not None
    except TimeoutError:
        raise PatternTimeout(f"takes too long on a text of {len(text):,} characters: make it simpler") from None


JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


MAX_PARAMS = 200


MAX_PARAM_NAME = 200


MAX_PARAMS_BYTES = 256 * 1024


_LONGEST_PATTERN = 200


_LONGEST_MATCHED = 1000


_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


_TRUE, _FALSE = frozenset({"true", "yes", "on"}), frozenset({"false", "no", "off"})


class ParamType(StrEnum):
    ANY = "any"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    STRING = "string"
    ARRAY = "array"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as a DAG file declares it; see `sdk/params.py::Param`."""

    default: object = None
    _: KW_ONLY
    type: type | str | None = None
    required: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: Sequence[object] | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    nullable: bool = False
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A declared parameter, validated. Null is allowed only if the default is null or the declaration says so."""

    name: str
    type: ParamType = ParamType.ANY
    default: JsonValue = None
    required: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[JsonValue, ...] | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    nullable: bool = False
    description: str | None = None

    @property
    def allowed(self) -> str:
        """A description of the allowed values, for people."""
        if self.choices is not None:
            return "one of " + ", ".join(map(shown, self.choices))
        noun = {ParamType.ANY: "any JSON value", ParamType.INTEGER: "an integer", ParamType.ARRAY: "a list"}
        text = noun.get(self.type, f"an {self.type}" if self.type is ParamType.OBJECT else f"a {self.type}")
        if self.minimum is not None:
            text += f" of at least {self.minimum:g}"
        if self.maximum is not None:
            text += f"{' and' if self.minimum is not None else ' of'} at most {self.maximum:g}"
        parts = "items" if self.type is ParamType.ARRAY else "characters"
        if self.min_length is not None:
            text += f" of at least {self.min_length} {parts}"
        if self.max_length is not None:
            text += f"{' and' if self.min_length is not None else ' of'} at most {self.max_length} {parts}"
        return text if self.pattern is None else f"{text} that matches {self.pattern}"


def declare_params(raw: Mapping[str, object]) -> tuple[ParamSpec, ...]:
    """The validated declarations in their order. A plain value is short for `Param(value)`."""
    if len(raw) > MAX_PARAMS:
        raise InvalidDag(f"{len(raw)} params are declared; at most {MAX_PARAMS} are allowed.")
    return tuple(_declare(name, value if isinstance(value, Param) else Param(value)) for name, value in raw.items())


def check_params(
    declared: Iterable[ParamSpec], given: Mapping[str, object], *, accepts_unknown: bool = False
) -> dict[str, JsonValue]:
    """Every declared parameter with its value for one run: the given one, or the default. The error names every problem.

    `accepts_unknown`: parameters that are not declared are passed on as they are."""
    specs = {spec.name: spec for spec in declared}
    unknown = {name: value for name, value in given.items() if name not in specs}
    problems = [] if accepts_unknown else [_unknown(name, specs) for name in unknown]
    values: dict[str, JsonValue] = {}
    for spec in specs.values():
        try:
            values[spec.name] = _checked(spec, given)
        except ValueError as error:
            problems.append(str(error))
    if accepts_unknown:
        problems += _check_unknown(unknown)
        values |= cast("dict[str, JsonValue]", unknown)
    if problems:
        raise InvalidParams("; ".join(problems) + ".")
    if (size := len(json.dumps(values))) > MAX_PARAMS_BYTES:
        raise InvalidParams(f"the params take {size:,} bytes; at most {MAX_PARAMS_BYTES:,} are allowed.")
    return values


def parse_param(declared: Iterable[ParamSpec], name: str, text: str) -> JsonValue:
    """The value of a typed `name=text`: parsed as JSON if it is JSON, else the text itself."""
    specs = {spec.name: spec for spec in declared}
    if name not in specs:
        raise InvalidParams(_unknown(name, specs) + ".")
    kind = specs[name].type
    if kind is ParamType.STRING:
        return text
    if kind is ParamType.BOOLEAN and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    try:
        return as_json(json.loads(text))
    except (ValueError, RecursionError):
        return text


def as_json(value: object) -> JsonValue:
    """The value after a round trip through JSON. ValueError says why it cannot be stored."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{shown(value)} is not JSON ({error})") from None
    if _NUL.search(text):
        raise ValueError(f"{shown(value)} contains a NUL character")
    plain: JsonValue = json.loads(text)
    return plain


def _declare(name: object, param: Param) -> ParamSpec:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_PARAM_NAME:
        raise InvalidDag(
            f"param name {shown(name)} must start with a letter, use letters, digits, _ . - and have "
            f"at most {MAX_PARAM_NAME} characters."
        )
    try:
        default = as_json(param.default)
        choices = None if param.choices is None else _choices(param.choices)
        kind = _type_of(param.type) if param.type is not None else _TYPES.get(type(default), ParamType.ANY)
        spec = ParamSpec(
            name=name,
            type=kind,
            default=default,
            required=param.required,
            minimum=_bound(kind, param.minimum),
            maximum=_bound(kind, param.maximum),
            choices=choices,
            min_length=_length(kind, param.min_length),
            max_length=_length(kind, param.max_length),
            pattern=_pattern(kind, param.pattern),
            nullable=bool(param.nullable),
            description=_description(param.description),
        )
    except (TypeError, ValueError) as error:
        raise InvalidDag(f"param {name!r}: {error}.") from None
    if not param.required and default is not None:
        try:
            _check_value(spec, default)
        except ValueError as error:
            raise InvalidDag(f"the default of {error}.") from None
    return spec


def _checked(spec: ParamSpec, given: Mapping[str, object]) -> JsonValue:
    if spec.name not in given:
        if spec.required:
            raise ValueError(f"param {spec.name!r} is required: {spec.allowed}")
        return spec.default
    try:
        value = as_json(given[spec.name])
    except ValueError as error:
        raise ValueError(f"param {spec.name!r}: {error}") from None
    if not (value is None and (spec.nullable or (spec.default is None and not spec.required))):
        _check_value(spec, value)
    return value


def _check_value(spec: ParamSpec, value: JsonValue) -> None:
    if spec.choices is not None:
        fits = any(value == choice and type(value) is type(choice) for choice in spec.choices)
    else:
        fits = _has_type(spec.type, value) and _within(spec, value)
    if not fits:
        raise ValueError(f"param {spec.name!r} is {shown(value)}, but must be {spec.allowed}")


def _has_type(kind: ParamType, value: JsonValue) -> bool:
    actual = _TYPES.get(type(value), ParamType.ANY)
    return kind is ParamType.ANY or actual is kind or (kind is ParamType.NUMBER and actual is ParamType.INTEGER)


def _within(spec: ParamSpec, value: JsonValue) -> bool:
    if isinstance(value, str | list):
        if not (spec.min_length or 0) <= len(value) <= (len(value) if spec.max_length is None else spec.max_length):
            return False
        return spec.pattern is None or not isinstance(value, str) or _matches(spec, spec.pattern, value)
    if not isinstance(value, int | float):
        return True
    return (spec.minimum is None or value >= spec.minimum) and (spec.maximum is None or value <= spec.maximum)


def _choices(value: object) -> tuple[JsonValue, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise TypeError(f"choices must be a list of values, not {shown(value)}")
    return tuple(as_json(choice) for choice in value)


def _description(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"description must be text, not {shown(value)}")
    return value


def _bound(kind: ParamType, value: object) -> float | None:
    if value is None:
        return None
    if kind not in (ParamType.INTEGER, ParamType.NUMBER):
        raise ValueError(f"minimum and maximum are for numbers, and this is {kind}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a minimum or maximum must be a number, not {shown(value)}")
    return float(value)


def _length(kind: ParamType, value: object) -> int | None:
    if value is None:
        return None
    if kind not in (ParamType.STRING, ParamType.ARRAY):
        raise ValueError(f"min_length and max_length are for texts and lists, and this is {kind}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"a length must be a whole number, not {shown(value)}")
    return value


def _pattern(kind: ParamType, value: object) -> str | None:
    if value is None:
        return None
    if kind is not ParamType.STRING:
        raise ValueError(f"pattern is for texts, and this is {kind}")
    if not isinstance(value, str) or len(value) > _LONGEST_PATTERN:
        raise TypeError(f"pattern must be a regular expression of at most {_LONGEST_PATTERN} characters")
    try:
        compile_pattern(value)
    except ValueError as error:
        raise ValueError(f"pattern {shown(value)} {error}") from None
    return value


def _matches(spec: ParamSpec, pattern: str, value: str) -> bool:
    if len(value) > _LONGEST_MATCHED:
        raise ValueError(
            f"param {spec.name!r} has {len(value):,} characters; with a pattern, at most {_LONGEST_MATCHED:,} are allowed"
        )
    try:
        return matches_whole(pattern, value)
    except ValueError as error:
        raise ValueError(f"param {spec.name!r}: its pattern {shown(pattern)} {error}") from None


_TYPES: dict[type, ParamType] = {
    bool: ParamType.BOOLEAN,
    int: ParamType.INTEGER,
    float: ParamType.NUMBER,
    str: ParamType.STRING,
    list: ParamType.ARRAY,
    dict: ParamType.OBJECT,
}


def _type_of(declared: type | str) -> ParamType:
    name = _TYPES.get(declared, "") if isinstance(declared, type) else declared
    try:
        return ParamType(name)
    except ValueError:
        raise ValueError(f"type {shown(declared)} is not one of {', '.join(ParamType)}") from None


def _check_unknown(unknown: Mapping[str, object]) -> Iterator[str]:
    if len(unknown) > MAX_PARAMS:
        yield f"{len(unknown)} params are not declared; at most {MAX_PARAMS} are allowed"
    for name, value in unknown.items():
        if len(name) > MAX_PARAM_NAME:
            yield f"param {shown(name)} has a name of more than {MAX_PARAM_NAME} characters"
        try:
            as_json({name: value})
        except ValueError as error:
            yield f"param {shown(name)}: {error}"


def _unknown(name: object, specs: Mapping[str, ParamSpec]) -> str:
    hint = did_you_mean(name, specs, f"known: {', '.join(sorted(specs)) or 'none'}")
    return f"unknown param {shown(name)} ({hint})"


def shown(value: object) -> str:
    """The value in an error, at most 100 characters of it."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


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
        if (task := source.get("task")) is None:
            filled[name] = own.get(source["param"])
        else:
            filled[name] = _plain(name, task, _part(name, task, results.get(task), source["path"]))
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
    what = "so large that it was stored in a file"
    if kind != "file":
        what = f"of type {kind:.50}, which a param cannot have"
    raise UserError(
        f"param {name!r}: the result of task {task} is {what}; return text, a number, or a plain list or dict."
    )
