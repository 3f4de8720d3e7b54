"""Airflow's timetables as schedules of Evertick. They are recognized by the names of their classes, which are the same in
every release of Airflow 3, whether a DAG has the ones of its SDK or those of its core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from evertick.airflow.assets import asset_name, is_alias
from evertick.airflow.findings import Findings
from evertick.airflow.partitions import Unsupported, compile_mapper, compile_partitions, zone_name
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.computed import timetable_name
from evertick.domain.schedules.dependencies import Condition, Source
from evertick.domain.schedules.misfire import MOST_MISSED, MisfirePolicy, OverlapPolicy, count_between, latest_between
from evertick.domain.schedules.partitions import mapper_text
from evertick.domain.schedules.spec import EARLIEST, ScheduleSpec, parse_schedule

# The logical date is the start of the interval that a run is for, and it is due at its end.
_INTERVAL_TIMETABLES = frozenset({"CronDataIntervalTimetable", "DeltaDataIntervalTimetable"})
_TICK = timedelta(microseconds=1)
_CRON = frozenset({"CronTriggerTimetable", "CronDataIntervalTimetable", "CronPartitionTimetable"})
_DELTA = frozenset({"DeltaTriggerTimetable", "DeltaDataIntervalTimetable"})


def compile_schedules(dag: Any, findings: Findings) -> tuple[NamedSchedule, ...]:
    try:
        made = tuple(_schedules_of(dag, dag.timetable, findings))
    except InvalidSchedule as error:
        findings.add("AF207", error)
        return ()
    past = [count_between(each.spec, EARLIEST, datetime.now(UTC)) for each in made if each.spec.catchup]
    if dag.catchup and past and max(past) > MOST_MISSED:
        findings.add("AF206", max(past))
    policy = MisfirePolicy.ALL if dag.catchup else MisfirePolicy.LATEST
    return tuple(replace(each, misfire=each.misfire or policy) for each in made)


def kind_of(timetable: Any) -> str:
    """The name of its class, or of the built-in class that it extends without changing anything."""
    for each in type(timetable).__mro__:
        if each.__module__.startswith("airflow."):
            own = type(timetable).__mro__[: type(timetable).__mro__.index(each)]
            changed = any(not name.startswith("__") for base in own for name in vars(base))
            return type(timetable).__name__ if changed else each.__name__
    return type(timetable).__name__


def timed_part(timetable: Any) -> Any:
    """The part of a timetable that depends on time."""
    return timetable.timetable if kind_of(timetable) == "AssetOrTimeSchedule" else timetable


def _computed(dag: Any, timetable: Any) -> NamedSchedule:
    """A schedule whose instants the timetable computes when the file is loaded; see `timetables.py`."""
    kind = type(timetable)
    try:
        state = repr(timetable.serialize())
    except Exception:  # user code, or the SDK's, which does not serialize
        state = repr(timetable)
    name = timetable_name(kind, kind.__module__, kind.__qualname__, state)
    return _named("default", {"kind": "computed", "timetable": name, **_bounds(dag), "end_at": None})


def interval_of(
    dag: Any, schedule: ScheduleSpec, due_at: datetime, *, is_planned: bool
) -> tuple[datetime, datetime] | None:
    """What a run is for; None if not for an interval. A run that was triggered by hand is for the last one that is over."""
    timetable, kind = dag.timetable, kind_of(dag.timetable)
    own = _field(timetable, "interval", None) if kind in _CRON | _DELTA else None
    if kind not in _INTERVAL_TIMETABLES and not own:
        return None
    end = due_at if is_planned else latest_between(schedule, EARLIEST, due_at) or due_at
    if own:
        return plain(end - own), end
    start = latest_between(schedule, EARLIEST, end - _TICK)
    if start is None:  # the first one: a schedule has no due time before it begins
        every = schedule.every_seconds
        start = end if every is None else end - timedelta(seconds=every)
    return start, end


def _schedules_of(dag: Any, timetable: Any, findings: Findings) -> Iterator[NamedSchedule]:
    kind = kind_of(timetable)
    if kind in ("NullTimetable", "PartitionedAtRuntime"):
        return
    if kind in _DELTA and not isinstance(_field(timetable, "delta"), timedelta):
        yield _computed(dag, timetable)  # a relativedelta
    elif kind == "CronPartitionTimetable":
        partitions = compile_partitions(timetable).to_text()
        yield _named("default", {**_timed(dag, timetable, kind), "partitions": partitions})
    elif kind in _CRON or kind in _DELTA:
        yield _named("default", _timed(dag, timetable, kind))
    elif kind == "MultipleCronTriggerTimetable":
        yield _computed(dag, timetable)
    elif kind == "EventsTimetable":
        yield _named(
            "default", {"kind": "times", "times": [plain(each) for each in timetable.event_dates], **_bounds(dag)}
        )
    elif kind == "OnceTimetable":
        if dag.start_date is not None:  # without one it never runs, as under Airflow
            yield _named("default", {"kind": "once", "at": plain(dag.start_date), "catchup": True})
    elif kind == "ContinuousTimetable":
        # The next run begins within a second of the end of the one before.
        spec = parse_schedule({"kind": "interval", "every_seconds": 1, **_bounds(dag), "catchup": None})
        yield NamedSchedule(name="default", spec=spec, misfire=MisfirePolicy.LATEST, overlap=OverlapPolicy.SKIP)
    elif kind in ("AssetTriggeredTimetable", "AssetOrTimeSchedule"):
        condition = _condition(timetable.asset_condition, findings)
        if condition is not None:
            yield NamedSchedule(name="assets", spec=parse_schedule(condition))
        if kind == "AssetOrTimeSchedule":
            yield from _schedules_of(dag, timetable.timetable, findings)
    elif kind == "PartitionedAssetTimetable":
        try:
            condition = _condition(timetable.asset_condition, findings, timetable)
        except Unsupported as error:
            findings.add("AF204", f"partitions with a mapper of your own ({error})")
        else:
            if condition is not None:
                yield NamedSchedule(name="assets", spec=parse_schedule(condition))
    else:
        yield _computed(dag, timetable)


def _timed(dag: Any, timetable: Any, kind: str) -> dict[str, object]:
    if kind in _CRON:
        return {
            "kind": "cron",
            "expression": _field(timetable, "expression"),
            "timezone": zone_name(_field(timetable, "timezone")),
            **_bounds(dag),
        }
    delta = _field(timetable, "delta")
    anchor = {"anchor_at": plain(dag.start_date)} if _is_meant(dag.start_date) else {}
    return {"kind": "interval", "every_seconds": delta.total_seconds(), **anchor, **_bounds(dag)}


def _named(name: str, fields: dict[str, object]) -> NamedSchedule:
    return NamedSchedule(name=name, spec=parse_schedule(fields))


def _bounds(dag: Any) -> dict[str, object]:
    """It begins at the DAG's start: with catchup=False, the last instant that is past gets a run, and with True each."""
    given = {"start_at": dag.start_date, "end_at": dag.end_date}
    bounds: dict[str, object] = {name: plain(instant) for name, instant in given.items() if _is_meant(instant)}
    return {**bounds, "catchup": True} if "start_at" in bounds else bounds


def _is_meant(instant: datetime | None) -> bool:
    """`datetime.min` is often written for no date."""
    return instant is not None and instant.year >= EARLIEST.year


def plain(instant: datetime) -> datetime:
    """Without the classes of pendulum, whose arithmetic differs. Dates without a zone are in UTC, as in Airflow."""
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return datetime.fromisoformat(aware.isoformat()).astimezone(UTC)


def _field(timetable: Any, name: str, *default: Any) -> Any:
    """A timetable of the SDK has `timezone`, one of the core has `_timezone`."""
    found = getattr(timetable, name, None)
    return found if found is not None else getattr(timetable, f"_{name}", *default)


def _condition(asset: Any, findings: Findings, timetable: Any = None) -> Condition | Source | None:
    """`timetable`: of partitions, whose runs are each for one. Other DAGs do not run after updates of partitions."""
    parts = getattr(asset, "objects", None)
    if is_alias(asset):
        if timetable is not None:
            findings.add("AF204", f"partitions of an alias ({asset.name!r})")
            return None
        return Source("alias", asset.name)
    if parts is None:
        if (name := asset_name(asset)) is None:
            findings.add("AF204", f"{type(asset).__name__} {getattr(asset, 'name', getattr(asset, 'uri', ''))!r}")
            return None
        mapper = None if timetable is None else mapper_text(compile_mapper(_mapper_of(timetable, asset, name)))
        return Source("asset", name, mapper, is_unkeyed=mapper is None)
    found = [made for each in parts if (made := _condition(each, findings, timetable)) is not None]
    if len(found) < len(parts):
        return None
    return Condition("any" if type(asset).__name__ == "AssetAny" else "all", tuple(found))


def _mapper_of(timetable: Any, asset: Any, name: str) -> Any:
    """Its own by the name or URI of the asset, or the default."""
    own = _field(timetable, "partition_mapper_config")
    for each, mapper in own.items():
        if asset_name(each) == name or (getattr(each, "uri", None) or object()) == getattr(asset, "uri", None):
            return mapper
    return _field(timetable, "default_partition_mapper")
