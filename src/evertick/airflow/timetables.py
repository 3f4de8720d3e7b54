"""The instants of a custom timetable, each with its data interval: the DAG's own code computes them when its file is loaded.

They are counted from the DAG's `start_date`, so that each load finds the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any

from airflow.timetables.base import DataInterval, TimeRestriction

from evertick.airflow.schedules import kind_of, plain
from evertick.domain.errors import InvalidDag
from evertick.domain.schedules.computed import MOST_AHEAD, MOST_BEHIND, Instant

_LONGEST_SECONDS = 10.0
# Crons are due at the same instants whatever they are counted from.
_CRONS = frozenset({"MultipleCronTriggerTimetable"})
_CRON_LOOKBACK = timedelta(days=370)


def instants(dag: Any, timetable: Any, now: datetime) -> list[Instant]:
    """The last ones until now, and the next ones."""
    found: list[Instant] = []
    started = time.monotonic()
    ahead = 0
    for each in _all(dag, timetable, now):
        found.append(each)
        ahead += each.at > now
        if ahead >= MOST_AHEAD:
            break
        if time.monotonic() - started > _LONGEST_SECONDS:
            if ahead:
                break
            name = type(timetable).__name__
            raise InvalidDag(f"timetable {name} has too many runs between start_date and now; set a later start_date.")
    return found[-(ahead + MOST_BEHIND) :]


def _all(dag: Any, timetable: Any, now: datetime) -> Iterator[Instant]:
    earliest = None if dag.start_date is None else _instance(plain(dag.start_date))
    if kind_of(timetable) in _CRONS and not dag.catchup:
        recent = _instance(now - _CRON_LOOKBACK)
        earliest = recent if earliest is None else max(earliest, recent)
    latest = None if dag.end_date is None else _instance(plain(dag.end_date))
    restriction = TimeRestriction(earliest=earliest, latest=latest, catchup=True)
    core, last, before = _core(timetable), None, None
    while True:
        info = core.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)
        if info is None or (before is not None and info.run_after <= before):
            return
        before, last = info.run_after, info.data_interval or DataInterval.exact(info.run_after)
        yield Instant(at=plain(info.run_after), start=plain(last.start), end=plain(last.end))


def manual_interval(timetable: Any, run_after: datetime) -> tuple[datetime, datetime]:
    """What a run that was triggered by hand is for."""
    found = _core(timetable).infer_manual_data_interval(run_after=_instance(run_after))
    return plain(found.start), plain(found.end)


def _instance(at: datetime) -> Any:
    """As timetables expect it."""
    return import_module("pendulum").instance(at)


def _core(timetable: Any) -> Any:
    """A timetable of the SDK only declares; that of Airflow's core computes."""
    if hasattr(timetable, "next_dagrun_info"):
        return timetable
    return import_module("airflow.serialization.encoders").coerce_to_core_timetable(timetable)
