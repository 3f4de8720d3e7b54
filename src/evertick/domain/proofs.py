"""The guarantees that are checked continuously, and the instants at which a schedule owed a fire.

Pure: the queries are in `db/queries/proofs`, the order of the checks in `engine/proofs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from evertick.domain.schedules.spec import ScheduleSpec, next_after

# A change of a schedule is planned a moment before its transaction begins: fires that close to it belong to either version.
EDGE = timedelta(seconds=5)


class Check(StrEnum):
    """Each by the name that its statement has in `db/queries/proofs`."""

    FIRE_UNANSWERED = "fire_unanswered"
    TRIGGER_LOST = "trigger_lost"
    EVENT_UNDELIVERED = "event_undelivered"
    RUN_WITHOUT_CAUSE = "run_without_cause"
    RUN_WITHOUT_STATUS = "run_without_status"
    RUN_COUNTED_WRONG = "run_counted_wrong"
    RUN_ENDED_EARLY = "run_ended_early"
    RUN_RESULT_WRONG = "run_result_wrong"
    RUNNING_WITHOUT_LEASE = "running_without_lease"
    QUEUED_WITHOUT_DISPATCH = "queued_without_dispatch"
    AVAILABLE_WITHOUT_PLACE = "available_without_place"
    PENDING_WITHOUT_TIMER = "pending_without_timer"
    PENDING_WITHOUT_CAUSE = "pending_without_cause"
    DEFERRED_WITHOUT_WAIT = "deferred_without_wait"
    RETRIES_OVER_BUDGET = "retries_over_budget"
    ATTEMPT_ENDED_TWICE = "attempt_ended_twice"
    EPOCH_WENT_BACK = "epoch_went_back"
    LEASE_WITHOUT_TASK = "lease_without_task"
    TWO_OWNERS = "two_owners"
    READY_WITHOUT_TASK = "ready_without_task"
    TIMER_WITHOUT_TASK = "timer_without_task"
    WAITER_WITHOUT_TASK = "waiter_without_task"
    HOLDER_WITHOUT_TASK = "holder_without_task"
    GATE_COUNTED_WRONG = "gate_counted_wrong"
    GATE_OVER_SIZE = "gate_over_size"
    BACKFILL_COUNTED_WRONG = "backfill_counted_wrong"


GUARANTEES: dict[Check, str] = {
    Check.FIRE_UNANSWERED: "Every due instant of a schedule has exactly one run or one skip record.",
    Check.TRIGGER_LOST: "Every acknowledged trigger has its run.",
    Check.EVENT_UNDELIVERED: "Every event is delivered to the waits and schedules that depend on it.",
    Check.RUN_WITHOUT_CAUSE: "Every open run has a task that can move.",
    Check.RUN_WITHOUT_STATUS: "Every run has one status.",
    Check.RUN_COUNTED_WRONG: "The counters of a run follow from its tasks.",
    Check.RUN_ENDED_EARLY: "A run ends after all of its tasks.",
    Check.RUN_RESULT_WRONG: "The state of a run follows from its last tasks.",
    Check.RUNNING_WITHOUT_LEASE: "Every running task has a lease of its runner.",
    Check.QUEUED_WITHOUT_DISPATCH: "Every queued task is on the list of an executor.",
    Check.AVAILABLE_WITHOUT_PLACE: "Every available task is in the ready queue once.",
    Check.PENDING_WITHOUT_TIMER: "Every task that waits for a time has a timer.",
    Check.PENDING_WITHOUT_CAUSE: "Every pending task waits for a time, a gate or a pause.",
    Check.DEFERRED_WITHOUT_WAIT: "Every deferred task is woken by something.",
    Check.RETRIES_OVER_BUDGET: "No task uses more attempts than it has.",
    Check.ATTEMPT_ENDED_TWICE: "No attempt ends twice.",
    Check.EPOCH_WENT_BACK: "No stale attempt writes a result, a log or an end.",
    Check.LEASE_WITHOUT_TASK: "Every lease belongs to a running task.",
    Check.TWO_OWNERS: "No task has two owners.",
    Check.READY_WITHOUT_TASK: "Every place in the ready queue belongs to an available task.",
    Check.TIMER_WITHOUT_TASK: "Every timer is processed when it is due.",
    Check.WAITER_WITHOUT_TASK: "Every place in the queue of a gate belongs to a pending task.",
    Check.HOLDER_WITHOUT_TASK: "Only tasks that are admitted hold slots of gates.",
    Check.GATE_COUNTED_WRONG: "The used slots of a gate are those of its holders.",
    Check.GATE_OVER_SIZE: "No pool and no mutex has more slots in use than it has.",
    Check.BACKFILL_COUNTED_WRONG: "The counters of a backfill fit together.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveVersion:
    """One version of a schedule, from `since` until the next one."""

    spec: ScheduleSpec
    since: datetime
    until: datetime | None
    is_active: bool
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """`subject` identifies it: the task, the run, the schedule and the instant, or the gate."""

    check: Check
    subject: str
    detail: str
    run_id: int | None = None
    idx: int | None = None
    map_index: int | None = None


def owed_fires(versions: Sequence[ActiveVersion], after: datetime, until: datetime) -> Iterator[datetime]:
    """The nominal instants that were due in `after` < due <= `until`, without those at the edge of a version."""
    for version in versions:
        if not version.is_active:
            continue
        delay = timedelta(seconds=version.delay_seconds)
        first = max(after, version.since + EDGE)
        last = until if version.until is None else min(until, version.until - EDGE)
        instant = next_after(version.spec, first - delay) if first < last else None
        while instant is not None and instant + delay <= last:
            yield instant
            instant = next_after(version.spec, instant)
