"""Evertick: a reliable and punctual workflow and job scheduler. This module has the names that DAG files import.

They are loaded on first use: every service and command imports this package, and few of them write DAGs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evertick.authoring import notify
    from evertick.authoring.context import TaskContext, current_context
    from evertick.authoring.dag import dag
    from evertick.authoring.decorators import setup, task, teardown
    from evertick.authoring.draft import task_group
    from evertick.authoring.kinds import http, program
    from evertick.authoring.outputs import push
    from evertick.authoring.signals import Done, Fail, RetryAfter, Skip
    from evertick.authoring.task import shell
    from evertick.authoring.trigger import trigger_dag
    from evertick.authoring.waiting import approval, wait_for, wait_for_event, wait_until
    from evertick.domain.after import Asset, after, all_of, any_of, finished
    from evertick.domain.params import Param

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
    "after": "evertick.domain.after",
    "all_of": "evertick.domain.after",
    "any_of": "evertick.domain.after",
    "approval": "evertick.authoring.waiting",
    "Asset": "evertick.domain.after",
    "current_context": "evertick.authoring.context",
    "dag": "evertick.authoring.dag",
    "Done": "evertick.authoring.signals",
    "Fail": "evertick.authoring.signals",
    "finished": "evertick.domain.after",
    "http": "evertick.authoring.kinds",
    "Param": "evertick.domain.params",
    "program": "evertick.authoring.kinds",
    "push": "evertick.authoring.outputs",
    "RetryAfter": "evertick.authoring.signals",
    "setup": "evertick.authoring.decorators",
    "shell": "evertick.authoring.task",
    "Skip": "evertick.authoring.signals",
    "task": "evertick.authoring.decorators",
    "task_group": "evertick.authoring.draft",
    "TaskContext": "evertick.authoring.context",
    "teardown": "evertick.authoring.decorators",
    "trigger_dag": "evertick.authoring.trigger",
    "wait_for": "evertick.authoring.waiting",
    "wait_for_event": "evertick.authoring.waiting",
    "wait_until": "evertick.authoring.waiting",
}


def __getattr__(name: str) -> object:
    if name == "notify":
        return import_module("evertick.authoring.notify")
    if name in _MODULES:
        found: object = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'evertick' has no attribute {name!r}; it has {', '.join(__all__)}")
