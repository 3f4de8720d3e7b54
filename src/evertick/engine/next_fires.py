"""When a saved schedule fires next, from where it stands. Changes nothing."""

from __future__ import annotations

from datetime import datetime, timedelta

from evertick.domain.schedule import next_after
from evertick.engine.plan import UNPLANNABLE, read_spec
from evertick.store.schedules import ListedSchedule


def fires_of(row: ListedSchedule, count: int) -> list[datetime]:
    """The next fires, from where the schedule stands; none while it is paused or in error. Nominal ones: with jitter each is
    due a little later."""
    if row.paused or row.error or row.next_due is None:
        return []
    fires = [row.next_due - timedelta(seconds=row.delay_seconds)]
    try:
        spec = read_spec(row.spec)
        while len(fires) < count and (following := next_after(spec, fires[-1])) is not None:
            fires.append(following)
    except UNPLANNABLE:
        return []  # nobody has tried to fire it yet
    return fires
