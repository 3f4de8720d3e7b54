"""Jitter: how much later than its nominal instant a schedule fires, so that many schedules do not fire at the same moment.

Derived from the names of the DAG and the schedule: the same on every machine, after every deploy, for every fire. A fire keeps
its nominal instant; only its due time moves. Because all fires of a schedule move by the same amount, their order stays.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from evertick.domain.schedule import ScheduleSpec


def delay_of(spec: ScheduleSpec, *, dag: str, name: str) -> timedelta:
    """From zero up to the schedule's jitter, exclusive, in whole milliseconds."""
    if not spec.jitter_seconds:
        return timedelta(0)
    drawn = int.from_bytes(hashlib.sha256(f"{dag}\0{name}".encode()).digest()[:8], "big")
    return timedelta(milliseconds=drawn * round(spec.jitter_seconds * 1000) >> 64)
