"""Airflow's timetables as schedules of Evertick. They are told apart by the names of their classes, which are the same in
every release of Airflow 3, whether a DAG has the ones of its SDK or those of its core."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from evertick.airflow.findings import Findings
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.dependencies import Asset, Condition, Source
from evertick.domain.schedules.misfire import MOST_MISSED, count_between
from evertick.domain.schedules.spec import EARLIEST, parse_schedule

# Their logical date is the start of the interval that a run is for, and they are due at its end.
INTERVAL_TIMETABLES = frozenset({"CronDataIntervalTimetable", "DeltaDataIntervalTimetable"})
_CRON = frozenset({"CronTriggerTimetable", "CronDataIntervalTimetable"})
_DELTA = frozenset({"DeltaTriggerTimetable", "DeltaDataIntervalTimetable"})


def compile_schedules(dag: Any, findings: Findings) -> tuple[NamedSchedule, ...]:
    try:
        made = tuple(_schedules_of(dag, dag.timetable, findings))
    except InvalidSchedule as error:
        findings.add("AF207", error)
        return ()
    past = [count_between(each.spec, EARLIEST, datetime.now(UTC)) for each in made if each.spec.catchup]
    if past and max(past) > MOST_MISSED:
        findings.add("AF206", max(past))
    return made


def kind_of(timetable: Any) -> str:
    """The name of its class, or of the built-in class that it extends without changing anything."""
    for each in type(timetable).__mro__:
        if each.__module__.startswith("airflow."):
            own = type(timetable).__mro__[: type(timetable).__mro__.index(each)]
            changed = any(not name.startswith("__") for base in own for name in vars(base))
            return type(timetable).__name__ if changed else each.__name__
    return type(timetable).__name__


def asset_name(asset: Any) -> str | None:
    """The name under which Evertick records an asset's events; None for what is no single asset."""
    if type(asset).__name__ in ("Asset", "Dataset", "Model", "AssetNameRef"):
        return str(asset.name)
    return None


def _schedules_of(dag: Any, timetable: Any, findings: Findings) -> Iterator[NamedSchedule]:
    kind = kind_of(timetable)
    if kind in ("NullTimetable", "PartitionedAtRuntime"):
        return
    if kind in _CRON or kind in _DELTA:
        yield _named("default", _timed(dag, timetable, kind, findings))
    elif kind == "MultipleCronTriggerTimetable":
        findings.add("AF208")
        for number, each in enumerate(_field(timetable, "timetables"), start=1):
            yield _named(f"cron-{number}", _timed(dag, each, "CronTriggerTimetable", findings))
    elif kind == "EventsTimetable":
        yield _named(
            "default", {"kind": "times", "times": [plain(each) for each in timetable.event_dates], **_bounds(dag)}
        )
    elif kind == "OnceTimetable":
        if dag.start_date is not None:  # without one it never runs, as under Airflow
            yield _named("default", {"kind": "once", "at": plain(dag.start_date), "catchup": True})
    elif kind == "ContinuousTimetable":
        findings.add("AF202")
    elif kind in ("AssetTriggeredTimetable", "AssetOrTimeSchedule"):
        condition = _condition(timetable.asset_condition, findings)
        if condition is not None:
            yield NamedSchedule(name="assets", spec=parse_schedule(condition))
        if kind == "AssetOrTimeSchedule":
            yield from _schedules_of(dag, timetable.timetable, findings)
    elif kind == "PartitionedAssetTimetable" or kind == "CronPartitionTimetable":
        findings.add("AF204", "partitions of assets" if "Asset" in kind else "partitions")
    else:
        findings.add("AF201", f"{type(timetable).__module__}.{type(timetable).__name__}")


def _timed(dag: Any, timetable: Any, kind: str, findings: Findings) -> dict[str, object]:
    if kind in _CRON:
        if interval := _field(timetable, "interval", None):
            findings.add("AF209", interval)
        zone = _field(timetable, "timezone")
        return {
            "kind": "cron",
            "expression": _field(timetable, "expression"),
            "timezone": zone if isinstance(zone, str) else zone.name,
            **_bounds(dag),
        }
    delta = _field(timetable, "delta")
    if not isinstance(delta, timedelta):
        findings.add("AF203", delta)
        delta = timedelta(days=1)
    anchor = {"anchor_at": plain(dag.start_date)} if _is_meant(dag.start_date) else {}
    return {"kind": "interval", "every_seconds": delta.total_seconds(), **anchor, **_bounds(dag)}


def _named(name: str, fields: dict[str, object]) -> NamedSchedule:
    return NamedSchedule(name=name, spec=parse_schedule(fields))


def _bounds(dag: Any) -> dict[str, object]:
    given = {"start_at": dag.start_date, "end_at": dag.end_date}
    bounds: dict[str, object] = {name: plain(instant) for name, instant in given.items() if _is_meant(instant)}
    return {**bounds, "catchup": True} if dag.catchup and "start_at" in bounds else bounds


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


def _condition(asset: Any, findings: Findings) -> Condition | Source | None:
    parts = getattr(asset, "objects", None)
    if parts is None:
        if (name := asset_name(asset)) is None:
            findings.add("AF204", f"{type(asset).__name__} {getattr(asset, 'name', getattr(asset, 'uri', ''))!r}")
            return None
        return Asset(name)
    found = [made for each in parts if (made := _condition(each, findings)) is not None]
    if len(found) < len(parts):
        return None
    return Condition("any" if type(asset).__name__ == "AssetAny" else "all", tuple(found))
