"""Turns a task's return value into JSON that PostgreSQL can store, or into the reason why it cannot. Never raises.

Plain values are written by the fast encoder alone; types that JSON lacks use the slower `typed_json`. NUL characters
and lone surrogates, which jsonb refuses, become U+FFFD; the caller gets their number and reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from evertick.domain.attempt import RESULT_TAG, UNSTORABLE, storable_text
from evertick.execution.fast_json import json_encoder

DEFAULT_RESULT_BYTES = 1024 * 1024
_to_json = json_encoder(allow_nan=False)


class EncodedResult(NamedTuple):
    """Either `text`, with the number of replaced characters, or the `refusal` that fails the task."""

    text: str | None
    refusal: str | None = None
    replaced_count: int = 0


def encode_result(value: Any, max_bytes: int = DEFAULT_RESULT_BYTES) -> EncodedResult:
    if value is None:
        return EncodedResult(None)
    try:
        text = _to_json(value)
        if RESULT_TAG in text:
            return _encode_typed(value, max_bytes)
        return _within_bounds(text, value, max_bytes)
    except (TypeError, ValueError, RecursionError):
        return _encode_typed(value, max_bytes)


def encode_outputs(value: Any, pushed: Mapping[str, object], max_bytes: int = DEFAULT_RESULT_BYTES) -> EncodedResult:
    """A result with the outputs that were pushed by name."""
    typed = _typed()
    try:
        named = {name: typed.to_plain(item, f"output {name!r}") for name, item in pushed.items()}
        plain = {RESULT_TAG: "outputs", "value": typed.to_plain(value), "named": named}
    except (typed.Unstorable, TypeError, ValueError, RecursionError) as error:
        return _refused(error)
    return _within_bounds(_to_json(plain), plain, max_bytes)


def _encode_typed(value: Any, max_bytes: int) -> EncodedResult:
    typed = _typed()
    try:
        plain = typed.to_plain(value)
        return _within_bounds(_to_json(plain), plain, max_bytes)
    except (typed.Unstorable, TypeError, ValueError, RecursionError) as error:
        return _refused(error)


def _refused(error: Exception) -> EncodedResult:
    if isinstance(error, RecursionError):
        return EncodedResult(
            None, "result cannot be stored: it is nested too deeply or contains itself; return a flatter value"
        )
    return EncodedResult(
        None,
        f"result cannot be stored as JSON: {storable_text(str(error))}; return only dict, list, set, str, int, finite float,"
        " bool, None, bytes, Decimal, UUID, dates and times, and dataclasses, pydantic models or enums of a module",
    )


def _typed() -> ModuleType:
    """Imported when a value first needs it: otherwise every attempt's process would map its modules."""
    from evertick.execution import typed_json

    return typed_json


def decode_inputs(inputs: Any, read_file: Callable[[str, int], str]) -> Any:
    """Upstream results, with types that JSON lacks restored. Raises ResultLost."""
    return _typed().from_plain(inputs, read_file)


def _within_bounds(text: str, value: Any, max_bytes: int) -> EncodedResult:
    replaced_count = 0
    if "\\u0000" in text or (not text.isascii() and UNSTORABLE.search(text)):
        cleaned, replaced_count = _clean(value)
        text = _to_json(cleaned)
    size = len(text) if text.isascii() else len(text.encode())
    if size > max_bytes:
        return EncodedResult(
            None,
            f"result too large: {type(value).__name__} of {size:,} bytes as JSON, at most {max_bytes:,} are kept; "
            "write it to a file or a table and return its location",
        )
    return EncodedResult(text, None, replaced_count)


def _clean(value: Any) -> tuple[Any, int]:
    if isinstance(value, str):
        return UNSTORABLE.subn("\ufffd", value)
    if isinstance(value, dict):
        pairs = [(_clean(key), _clean(item)) for key, item in value.items()]
        return {key[0]: item[0] for key, item in pairs}, sum(key[1] + item[1] for key, item in pairs)
    if isinstance(value, list | tuple):
        items = [_clean(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0
