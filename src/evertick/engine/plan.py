"""Where schedules go next, as rows for the store: the pure step between a cursor in the database and a fire.

Shared by firing, publishing, pausing and deleting, which all settle what is due before they change anything.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache

from evertick.domain.errors import EvertickError
from evertick.domain.misfire import FirePlan, MisfirePolicy, SkipRange, plan_fires
from evertick.domain.schedule import ScheduleSpec, describe
from evertick.store.schedules import DagSchedule, DueSchedule

JsonObject = dict[str, object]
FIRES_PER_CALL = 100
# What a stored schedule can make of its own planning.
UNPLANNABLE = (EvertickError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_spec(raw: JsonObject | str) -> ScheduleSpec:
    """The schedule that the database holds, decoded or as it is stored. Checking it takes a third of the time of a fire,
    and many are alike."""
    return _parsed(raw if isinstance(raw, str) else json.dumps(raw))


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> ScheduleSpec:
    return ScheduleSpec.from_json(text)


def in_words(raw: JsonObject) -> str:
    """A stored schedule for people, also one that cannot be read."""
    try:
        return describe(read_spec(raw))
    except UNPLANNABLE:
        return "cannot be read"


def spec_json(spec: ScheduleSpec) -> JsonObject:
    stored: JsonObject = json.loads(spec.to_json())
    return stored


def plan_row(due: DueSchedule | DagSchedule, now: datetime, *, most_fires: int = FIRES_PER_CALL) -> JsonObject | None:
    """What `settle_schedules` must do about one schedule that is due at `now`; nothing if it is not."""
    if due.next_due is None or due.next_due > now:
        return None
    plan = plan_fires(
        read_spec(due.spec),
        next_due=due.next_due,
        now=now,
        policy=MisfirePolicy(due.misfire),
        window_seconds=due.window_seconds,
        limit=most_fires,
    )
    return _row(due, plan)


def plan_if_possible(schedule: DagSchedule, now: datetime) -> JsonObject | None:
    """The same for whoever changes a schedule: what cannot be planned or is set aside has nothing to be settled, and must not
    keep anybody from putting it right."""
    if schedule.paused or schedule.error is not None:
        return None
    try:
        return plan_row(schedule, now)
    except UNPLANNABLE:
        return None


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
    return {
        "schedule_id": due.schedule_id,
        "version": due.version,
        "expected": due.next_due.isoformat(),
        "fires": [fire.isoformat() for fire in plan.fires],
        "last_fire": plan.fires[-1].isoformat() if plan.fires else None,
        "skipped": skip_row(plan.skipped),
        "next_due": plan.next_due.isoformat() if plan.next_due else None,
    }
