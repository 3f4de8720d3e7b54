"""Where schedules go next, as rows for the store: the pure step between a cursor in the database and a fire.

Shared by firing, publishing, pausing and deleting, which all settle what is due before they change anything.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache

from evertick.domain.misfire import FirePlan, MisfirePolicy, SkipRange, plan_fires
from evertick.domain.schedule import ScheduleSpec
from evertick.store.schedules import DagSchedule, DueSchedule

JsonObject = dict[str, object]
FIRES_PER_CALL = 100


def read_spec(raw: JsonObject) -> ScheduleSpec:
    """The schedule that the database holds. Checking it takes a third of the time of a fire, and many are alike."""
    return _parsed(json.dumps(raw))


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> ScheduleSpec:
    return ScheduleSpec.from_json(text)


def spec_json(spec: ScheduleSpec) -> JsonObject:
    stored: JsonObject = json.loads(spec.to_json())
    return stored


def plan_row(due: DueSchedule | DagSchedule, now: datetime) -> JsonObject | None:
    """What `settle_schedules` must do about one schedule that is due at `now`; nothing if it is not."""
    if due.next_due is None or due.next_due > now:
        return None
    plan = plan_fires(
        read_spec(due.spec),
        next_due=due.next_due,
        now=now,
        policy=MisfirePolicy(due.misfire),
        window_seconds=due.window_seconds,
        limit=FIRES_PER_CALL,
    )
    return _row(due, plan)


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
