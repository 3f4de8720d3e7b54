"""The one transition table of tasks and runs. The database's types and CHECK constraints and the tests are derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TaskState(StrEnum):
    WAITING = "waiting"
    PENDING = "pending"
    AVAILABLE = "available"
    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELED = "canceled"
    UPSTREAM_FAILED = "upstream_failed"


class RunState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELED = "canceled"


class RunKind(StrEnum):
    SCHEDULED = "scheduled"
    MANUAL = "manual"
    BACKFILL = "backfill"


_T = TaskState
_MARKED = frozenset({_T.SUCCESS, _T.FAILED, _T.SKIPPED})

TERMINAL_TASK_STATES = frozenset({_T.SUCCESS, _T.FAILED, _T.SKIPPED, _T.CANCELED, _T.UPSTREAM_FAILED})
FAILED_TASK_STATES = frozenset({_T.FAILED, _T.CANCELED, _T.UPSTREAM_FAILED})
TERMINAL_RUN_STATES = frozenset({RunState.SUCCESS, RunState.FAILED, RunState.CANCELED})

_REOPENED = frozenset({_T.WAITING, _T.PENDING, _T.AVAILABLE})

TASK_TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    _T.WAITING: _MARKED | {_T.PENDING, _T.AVAILABLE, _T.UPSTREAM_FAILED, _T.CANCELED},
    _T.PENDING: _MARKED | {_T.AVAILABLE, _T.DEFERRED, _T.CANCELED, _T.UPSTREAM_FAILED},
    _T.AVAILABLE: _MARKED | {_T.RUNNING, _T.QUEUED, _T.PENDING, _T.CANCELED},
    _T.QUEUED: _MARKED | {_T.RUNNING, _T.AVAILABLE, _T.PENDING, _T.CANCELED},
    _T.RUNNING: _MARKED | {_T.PENDING, _T.AVAILABLE, _T.DEFERRED, _T.CANCELED},
    _T.DEFERRED: _MARKED | {_T.PENDING, _T.CANCELED},
    **{
        terminal: (_REOPENED | TERMINAL_TASK_STATES) - {terminal, _T.CANCELED, _T.UPSTREAM_FAILED}
        for terminal in TERMINAL_TASK_STATES
    },
}

RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.QUEUED: frozenset({RunState.RUNNING, RunState.FAILED, RunState.CANCELED}),
    RunState.RUNNING: TERMINAL_RUN_STATES,
    **dict.fromkeys(TERMINAL_RUN_STATES, frozenset({RunState.QUEUED})),
}


class TriggerRule(StrEnum):
    """When a task may start, given how its upstream tasks ended. Airflow's thirteen, with Airflow's meaning."""

    ALL_SUCCESS = "all_success"
    ALL_FAILED = "all_failed"
    ALL_DONE = "all_done"
    ALL_DONE_MIN_ONE_SUCCESS = "all_done_min_one_success"
    ALL_DONE_SETUP_SUCCESS = "all_done_setup_success"
    ONE_SUCCESS = "one_success"
    ONE_FAILED = "one_failed"
    ONE_DONE = "one_done"
    NONE_FAILED = "none_failed"
    NONE_SKIPPED = "none_skipped"
    NONE_FAILED_MIN_ONE_SUCCESS = "none_failed_min_one_success"
    ALL_SKIPPED = "all_skipped"
    ALWAYS = "always"


# Airflow's names of the phases of the view `listed_task`; a task that waits has no state there.
AIRFLOW_TASK_STATES: Mapping[str, str] = {
    "pending": "scheduled",
    "available": "queued",
    "queued": "queued",
    "running": "running",
    "retrying": "up_for_retry",
    "deferred": "deferred",
    "polling": "up_for_reschedule",
    "success": "success",
    "failed": "failed",
    "skipped": "skipped",
    "canceled": "failed",
    "upstream_failed": "upstream_failed",
}
