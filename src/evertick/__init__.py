"""Evertick: a workflow and job scheduler that never dies and is on time. These are the names that DAG files import."""

from evertick.authoring.context import TaskContext, current_context
from evertick.authoring.dag import dag
from evertick.authoring.draft import task_group
from evertick.authoring.signals import Fail, RetryAfter, Skip
from evertick.authoring.task import shell, task
from evertick.domain.params import Param

__all__ = [
    "Fail",
    "Param",
    "RetryAfter",
    "Skip",
    "TaskContext",
    "current_context",
    "dag",
    "shell",
    "task",
    "task_group",
]
