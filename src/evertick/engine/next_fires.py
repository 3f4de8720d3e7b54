"""The next fires of a saved schedule, from its cursor. Changes nothing."""

from __future__ import annotations

from datetime import datetime, timedelta

from evertick.domain.schedule import next_after
from evertick.engine.plan import UNPLANNABLE, read_spec
from evertick.store.overview import Upcoming
from evertick.store.schedules import ListedSchedule


def fires_of(row: ListedSchedule, count: int) -> list[datetime]:
    """The next fires from the cursor; none while the schedule is paused or in error. Nominal instants: with jitter each is
    due a little later."""
    if row.paused or row.error or row.next_due is None:
        return []
    return _fires(row.spec, row.next_due - timedelta(seconds=row.delay_seconds), count, None)


def fires_until(row: Upcoming, until: datetime, most: int) -> list[datetime]:
    """When it is due from now to `until`, at most `most` times."""
    delay = timedelta(seconds=row.delay_seconds)
    return [each + delay for each in _fires(row.spec, row.next_due - delay, most, until - delay)]


def _fires(spec: dict[str, object], first: datetime, count: int, until: datetime | None) -> list[datetime]:
    fires = [first]
    try:
        parsed = read_spec(spec)
        while len(fires) < count and (following := next_after(parsed, fires[-1])) is not None:
            if until is not None and following > until:
                break
            fires.append(following)
    except UNPLANNABLE:
        return []  # not evaluated yet
    return fires
