"""Airflow's partition mappers and partitioned timetables as those of Evertick. Built-in classes are recognized by their names; one
of the user's own would have to run in the scheduler, and is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.configuration import conf

from evertick.domain.schedules.partition_keys import Partitions
from evertick.domain.schedules.partitions import (
    MOST_KEYS,
    Chain,
    FanOut,
    Mapper,
    OneKey,
    OnlyKeys,
    Period,
    Product,
    Rollup,
    SameKey,
    Segments,
    TimeKeys,
    Window,
    window_of,
)


class Unsupported(Exception):
    """A class that is not one of Airflow's own."""


_PERIODS = {f"StartOf{period.value.title()}Mapper": period for period in Period}
_WINDOWS = {f"{period.value.title()}Window": period for period in Period}


def compile_mapper(mapper: Any) -> Mapper:
    """Raises Unsupported."""
    kind = _kind(mapper)
    if kind in _PERIODS:
        return TimeKeys(
            period=_PERIODS[kind],
            timezone=zone_name(mapper._timezone),
            reads=mapper.input_format,
            writes=mapper.output_format,
        )
    match kind:
        case "IdentityMapper":
            return SameKey()
        case "AllowedKeyMapper":
            return OnlyKeys(keys=tuple(mapper.allowed_keys))
        case "FixedKeyMapper":
            return OneKey(key=mapper.downstream_key)
        case "ChainMapper":
            return Chain(parts=tuple(map(compile_mapper, mapper.mappers)), most=_most(mapper))
        case "ProductMapper":
            return Product(parts=tuple(map(compile_mapper, mapper.mappers)), delimiter=mapper.delimiter)
        case "RollupMapper":
            return Rollup(
                mapper=compile_mapper(mapper.upstream_mapper),
                window=_window(mapper.window),
                at_least=_at_least(getattr(mapper, "wait_policy", None)),
            )
        case "FanOutMapper":
            return FanOut(
                mapper=compile_mapper(mapper.upstream_mapper),
                window=_window(mapper.window),
                writes=compile_mapper(mapper.downstream_mapper),
                most=_most(mapper),
            )
    raise Unsupported(type(mapper).__name__)


def compile_partitions(timetable: Any) -> Partitions:
    """Of a `CronPartitionTimetable`, whose runs each have a key."""
    return Partitions(
        timezone=zone_name(_field(timetable, "timezone")),
        offset=_field(timetable, "run_offset") or 0,
        format=_field(timetable, "key_format"),
    )


def zone_name(zone: Any) -> str:
    """A name, or the offset of a zone that has only one."""
    if isinstance(zone, str):
        return zone
    name = str(getattr(zone, "name", "") or getattr(zone, "key", ""))
    if name and name[0] not in "+-":
        return name
    offset = zone.utcoffset(None)
    sign, distance = ("-", -offset) if offset < timedelta() else ("+", offset)
    minutes = int(distance.total_seconds()) // 60
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}"


def _kind(made: Any) -> str:
    """The name of its class, if that is Airflow's own."""
    if not type(made).__module__.startswith("airflow."):
        raise Unsupported(type(made).__name__)
    return type(made).__name__


def _most(mapper: Any) -> int:
    return getattr(mapper, "max_downstream_keys", None) or _global_most()


def _global_most() -> int:
    return int(conf.getint("scheduler", "partition_mapper_max_downstream_keys", fallback=MOST_KEYS))


def _window(window: Any) -> Window:
    kind = _kind(window)
    if kind in _WINDOWS:
        return window_of(_WINDOWS[kind], is_trailing=str(window.direction.value) == "backward")
    if kind == "SegmentWindow":
        return Segments(
            keys=tuple(sorted(window.to_upstream(None) if hasattr(window, "to_upstream") else window._segments))
        )
    raise Unsupported(type(window).__name__)


def _at_least(policy: Any) -> int | None:
    if policy is None or _kind(policy) == "WaitForAll":
        return None
    if _kind(policy) == "MinimumCount":
        return int(policy.n)
    raise Unsupported(type(policy).__name__)


def _field(timetable: Any, name: str) -> Any:
    """A timetable of the SDK has `run_offset`, one of the core has `_run_offset`."""
    return getattr(timetable, name) if hasattr(timetable, name) else getattr(timetable, f"_{name}")
