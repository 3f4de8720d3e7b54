"""Evertick: a reliable and punctual workflow and job scheduler. This module has the names that DAG files import.

They are loaded on first use: every service and command imports this package, and few of them write DAGs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evertick.domain.dags.params import Param
    from evertick.domain.schedules.dependencies import Asset, after, all_of, any_of, finished
    from evertick.sdk import notify
    from evertick.sdk.builder import task_group
    from evertick.sdk.dag import dag
    from evertick.sdk.decorators import setup, task, teardown
    from evertick.sdk.operators import http, program, trigger_dag
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
    "current_context",
    "dag",
    "finished",
    "http",
    "notify",
    "program",
    "push",
    "setup",
    "shell",
    "task",
    "task_group",
    "teardown",
    "trigger_dag",
    "wait_for",
    "wait_for_event",
    "wait_until",
]

_MODULES = {
    "after": "evertick.domain.schedules.dependencies",
    "all_of": "evertick.domain.schedules.dependencies",
    "any_of": "evertick.domain.schedules.dependencies",
    "approval": "evertick.sdk.waits",
    "Asset": "evertick.domain.schedules.dependencies",
    "current_context": "evertick.sdk.runtime",
    "dag": "evertick.sdk.dag",
    "Done": "evertick.sdk.runtime",
    "Fail": "evertick.sdk.runtime",
    "finished": "evertick.domain.schedules.dependencies",
    "http": "evertick.sdk.operators",
    "Param": "evertick.domain.dags.params",
    "program": "evertick.sdk.operators",
    "push": "evertick.sdk.runtime",
    "RetryAfter": "evertick.sdk.runtime",
    "setup": "evertick.sdk.decorators",
    "shell": "evertick.sdk.task",
    "Skip": "evertick.sdk.runtime",
    "task": "evertick.sdk.decorators",
    "task_group": "evertick.sdk.builder",
    "TaskContext": "evertick.sdk.runtime",
    "teardown": "evertick.sdk.decorators",
    "trigger_dag": "evertick.sdk.operators",
    "wait_for": "evertick.sdk.waits",
    "wait_for_event": "evertick.sdk.waits",
    "wait_until": "evertick.sdk.waits",
}


def __getattr__(name: str) -> object:
    if name == "notify":
        return import_module("evertick.sdk.notify")
    if name in _MODULES:
        found: object = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'evertick' has no attribute {name!r}; it has {', '.join(__all__)}")
