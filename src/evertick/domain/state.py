"""The state that tasks keep: values by key that survive attempts and runs, of a task, of a task in one run, or of an asset."""

from __future__ import annotations

from enum import StrEnum

from evertick.domain.errors import UserError

MOST_KEYS = 1000
MOST_STEPS = 1000
LONGEST_KEY = 512
LONGEST_STEP = 200
LARGEST_VALUE_BYTES = 1024 * 1024


class StateScope(StrEnum):
    """Of all runs of a task, of one run of it (Airflow's task state store), or of an asset."""

    TASK = "task"
    RUN = "run"
    ASSET = "asset"


def check_key(key: object) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY or "\0" in key:
        raise UserError(f"{key!r:.100} cannot be a key of state: use a text of 1 to {LONGEST_KEY} characters.")
    return key


def check_step(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_STEP or "\0" in name:
        raise UserError(f"{name!r:.100} cannot name a step: use a text of 1 to {LONGEST_STEP} characters.")
    return name


def check_size(text: str, what: str) -> str:
    """`text` is the value as JSON."""
    size = len(text) if text.isascii() else len(text.encode())
    if size > LARGEST_VALUE_BYTES:
        raise UserError(
            f"the value of {what} has {size:,} bytes as JSON, at most {LARGEST_VALUE_BYTES:,} are kept: write it to a file"
            " or a table, and keep its location."
        )
    return text
