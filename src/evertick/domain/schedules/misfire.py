"""The misfire decision: which due fires become runs, and which are skipped and recorded. Also overlap policy and jitter.

Every due instant ends in exactly one of the two, and the cursor moves past it. Never reads a clock: `now` is an argument.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from math import isnan
from typing import assert_never

from evertick.domain.schedules.cron import Cron
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, next_after

# A change of leader takes up to 6 s. A fire that is no later than this is on time, whatever the policy and the window say.
ON_TIME_SECONDS = 10.0


# The most fires that "all" runs after a long outage, unless the schedule has a smaller limit.
MOST_MISSED = 1000


LONGEST_WINDOW_SECONDS = 3e9


_TICK = timedelta(microseconds=1)


_ON_TIME = timedelta(seconds=ON_TIME_SECONDS)


class MisfirePolicy(StrEnum):
    """What a schedule that fell behind runs of the fires that are no longer on time: nothing, the last one if none is on
    time, or every one. A single due instant always fires."""

    SKIP = "skip"
    LATEST = "latest"
    ALL = "all"


class SkipReason(StrEnum):
    MISFIRE_SKIP = "misfire_skip"
    MISFIRE_LATEST = "misfire_latest"
    OUTSIDE_WINDOW = "outside_window"
    OVER_LIMIT = "over_limit"
    PAUSED = "paused"
    SET_ASIDE = "set_aside"
    PAST = "past_when_published"
    NEVER_WAS = "never_was"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRange:
    """`count` due instants from `first` to `last`, inclusive, that get no run."""

    first: datetime
    last: datetime
    count: int
    reason: SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FirePlan:
    """The runs to create, the skip to record, and the new cursor (None: the schedule has ended). `missing`: the passed wall
    times that never occurred."""

    fires: tuple[datetime, ...]
    skipped: SkipRange | None
    next_due: datetime | None
    missing: SkipRange | None = None


def plan_fires(
    spec: ScheduleSpec,
    *,
    next_due: datetime,
    now: datetime,
    policy: MisfirePolicy,
    window_seconds: float | None,
    limit: int,
    most_missed: int | None = None,
) -> FirePlan:
    """Decide every fire that is due from the cursor `next_due` until `now`.

    Instants that are on time fire in every case. Those older than the window are skipped, and with "all" also the oldest
    ones beyond `most_missed`.
    `limit` bounds the fires of one call; a returned `next_due` at or before `now` means that more are due: call again.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}: one call must be allowed at least one fire")
    if window_seconds is not None and isnan(window_seconds):
        raise ValueError("the catch-up window is not a number")
    if next_due > now:
        return FirePlan(fires=(), skipped=None, next_due=next_due)
    following = next_after(spec, next_due)
    if next_due >= now - _ON_TIME and (following is None or following > now):
        # The usual case: a single instant is due, and neither the policy nor the window applies.
        plan = FirePlan(fires=(next_due,), skipped=None, next_due=following)
    else:
        plan = _catch_up(spec, (next_due, following), now, policy, window_seconds, limit, most_missed)
    missing = never_was(spec, next_due, plan.next_due)
    return plan if missing is None else replace(plan, missing=missing)


def _catch_up(
    spec: ScheduleSpec,
    due: tuple[datetime, datetime | None],
    now: datetime,
    policy: MisfirePolicy,
    window_seconds: float | None,
    limit: int,
    most_missed: int | None,
) -> FirePlan:
    """The same for a cursor that is behind; `due` is the instant and the one after it."""
    next_due, following = due
    window = LONGEST_WINDOW_SECONDS if window_seconds is None else min(window_seconds, LONGEST_WINDOW_SECONDS)
    oldest = now - timedelta(seconds=max(window, ON_TIME_SECONDS))
    if policy is MisfirePolicy.ALL:
        return _fire_since(spec, next_due, now, _oldest_of(spec, next_due, now, oldest, most_missed), limit)
    is_behind = following is not None and following <= now
    last = (latest_between(spec, next_due, now) or next_due) if is_behind else next_due
    reason = SkipReason.MISFIRE_SKIP if policy is MisfirePolicy.SKIP else SkipReason.MISFIRE_LATEST
    if last < oldest or (policy is MisfirePolicy.SKIP and is_behind and last < now - _ON_TIME):
        skipped = _skip(spec, next_due, last, SkipReason.OUTSIDE_WINDOW if last < oldest else reason)
        return FirePlan(fires=(), skipped=skipped, next_due=next_after(spec, last))
    return _fire_since(spec, next_due, now, (min(last, now - _ON_TIME), reason), limit)


def skip_until(spec: ScheduleSpec, *, next_due: datetime | None, now: datetime, reason: SkipReason) -> SkipRange | None:
    """Everything due until `now` of a schedule that was paused: none of it fires afterwards."""
    return None if next_due is None or next_due > now else _skip(spec, next_due, now, reason)


def never_was(spec: ScheduleSpec, after: datetime, through: datetime | None) -> SkipRange | None:
    """The wall times of a calendar schedule that never occurred because the zone skipped a day, while its cursor moves from
    `after` to `through`. They have no instant of their own: the record places them just before the clock jumped."""
    if spec.kind is not ScheduleKind.CRON or through is None or not (lost := spec.cron.lost_between(after, through)):
        return None
    at, count = lost
    return SkipRange(first=at - _TICK, last=at - _TICK, count=count, reason=SkipReason.NEVER_WAS)


def _oldest_of(
    spec: ScheduleSpec, next_due: datetime, now: datetime, oldest: datetime, most: int | None
) -> tuple[datetime, SkipReason]:
    """The first instant that "all" fires, and why earlier ones are skipped. The newest are kept: they are worth most, and
    those on time do not count as missed."""
    begin = max(next_due, oldest)
    if most is None or count_between(spec, begin - _TICK, now) <= most:
        return oldest, SkipReason.OUTSIDE_WINDOW
    ticks = range((now - begin) // _TICK)
    place = bisect_left(ticks, True, key=lambda tick: count_between(spec, begin + (tick - 1) * _TICK, now) <= most)
    first = min(begin + place * _TICK, now - _ON_TIME)
    return (first, SkipReason.OVER_LIMIT) if first > begin else (oldest, SkipReason.OUTSIDE_WINDOW)


def _fire_since(
    spec: ScheduleSpec, next_due: datetime, now: datetime, since: tuple[datetime, SkipReason], limit: int
) -> FirePlan:
    """All fires since that instant, oldest first, up to the limit; earlier ones are skipped."""
    skipped = None
    due: datetime | None = next_due
    oldest, reason = since
    if next_due < oldest:
        skipped = _skip(spec, next_due, oldest - _TICK, reason)
        due = next_after(spec, skipped.last)
    fires: list[datetime] = []
    while due is not None and due <= now and len(fires) < limit:
        fires.append(due)
        due = next_after(spec, due)
    return FirePlan(fires=tuple(fires), skipped=skipped, next_due=due)


def _skip(spec: ScheduleSpec, first: datetime, through: datetime, reason: SkipReason) -> SkipRange:
    """The fire `first`, which is due whatever the spec says now, and all later ones until `through`."""
    last = latest_between(spec, first, through) or first
    return SkipRange(first=first, last=last, count=1 + count_between(spec, first, through), reason=reason)


def count_between(spec: ScheduleSpec, after: datetime, through: datetime) -> int:
    """The number of fires after `after` and at or before `through`, counted without visiting each."""
    after = after if spec.start_at is None else max(after, spec.start_at - _TICK)
    through = through if spec.end_at is None else min(through, spec.end_at)
    if through <= after:
        return 0
    match spec.kind:
        case ScheduleKind.CRON:
            return spec.cron.count_between(after, through)
        case ScheduleKind.INTERVAL:
            return (through - spec.anchor) // spec.every - (after - spec.anchor) // spec.every
        case ScheduleKind.ONCE | ScheduleKind.TIMES | ScheduleKind.COMPUTED:
            return bisect_right(spec.instants, through) - bisect_right(spec.instants, after)
        case ScheduleKind.AFTER | ScheduleKind.EVENT:
            return 0
    assert_never(spec.kind)


def latest_between(spec: ScheduleSpec, after: datetime, through: datetime) -> datetime | None:
    """The last fire after `after` and at or before `through`, in a logarithmic number of steps."""
    through = through if spec.end_at is None else min(through, spec.end_at)
    first = next_after(spec, after)
    if first is None or first > through:
        return None
    match spec.kind:
        case ScheduleKind.CRON:
            return _latest_of_cron(spec.cron, first, through)
        case ScheduleKind.INTERVAL:
            return spec.anchor + (through - spec.anchor) // spec.every * spec.every
        case ScheduleKind.ONCE | ScheduleKind.TIMES | ScheduleKind.COMPUTED:
            return spec.instants[bisect_right(spec.instants, through) - 1]
        case ScheduleKind.AFTER | ScheduleKind.EVENT:
            return first
    assert_never(spec.kind)


def _latest_of_cron(cron: Cron, low: datetime, high: datetime) -> datetime:
    """Given a fire `low`, the last one at or before `high`."""
    through, stride = high, timedelta(seconds=1)
    # The last fire is usually near the end: step back from there in doubling strides, then bisect.
    while (probe := through - stride) > low:
        if (found := cron.next_after(probe)) is not None and found <= through:
            low = found
            break
        stride, high = stride * 2, probe
    while (later := cron.next_after(low)) is not None and later <= high:
        middle = low + (high - low) / 2
        beyond = cron.next_after(middle)
        if beyond is not None and beyond <= high:
            low = beyond
        else:
            low, high = later, middle
    return low


class OverlapPolicy(StrEnum):
    """Start anyway; skip and record it; queue one and skip further ones; queue all; or cancel the open runs first.

    Except for `allow`, one run of the schedule is active at a time.
    """

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    QUEUE_ALL = "queue_all"
    CANCEL = "cancel"


def delay_of(spec: ScheduleSpec, *, dag: str, name: str) -> timedelta:
    """From zero up to the schedule's jitter, exclusive, in whole milliseconds."""
    if not spec.jitter_seconds:
        return timedelta(0)
    drawn = int.from_bytes(hashlib.sha256(f"{dag}\0{name}".encode()).digest()[:8], "big")
    return timedelta(milliseconds=drawn * round(spec.jitter_seconds * 1000) >> 64)
