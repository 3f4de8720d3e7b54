"""When a saved schedule fires next, from where it stands. Changes nothing."""

from __future__ import annotations

from datetime import datetime, timedelta

from evertick.domain.schedule import next_after
from evertick.engine.plan import UNPLANNABLE, read_spec
from evertick.store.overview import Upcoming
from evertick.store.schedules import ListedSchedule


def fires_of(row: ListedSchedule, count: int) -> list[datetime]:
    """The next fires, from where the schedule stands; none while it is paused or in error. Nominal ones: with jitter each is
    due a little later."""
    if row.paused or row.error or row.next_due is None:
        return []
    return _fires(row.spec, row.next_due - timedelta(seconds=row.delay_seconds), count, None)


def fires_until(row: Upcoming, until: datetime, most: int) -> list[datetime]:
    """When it is due from now until then, at most so often."""
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
        return []  # nobody has tried to fire it yet
    return fires
