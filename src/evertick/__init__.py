"""Evertick: a reliable and punctual workflow and job scheduler. This module has the names that DAG files import.

They are loaded on first use: every service and command imports this package, and few of them write DAGs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evertick.domain.schedules.calendars import on_calendar
    from evertick.domain.schedules.dependencies import (
        Asset,
        after,
        all_of,
        any_of,
        each_update,
        fan_out,
        finished,
        rollup,
    )
    from evertick.domain.schedules.events import on_event
    from evertick.domain.schedules.partition_keys import daily, hourly, monthly, static, weekly
    from evertick.sdk import notify
    from evertick.sdk.builder import chain
    from evertick.sdk.calendars import calendar, calendar_from_ics, country, exchange
    from evertick.sdk.dag import dag
    from evertick.sdk.decorators import setup, task, teardown
    from evertick.sdk.groups import task_group
    from evertick.sdk.operators import http, program, trigger_dag
    from evertick.sdk.params import Param
    from evertick.sdk.runtime import Done, Fail, RetryAfter, Skip, TaskContext, current_context, push
    from evertick.sdk.task import shell
    from evertick.sdk.waits import approval, wait_for, wait_for_event, wait_until

__all__ = [
    "Asset",
    "Done",
    "Fail",
    "Param",
    "RetryAfter",
    "Skip",
    "TaskContext",
    "after",
    "all_of",
    "any_of",
    "approval",
    "calendar",
    "calendar_from_ics",
    "chain",
    "country",
    "current_context",
    "dag",
    "daily",
    "each_update",
    "exchange",
    "fan_out",
    "finished",
    "hourly",
    "http",
    "monthly",
    "notify",
    "on_calendar",
    "on_event",
    "program",
    "push",
    "rollup",
    "setup",
    "shell",
    "static",
    "task",
    "task_group",
    "teardown",
    "trigger_dag",
    "wait_for",
    "wait_for_event",
    "wait_until",
    "weekly",
]

_NAMES = {
    "domain.schedules.dependencies": (
        *("Asset", "after", "all_of", "any_of", "each_update", "fan_out", "finished", "rollup"),
    ),
    "domain.schedules.calendars": ("on_calendar",),
    "domain.schedules.events": ("on_event",),
    "domain.schedules.partition_keys": ("daily", "hourly", "monthly", "static", "weekly"),
    "sdk.builder": ("chain",),
    "sdk.calendars": ("calendar", "calendar_from_ics", "country", "exchange"),
    "sdk.dag": ("dag",),
    "sdk.decorators": ("setup", "task", "teardown"),
    "sdk.groups": ("task_group",),
    "sdk.operators": ("http", "program", "trigger_dag"),
    "sdk.params": ("Param",),
    "sdk.runtime": ("Done", "Fail", "RetryAfter", "Skip", "TaskContext", "current_context", "push"),
    "sdk.task": ("shell",),
    "sdk.waits": ("approval", "wait_for", "wait_for_event", "wait_until"),
}
_MODULES = {name: f"evertick.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "notify":
        return import_module("evertick.sdk.notify")
    if name in _MODULES:
        found: object = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found
        return found
    hints = import_module("evertick.sdk.airflow_names")
    if name in hints.IMPORTS:
        # Not an AttributeError: `from evertick import DAG` would replace its text with one that has no hint.
        raise ImportError(f"evertick has no {name!r}: {hints.import_hint(name)}", name="evertick")
    raise AttributeError(f"module 'evertick' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
