"""Turns a task's return value into JSON that PostgreSQL can store, or into the reason why it cannot. Never raises.

NUL characters and lone surrogates, which jsonb refuses, become U+FFFD; the caller is told how many and says so.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from evertick.execution.fast_json import json_encoder

DEFAULT_RESULT_BYTES = 1024 * 1024

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
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
        return _within_bounds(_to_json(value), value, max_bytes)
    except (TypeError, ValueError, RecursionError) as error:
        return EncodedResult(None, _refusal(value, error))


def storable_text(text: str) -> str:
    """Any text as PostgreSQL can hold it: what cannot be stored is shown as U+FFFD."""
    if text.isascii() and "\x00" not in text:
        return text
    return _UNSTORABLE.sub("\ufffd", text)


def _within_bounds(text: str, value: Any, max_bytes: int) -> EncodedResult:
    replaced_count = 0
    if "\\u0000" in text or (not text.isascii() and _UNSTORABLE.search(text)):
        cleaned, replaced_count = _clean(value)
        text = _to_json(cleaned)
    size = len(text) if text.isascii() else len(text.encode())
    if size > max_bytes:
        return EncodedResult(
            None,
            f"result too large: {type(value).__name__} of {size:,} bytes as JSON, at most {max_bytes:,} are kept; "
            "write it to a file or a table and return where it is",
        )
    return EncodedResult(text, None, replaced_count)


def _clean(value: Any) -> tuple[Any, int]:
    if isinstance(value, str):
        return _UNSTORABLE.subn("\ufffd", value)
    if isinstance(value, dict):
        pairs = [(_clean(key), _clean(item)) for key, item in value.items()]
        return {key[0]: item[0] for key, item in pairs}, sum(key[1] + item[1] for key, item in pairs)
    if isinstance(value, list | tuple):
        items = [_clean(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0


def _refusal(value: Any, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "result cannot be stored: it is nested too deeply or contains itself; return a flatter value"
    culprit = _find_culprit(value, "result", depth=0)
    if culprit is None:
        return f"result cannot be stored as JSON: {storable_text(str(error))}"
    where, what = culprit
    return (
        f"result cannot be stored as JSON: {where} is {what}; "
        "return only dict (with str keys), list, str, int, finite float, bool or None"
    )


def _find_culprit(value: Any, where: str, depth: int) -> tuple[str, str] | None:
    """The first part of the value that JSON lacks, by its path."""
    if depth > 50 or value is None or isinstance(value, str | bool):
        return None
    if isinstance(value, int | float):
        return (where, str(value)) if isinstance(value, float) and not math.isfinite(value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | bool | None):
                return where, f"a dict with a key of type {type(key).__name__}"
            if found := _find_culprit(item, f"{where}[{key!r}]", depth + 1):
                return found
        return None
    if isinstance(value, list | tuple):
        found_in = (_find_culprit(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value))
        return next((found for found in found_in if found), None)
    return where, f"of type {type(value).__name__}"
