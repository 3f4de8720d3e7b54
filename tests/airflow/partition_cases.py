"""Compares Evertick's mappers of partitions with Airflow's own, in Airflow's interpreter: the number of cases, and differences."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pendulum
from airflow.partition_mappers.base import is_rollup
from airflow.sdk import (
    AllowedKeyMapper,
    ChainMapper,
    CronPartitionTimetable,
    DayWindow,
    FanOutMapper,
    FixedKeyMapper,
    HourWindow,
    IdentityMapper,
    MinimumCount,
    MonthWindow,
    ProductMapper,
    QuarterWindow,
    RollupMapper,
    SegmentWindow,
    StartOfDayMapper,
    StartOfHourMapper,
    StartOfMonthMapper,
    StartOfQuarterMapper,
    StartOfWeekMapper,
    StartOfYearMapper,
    WaitForAll,
    WeekWindow,
    Window,
    YearWindow,
)
from airflow.serialization.decoders import decode_partition_mapper
from airflow.serialization.encoders import coerce_to_core_timetable, encode_partition_mapper

from evertick.airflow.partitions import compile_mapper, compile_partitions
from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.partitions import Rollup, mapper_text, read_mapper, targets_of
from evertick.domain.schedules.run_partitions import partition_at, partition_date
from evertick.domain.schedules.spec import parse_schedule

ZONES = ("UTC", "America/New_York", "Europe/Berlin", "Asia/Kathmandu", pendulum.FixedTimezone(19_800))
TIMES = (
    *("2024-02-29T23:59:59", "2024-03-10T02:30:00", "2024-11-03T01:30:00", "2025-03-30T02:15:00"),
    *("2025-12-31T23:00:00", "2024-12-30T00:00:00", "2023-01-01T00:00:01", "nonsense"),
)
PERIODS = (
    *(StartOfHourMapper, StartOfDayMapper, StartOfWeekMapper),
    *(StartOfMonthMapper, StartOfQuarterMapper, StartOfYearMapper),
)
WINDOWS = {
    StartOfHourMapper: HourWindow,
    StartOfDayMapper: DayWindow,
    StartOfWeekMapper: WeekWindow,
    StartOfMonthMapper: MonthWindow,
    StartOfQuarterMapper: QuarterWindow,
    StartOfYearMapper: YearWindow,
}
DIRECTIONS = (Window.Direction.FORWARD, Window.Direction.BACKWARD)
WAITS = (WaitForAll(), MinimumCount(2), MinimumCount(-1), MinimumCount(99))
SEGMENTS = SegmentWindow(["us", "eu", "apac"])


def cases() -> Iterator[tuple[Any, str]]:
    for kind, zone in itertools.product(PERIODS, ZONES):
        yield from ((kind(timezone=zone), key) for key in TIMES)
        yield from ((kind(timezone=zone, input_format="%Y-%m-%dT%H%z"), key) for key in ("2024-03-10T06+0000", "x"))
    for kind, direction in itertools.product(PERIODS, DIRECTIONS):
        window = WINDOWS[kind](direction=direction)
        for wait, zone in itertools.product(WAITS, ZONES[:2]):
            upstream = kind(timezone=zone)
            yield from ((RollupMapper(upstream_mapper=upstream, window=window, wait_policy=wait), key) for key in TIMES)
        writes = StartOfHourMapper() if kind is StartOfHourMapper else None
        fan_out = FanOutMapper(upstream_mapper=kind(), window=window, downstream_mapper=writes)
        yield from ((fan_out, key) for key in TIMES)
        few = FanOutMapper(upstream_mapper=kind(), window=window, downstream_mapper=writes, max_downstream_keys=7)
        yield from ((few, key) for key in TIMES[:1])
    product = ProductMapper(IdentityMapper(), StartOfDayMapper())
    daily = StartOfMonthMapper(input_format="%Y-%m-%d")
    plain = (
        *(IdentityMapper(), AllowedKeyMapper(["us", "eu"]), FixedKeyMapper("all"), product),
        *(
            ProductMapper(StartOfDayMapper(), StartOfHourMapper(), delimiter="/"),
            ChainMapper(StartOfDayMapper(), daily),
        ),
        ChainMapper(FanOutMapper(upstream_mapper=StartOfDayMapper(), window=DayWindow()), IdentityMapper()),
        FanOutMapper(upstream_mapper=IdentityMapper(), window=SEGMENTS, downstream_mapper=IdentityMapper()),
        *(RollupMapper(upstream_mapper=FixedKeyMapper("all"), window=SEGMENTS, wait_policy=wait) for wait in WAITS),
        StartOfWeekMapper(output_format="week %V of %Y-%m-%d"),
        StartOfQuarterMapper(output_format="q{quarter}/%Y"),
    )
    keys = (
        "us",
        "mars",
        "us|2024-02-29T23:59:59",
        "us|x",
        "a|b|c",
        "2024-02-29T01:00:00/2024-02-29T01:00:00",
        TIMES[0],
    )
    yield from itertools.product(plain, keys)


def answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (ValueError, TypeError, InvalidSchedule):
        return "refused"


def of_airflow(mapper: Any, key: str) -> Any:
    made = mapper.to_downstream(key)
    targets = [made] if isinstance(made, str) else list(made)
    if mapper.max_downstream_keys is not None and len(targets) > mapper.max_downstream_keys:
        return "refused"
    targets = sorted(set(targets))  # the same key twice is one run, and a set has no order
    waits = None
    if is_rollup(mapper):
        expected = mapper.to_upstream(targets[0])
        some = [frozenset(sorted(expected)[:n]) for n in (0, 1, 2, len(expected) - 1, len(expected))]
        results = [mapper.wait_policy.is_satisfied_by_keys(matched=each, expected=expected) for each in some]
        waits = (sorted(expected), [each.satisfied and not each.unreachable for each in results])
    return targets, waits, [answer(lambda each=each: _date(mapper.to_partition_date(each))) for each in targets]


def of_evertick(sdk: Any, key: str) -> Any:
    mapper = read_mapper(mapper_text(compile_mapper(sdk)))
    targets = sorted(targets_of(mapper, key))
    waits = None
    if isinstance(mapper, Rollup):
        expected = sorted(mapper.expected(targets[0]))
        counts = (0, 1, 2, len(expected) - 1, len(expected))
        waits = (expected, [mapper.is_met(targets[0], expected[:n]) for n in counts])
    return targets, waits, [answer(lambda each=each: _date(mapper.date_of(each))) for each in targets]


def _date(at: datetime | None) -> str | None:
    return None if at is None else str(at.timestamp())


def timetables() -> Iterator[tuple[str, Any, Any]]:
    """The key and date of each run of a cron, and the date of a key that a user gives."""
    for cron, zone, offset in itertools.product(("0 0 * * *", "30 */6 * * 1-5"), ZONES[:3], (None, -1, 2)):
        timetable = CronPartitionTimetable(cron, timezone=zone, run_offset=offset)
        core = coerce_to_core_timetable(timetable)
        spec = parse_schedule(
            {
                "kind": "cron",
                "expression": cron,
                "timezone": zone,
                "partitions": compile_partitions(timetable).to_text(),
            }
        )
        at = core._align_to_next(pendulum.datetime(2025, 3, 27, 12))
        for _ in range(8):
            date, key = core._get_partition_info(at)
            ours = partition_at(spec, at)
            assert ours is not None
            yield (
                f"{cron} {zone} {offset} {at}",
                (key, date.timestamp()),
                (ours.key, ours.date and ours.date.timestamp()),
            )
            decoded = core.resolve_partition_date(key).timestamp()
            found = partition_date(spec, key)
            yield f"{cron} {zone} {key}", decoded, found and found.timestamp()
            at = core._get_next(at)


def main() -> None:
    count, different = 0, []
    for sdk, key in cases():
        core = decode_partition_mapper(encode_partition_mapper(sdk))
        theirs, ours = answer(lambda c=core, k=key: of_airflow(c, k)), answer(lambda s=sdk, k=key: of_evertick(s, k))
        count += 1
        if theirs != ours:
            different.append([repr(sdk), key, repr(theirs), repr(ours)])
    for name, expected, found in timetables():
        count += 1
        if expected != found:
            different.append([name, repr(expected), repr(found)])
    print(json.dumps({"cases": count, "different": different}))


if __name__ == "__main__":
    main()
