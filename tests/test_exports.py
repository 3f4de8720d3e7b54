"""The public names, pinned: removing one breaks DAG files, adding one is a decision."""

from __future__ import annotations

import evertick
from evertick.sdk.dag import DagOptions
from evertick.sdk.options import TaskOptions


def test_the_names_that_dag_files_import() -> None:
    assert evertick.__all__ == [
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
        "chain",
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
    assert all(hasattr(evertick, name) for name in evertick.__all__)


def test_the_options_of_dags() -> None:
    assert sorted(DagOptions.__annotations__) == [
        "anchor_at",
        "catchup",
        "catchup_limit",
        "catchup_window",
        "description",
        "end_at",
        "executor_options",
        "finish_within",
        "jitter",
        "max_active_runs",
        "max_active_tasks",
        "misfire",
        "name",
        "on_deadline",
        "on_failure",
        "on_retry",
        "on_success",
        "overlap",
        "owner",
        "params",
        "paused",
        "retries",
        "run_timeout",
        "schedule",
        "schedules",
        "start_at",
        "start_within",
        "tags",
        "task_defaults",
        "timezone",
    ]


def test_the_options_of_tasks() -> None:
    assert sorted(TaskOptions.__annotations__) == [
        "connections",
        "depends_on_past",
        "executor_options",
        "finish_within",
        "isolation",
        "max_active",
        "max_instances",
        "mutex",
        "mutex_shared",
        "name",
        "never_on",
        "on_deadline",
        "on_failure",
        "on_lost_contact",
        "on_retry",
        "on_skipped",
        "on_success",
        "order",
        "outlets",
        "outputs",
        "parallel",
        "pool",
        "priority",
        "queue",
        "queue_timeout",
        "rate",
        "rerun_on_loss",
        "retries",
        "retry_backoff",
        "retry_delay",
        "retry_jitter",
        "retry_max_delay",
        "retry_on",
        "secrets",
        "setup",
        "timeout",
        "trigger_rule",
        "variables",
    ]
