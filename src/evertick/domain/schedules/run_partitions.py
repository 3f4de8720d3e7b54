"""The partition of a run: by its time, by the updates that it waits for, or as a user names it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.dependencies import Condition, Source, holds, read_text, sources_of
from evertick.domain.schedules.misfire import latest_between
from evertick.domain.schedules.partition_keys import Partitions, read_partitions
from evertick.domain.schedules.partitions import Period, Rollup, SameKey, check_key, read_mapper
from evertick.domain.schedules.spec import EARLIEST, ScheduleKind, ScheduleSpec, next_after, parse_schedule

_TICK = timedelta(microseconds=1)
_CRONS = {
    Period.HOUR: "0 * * * *",
    Period.DAY: "0 0 * * *",
    Period.WEEK: "0 0 * * 1",
    Period.MONTH: "0 0 1 * *",
    Period.YEAR: "0 0 1 1 *",
}


@dataclass(frozen=True, slots=True)
class Partition:
    """`date`: the instant that the key stands for, if it stands for one."""

    key: str
    date: datetime | None = None

    def plain(self) -> tuple[str, str | None]:
        return self.key, None if self.date is None else self.date.isoformat()


def is_partitioned(spec: ScheduleSpec) -> bool:
    """Whether each run of the schedule is for a partition."""
    return spec.partitions is not None or (spec.kind is ScheduleKind.AFTER and has_mappers(read_text(spec.after or "")))


def has_mappers(condition: Condition | Source) -> bool:
    return any(source.mapper is not None for source in sources_of(condition))


def partition_at(spec: ScheduleSpec, at: datetime) -> Partition:
    """Of the run that a schedule with times and partitions starts at this instant."""
    assert spec.partitions is not None, "the schedule has partitions"
    parts = read_partitions(spec.partitions)
    if parts.keys:  # one instant for each, in a backfill
        return Partition(parts.keys[spec.instants.index(at)])
    date = parts.date_at(at) if parts.period is not None else _moved(spec, at, parts.offset)
    return Partition(parts.key_at(date), date)


def partition_date(spec: ScheduleSpec, key: str) -> datetime | None:
    """What a key stands for that a user gives to a run; InvalidSchedule if the schedule has no such partition."""
    check_key(key)
    if spec.partitions is not None:
        return read_partitions(spec.partitions).date_of(key)
    if spec.kind is not ScheduleKind.AFTER:
        return None
    try:
        dates = {
            date
            for source in sources_of(read_text(spec.after or ""))
            if source.mapper is not None and (date := read_mapper(source.mapper).date_of(key)) is not None
        }
    except (ValueError, OverflowError) as error:
        raise InvalidSchedule(f"partition {key[:60]!r} is not a key of this schedule: {error}") from None
    return dates.pop() if len(dates) == 1 else None


def backfill_of(spec: ScheduleSpec) -> ScheduleSpec:
    """The instants of its partitions themselves, whenever the schedule runs for them."""
    if spec.partitions is None:
        return spec
    parts = read_partitions(spec.partitions)
    if parts.keys:
        raise InvalidSchedule("its partitions have no dates: name them with --key")
    parts = replace(parts, offset=0)
    if parts.period is None:
        return replace(spec, partitions=parts.to_text())
    return parse_schedule(
        {"kind": "cron", "expression": _CRONS[parts.period], "timezone": parts.timezone, "partitions": parts.to_text()}
    )


def keys_at(keys: Sequence[str], first: datetime) -> ScheduleSpec:
    """A list of partitions as instants, one microsecond apart, of which a backfill makes its runs."""
    listed = list(dict.fromkeys(check_key(key) for key in keys))
    times = [first + place * _TICK for place in range(len(listed))]
    return parse_schedule({"kind": "times", "times": times, "partitions": Partitions(keys=tuple(listed)).to_text()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """An update that counts for a partition of a run: of which asset, with its own key, and the date of the run that made it."""

    asset: str
    key: str
    date: datetime | None = None


def is_ready(condition: Condition | Source, key: str, received: Iterable[Received]) -> bool:
    """Whether a run for this partition can start."""
    keys: dict[str, set[str]] = {}
    for each in received:
        keys.setdefault(each.asset, set()).add(each.key)

    def is_met(source: Source) -> bool:
        found = keys.get(source.name)
        if not found or source.mapper is None:
            return False
        mapper = read_mapper(source.mapper)
        try:
            return not isinstance(mapper, Rollup) or mapper.is_met(key, found)
        except (ValueError, OverflowError):
            return False  # no partition of this mapper: it can never be met

    return holds(condition, is_met)


def date_of_ready(condition: Condition | Source, key: str, received: Iterable[Received]) -> datetime | None:
    """The instant that the key stands for: what the mappers of the assets that were updated say, if they agree; if none says
    anything, what the updating runs were for."""
    listed = list(received)
    updated = {each.asset for each in listed}
    mappers = {
        source.name: read_mapper(source.mapper)
        for source in sources_of(condition)
        if source.mapper is not None and source.name in updated
    }
    try:
        dates = {date for each in mappers.values() if (date := each.date_of(key)) is not None}
    except (ValueError, OverflowError):
        return None
    if not dates:
        same = {name for name, each in mappers.items() if isinstance(each, SameKey)}
        dates = {each.date for each in listed if each.date is not None and each.asset in same}
    return dates.pop() if len(dates) == 1 else None


def _moved(spec: ScheduleSpec, at: datetime, count: int) -> datetime:
    """Another instant of the same schedule, also beyond its bounds."""
    endless = replace(spec, start_at=None, end_at=None, catchup=None)
    for _ in range(abs(count)):
        found = next_after(endless, at) if count > 0 else latest_between(endless, EARLIEST, at - _TICK)
        if found is None:
            break
        at = found
    return at
