"""Values that JSON lacks, in JSON: `{"$evertick": "decimal", "value": "1.50"}`. Never pickle, never an arbitrary type.

Reading restores the value. A dataclass, a pydantic model or an enum is created only from a class that the reader can
import and that is of that kind, any other class only by an installed serializer; a task's own dict that looks like this
form is wrapped, so that it is restored unchanged.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from importlib import import_module
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from evertick.domain.attempt import RESULT_TAG
from evertick.domain.errors import ResultLost
from evertick.extensions import ExtensionKind, find_extension, find_serializer
from evertick.sdk.runtime import Outputs

_PLAIN_KEYS = (str, int, float, bool, type(None))
_TYPED_KEYS = (datetime, date, time, timedelta, Decimal, UUID, bytes, Enum)


class Unstorable(Exception):
    """The first part of a value that cannot be stored, by its path."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} is {what}")


def to_plain(value: object, where: str = "result") -> Any:
    """The value as JSON can hold it. Raises Unstorable, or RecursionError if it contains itself."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Unstorable(where, str(value))
        return value
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _plain_mapping(value, where)
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value, where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
        plain = {name: to_plain(item, f"{where}.{name}") for name, item in given.items()}
        return {RESULT_TAG: "dataclass", "class": _name_of(type(value), where), "value": plain}
    if _is_model(type(value)):
        dumped = json.loads(cast(Any, value).model_dump_json())
        return {RESULT_TAG: "pydantic", "class": _name_of(type(value), where), "value": dumped}
    if (plain := _encoded(value, where)) is not None:
        return plain
    raise Unstorable(where, f"of type {type(value).__name__}")


def from_plain(value: Any, read_file: Callable[[str, int], str]) -> Any:
    """The inverse of `to_plain`. `read_file` reads a part that is stored outside the database, by its hash and size."""
    if type(value) is list:
        return [from_plain(item, read_file) for item in value]
    if type(value) is not dict:
        return value
    tag = value.get(RESULT_TAG)
    if tag is None:
        return {key: from_plain(item, read_file) for key, item in value.items()}
    if tag == "file":
        return from_plain(json.loads(read_file(str(value["sha256"]), int(value["bytes"]))), read_file)
    if tag == "outputs":
        named = {name: from_plain(item, read_file) for name, item in value["named"].items()}
        return Outputs(from_plain(value["value"], read_file), named)
    if (read := _READERS.get(tag)) is None:
        raise ResultLost(
            f"a result has a part of kind {tag!r}, which this version of Evertick does not know: update it."
        )
    inner = {key: from_plain(item, read_file) for key, item in value.items() if key not in (RESULT_TAG, "class")}
    try:
        return read({**inner, "class": value.get("class"), "raw": value.get("value")})
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        what = value.get("class") or tag
        raise ResultLost(f"a result cannot be read as {what}: {type(error).__name__}: {error}") from None


def _plain_mapping(value: Mapping[Any, Any], where: str) -> Any:
    for key in value:
        if not isinstance(key, _PLAIN_KEYS + _TYPED_KEYS):
            raise Unstorable(where, f"a dict with a key of type {type(key).__name__}")
    if RESULT_TAG not in value and all(isinstance(key, _PLAIN_KEYS) for key in value):
        return {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [[to_plain(key, where), to_plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {RESULT_TAG: "dict", "value": pairs}


def _write_datetime(value: datetime, _where: str) -> Any:
    """With its offset, which tells the two hours apart that a clock shows twice, and the name of its zone if it has one."""
    plain = {RESULT_TAG: "datetime", "value": value.replace(fold=0 if value.tzinfo is None else value.fold).isoformat()}
    if isinstance(value.tzinfo, ZoneInfo) and value.tzinfo.key:
        plain["zone"] = value.tzinfo.key
    return plain


def _read_datetime(raw: Mapping[str, Any]) -> datetime:
    read = datetime.fromisoformat(raw["value"])
    if (zone := _zone(raw)) is None:
        return read
    for fold in (0, 1):
        if (local := read.replace(tzinfo=zone, fold=fold)).utcoffset() == read.utcoffset():
            return local
    return read.astimezone(zone)  # the zone's rules have changed since


def _write_time(value: time, _where: str) -> Any:
    plain = {RESULT_TAG: "time", "value": value.isoformat()}
    if isinstance(value.tzinfo, ZoneInfo) and value.tzinfo.key:
        plain = {RESULT_TAG: "time", "value": value.replace(tzinfo=None).isoformat(), "zone": value.tzinfo.key}
    return plain


def _read_time(raw: Mapping[str, Any]) -> time:
    read = time.fromisoformat(raw["value"])
    return read.replace(tzinfo=zone) if (zone := _zone(raw)) is not None else read


def _zone(raw: Mapping[str, Any]) -> ZoneInfo | None:
    """If this machine lacks the zone, the offset remains, which gives the same instant."""
    try:
        return ZoneInfo(raw["zone"]) if "zone" in raw else None
    except (ZoneInfoNotFoundError, ValueError):
        return None


def _write_set(value: set[Any] | frozenset[Any], where: str) -> Any:
    """Sorted by their texts: the same set is the same JSON."""
    members = sorted((to_plain(item, f"an item of {where}") for item in value), key=lambda item: json.dumps(item))
    return {RESULT_TAG: "frozenset" if isinstance(value, frozenset) else "set", "value": members}


def _name_of(kind: type, where: str) -> str:
    """`module:Class`, checked to lead back to the class."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    found: object = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise Unstorable(where, f"of the class {kind.__qualname__}, which is not at the top level of a module")
    return name


def _class_of(name: str, is_right: Callable[[type], bool]) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = sys.modules.get(module) or import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ResultLost(f"a result is of the class {name}, which cannot be imported here: {error}.") from None
    if not isinstance(found, type) or not is_right(found):
        raise ResultLost(f"a result is of the class {name}, which is not of the kind that it was stored as.")
    return found


def _is_model(kind: type) -> bool:
    """A pydantic model, recognized by its ancestors: importing pydantic to check would cost every process that has no
    models."""
    return any(each.__module__.startswith("pydantic.") and each.__name__ == "BaseModel" for each in kind.__mro__)


def _encoded(value: object, where: str) -> Any:
    """By a serializer; None without one. Asked last: the search takes some milliseconds."""
    try:
        if (found := find_serializer(value)) is None:
            return None
        name, serializer = found
        return {RESULT_TAG: "serializer", "class": name, "value": to_plain(serializer.encode(value), where)}
    except (Unstorable, RecursionError):
        raise
    except Exception as error:
        raise Unstorable(where, f"refused by its serializer: {type(error).__name__}: {error}") from None


def _decoded(name: str, stored: object) -> Any:
    try:
        serializer: Any = find_extension(ExtensionKind.SERIALIZER, name)
        if serializer is not None:
            return serializer.decode(stored)
    except Exception as error:
        raise ResultLost(f"a result of the class {name} cannot be read: {type(error).__name__}: {error}") from None
    raise ResultLost(f"a result is of the class {name}, whose serializer is not installed here.")


_WRITERS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (datetime, _write_datetime),
    (date, lambda value, _: {RESULT_TAG: "date", "value": value.isoformat()}),
    (time, _write_time),
    (timedelta, lambda value, _: {RESULT_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}),
    (Decimal, lambda value, _: {RESULT_TAG: "decimal", "value": str(value)}),
    (UUID, lambda value, _: {RESULT_TAG: "uuid", "value": str(value)}),
    (bytes | bytearray, lambda value, _: {RESULT_TAG: "bytes", "value": base64.b64encode(value).decode()}),
    (Enum, lambda value, where: {RESULT_TAG: "enum", "class": _name_of(type(value), where), "value": value.name}),
    (set | frozenset, _write_set),
)

_READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "datetime": _read_datetime,
    "date": lambda raw: date.fromisoformat(raw["value"]),
    "time": _read_time,
    "timedelta": lambda raw: timedelta(*raw["value"]),
    "decimal": lambda raw: Decimal(raw["value"]),
    "uuid": lambda raw: UUID(raw["value"]),
    "bytes": lambda raw: base64.b64decode(raw["value"], validate=True),
    "serializer": lambda raw: _decoded(raw["class"], raw["value"]),
    "enum": lambda raw: _class_of(raw["class"], lambda kind: issubclass(kind, Enum))[raw["value"]],
    "set": lambda raw: set(raw["value"]),
    "frozenset": lambda raw: frozenset(raw["value"]),
    "dict": lambda raw: dict(raw["value"]),
    "dataclass": lambda raw: _class_of(raw["class"], dataclasses.is_dataclass)(**raw["value"]),
    "pydantic": lambda raw: _class_of(raw["class"], _is_model).model_validate_json(json.dumps(raw["raw"])),
}
