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

_PLACES = {
    "evertick.authoring.context": ("TaskContext", "current_context"),
    "evertick.authoring.dag": ("dag",),
    "evertick.authoring.draft": ("task_group",),
    "evertick.authoring.decorators": ("setup", "task", "teardown"),
    "evertick.authoring.kinds": ("http", "program"),
    "evertick.authoring.outputs": ("push",),
    "evertick.authoring.signals": ("Done", "Fail", "RetryAfter", "Skip"),
    "evertick.authoring.task": ("shell",),
    "evertick.authoring.trigger": ("trigger_dag",),
    "evertick.authoring.waiting": ("approval", "wait_for", "wait_for_event", "wait_until"),
    "evertick.domain.after": ("Asset", "after", "all_of", "any_of", "finished"),
    "evertick.domain.params": ("Param",),
}


def __getattr__(name: str) -> object:
    if name == "notify":
        return import_module("evertick.authoring.notify")
    for module, names in _PLACES.items():
        if name in names:
            found: object = getattr(import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'evertick' has no attribute {name!r}; it has {', '.join(__all__)}")
