"""What Airflow's SDK does anew for each attempt or in each fork, and need not. No result of a task depends on it."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from airflow.sdk.execution_time import task_runner
from pydantic import JsonValue, TypeAdapter

from airflow import settings

_JSON: TypeAdapter[Any] = TypeAdapter(JsonValue)


def _adapter(kind: Any, **options: Any) -> TypeAdapter[Any]:
    return _JSON if kind is JsonValue and not options else TypeAdapter(kind, **options)


def install() -> None:
    """In a process that runs tasks, or forks such processes. A name that this release does not have is left out."""
    # Half the time of a small task: the SDK makes an adapter for each template field.
    if getattr(task_runner, "TypeAdapter", None) is TypeAdapter:
        task_runner.TypeAdapter = _adapter
    found = getattr(task_runner, "get_hostname", None)
    if found is not None and not hasattr(found, "cache_info"):
        task_runner.get_hostname = cache(found)
    _leave_database()


def _leave_database() -> None:
    """Airflow's own supervisor denies tasks its database, too. Without this, each fork replaces the pools of its engines: a
    tenth of the time of a small task."""
    for name in ("engine", "async_engine"):
        engine = getattr(settings, name, None)
        if engine is not None:
            with suppress(Exception):  # of a driver
                getattr(engine, "sync_engine", engine).dispose()
            delattr(settings, name)
