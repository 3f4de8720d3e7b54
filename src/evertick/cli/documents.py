"""What programs read: one JSON document per command, with stable names and times in UTC."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any


def print_json(document: object) -> None:
    """ASCII only, so that any terminal and any encoding can take it."""
    sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")
    sys.stdout.flush()


def document(record: Any, *, without: Collection[str] = ()) -> dict[str, object]:
    """A record's fields under their own names. `without` are those that mean nothing outside the database."""
    return {name: value for name, value in asdict(record).items() if name not in without}


def iso(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return iso(value)
    if is_dataclass(value) and not isinstance(value, type):
        return document(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON document")
