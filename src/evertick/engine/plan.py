"""Plans the next step of schedules, as rows for the store: the pure step between a cursor in the database and a fire.

Shared by firing, publishing, pausing and deleting, which all decide due fires before they change anything.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from functools import lru_cache

from evertick.domain.errors import EvertickError
from evertick.domain.misfire import (
    MOST_MISSED,
    FirePlan,
    MisfirePolicy,
    SkipRange,
    SkipReason,
    never_was,
    plan_fires,
    skip_until,
)
from evertick.domain.overlap import OverlapPolicy
from evertick.domain.schedule import ScheduleSpec, describe, next_after
from evertick.store.schedules import DagSchedule, DueSchedule

JsonObject = dict[str, object]
FIRES_PER_CALL = 100
_NONE = timedelta(0)
# The errors that a stored schedule can cause in its own planning.
UNPLANNABLE = (EvertickError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_spec(raw: JsonObject | str) -> ScheduleSpec:
    """Parse a schedule from the database, decoded or as stored. Cached: validation takes a third of the time of a fire,
    and many schedules are alike."""
    return _parsed(raw if isinstance(raw, str) else json.dumps(raw))


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> ScheduleSpec:
    return ScheduleSpec.from_json(text)


def in_words(raw: JsonObject) -> str:
    """A stored schedule in words, even if it cannot be parsed."""
    try:
        return describe(read_spec(raw))
    except UNPLANNABLE:
        return "cannot be read"


def spec_json(spec: ScheduleSpec) -> JsonObject:
    stored: JsonObject = json.loads(spec.to_json())
    return stored


def plan_row(
    due: DueSchedule | DagSchedule,
    now: datetime,
    *,
    most_fires: int = FIRES_PER_CALL,
    policy: MisfirePolicy | None = None,
    window_seconds: float | None = None,
) -> JsonObject | None:
    """The plan for `settle_schedules` of one schedule that is due at `now`; None if it is not.

    Without an explicit policy and window, the schedule's own apply.
    """
    if due.next_due is None or due.next_due > now:
        return None
    delay = timedelta(seconds=due.delay_seconds) if due.delay_seconds else _NONE
    plan = plan_fires(
        read_spec(due.spec),
        next_due=due.next_due - delay,
        now=now - delay,
        policy=policy or MisfirePolicy(due.misfire),
        window_seconds=due.window_seconds if window_seconds is None else window_seconds,
        limit=most_fires,
        most_missed=due.catchup_limit or MOST_MISSED,
    )
    return _row(due, plan)


def plan_if_possible(schedule: DagSchedule, now: datetime) -> JsonObject | None:
    """The same for a change of a schedule: one that cannot be planned or is quarantined has nothing to decide, and must not
    prevent its own repair."""
    if schedule.paused or schedule.error is not None:
        return None
    try:
        return plan_row(schedule, now)
    except UNPLANNABLE:
        return None


def plan_end(schedule: DagSchedule, now: datetime) -> JsonObject | None:
    """The plan for everything due until `now` of a schedule that is about to change or end. The fires that a pause suppressed
    are skipped and recorded."""
    if not schedule.paused and schedule.error is None:
        return plan_if_possible(schedule, now)
    return plan_skip(schedule, now, SkipReason.PAUSED if schedule.paused else SkipReason.SET_ASIDE)


def plan_skip(schedule: DagSchedule, now: datetime, reason: SkipReason) -> JsonObject | None:
    """Skip everything that is due and continue after `now`. None for a schedule that cannot be parsed: the scheduler
    quarantines it when it is due."""
    if schedule.next_due is None or schedule.next_due > now:
        return None
    delay = timedelta(seconds=schedule.delay_seconds)
    try:
        spec = read_spec(schedule.spec)
        skipped = skip_until(spec, next_due=schedule.next_due - delay, now=now - delay, reason=reason)
        following = next_after(spec, now - delay)
        missing = never_was(spec, schedule.next_due - delay, following)
    except UNPLANNABLE:
        return None
    return _row(schedule, FirePlan(fires=(), skipped=skipped, next_due=following, missing=missing))


def is_last(plan: JsonObject, now: datetime) -> bool:
    """Whether nothing is due any more once this plan is carried out."""
    following = plan["next_due"]
    return following is None or datetime.fromisoformat(str(following)) > now


def is_same_spec(stored: str, wanted: object) -> bool:
    try:
        return bool(json.loads(stored) == wanted)
    except (ValueError, RecursionError):
        return False


def skip_row(skipped: SkipRange | None) -> JsonObject | None:
    if skipped is None:
        return None
    return {
        "first_at": skipped.first.isoformat(),
        "last_at": skipped.last.isoformat(),
        "count": skipped.count,
        "reason": skipped.reason,
    }


def _row(due: DueSchedule | DagSchedule, plan: FirePlan) -> JsonObject:
    assert due.next_due is not None
    following = plan.next_due
    if following is not None and due.delay_seconds:
        following += timedelta(seconds=due.delay_seconds)
    fires = [fire.isoformat() for fire in plan.fires]
    row: JsonObject = {
        "schedule_id": due.schedule_id,
        "version": due.version,
        "expected": due.next_due.isoformat(),
        "fires": fires,
        "last_fire": fires[-1] if fires else None,
        "next_due": following.isoformat() if following else None,
    }
    # Only if set: without them the database neither looks for open runs nor sets a deadline.
    if plan.skipped is not None:
        row["skipped"] = skip_row(plan.skipped)
    if plan.missing is not None:
        row["missing"] = skip_row(plan.missing)
    if due.overlap != OverlapPolicy.ALLOW:
        row["overlap"] = due.overlap
    if due.start_within is not None or due.finish_within is not None:
        row["has_deadlines"] = True
    return row
