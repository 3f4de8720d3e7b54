"""How much later than its nominal instant a schedule fires, so that many at the same instant do not crowd.

Fixed by the names of the DAG and the schedule: the same on every machine, after every deploy, for every fire. A fire is
known by its nominal instant; only when it is due moves. Because all of a schedule's fires move alike, their order stays.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from evertick.domain.schedule import ScheduleSpec


def delay_of(spec: ScheduleSpec, *, dag: str, name: str) -> timedelta:
    """From nothing until before the schedule's jitter, in whole milliseconds."""
    if not spec.jitter_seconds:
        return timedelta(0)
    drawn = int.from_bytes(hashlib.sha256(f"{dag}\0{name}".encode()).digest()[:8], "big")
    return timedelta(milliseconds=drawn * round(spec.jitter_seconds * 1000) >> 64)
