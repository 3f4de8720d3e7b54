"""Describes a cron expression in words. Reads the same sets that decide when it fires, so that both always agree."""

from __future__ import annotations

from evertick.domain.schedules.cron import Cron, CronFields

_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
           "November", "December")  # fmt: skip
_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_NTH = ("last", "first", "second", "third", "fourth", "fifth")
_ALL_DAYS, _ALL_WEEKDAYS, _ALL_MONTHS = (2 << 31) - 2, (1 << 7) - 1, (2 << 12) - 2
_EVERY_DAY = " every day"
_MOST_TIMES = 6
_MOST_ITEMS = 8


def cron_in_words(cron: Cron) -> str:
    """`at 02:30 every day`, `every 15 minutes from 09:00 to 17:59, on Monday to Friday`."""
    fields = cron.fields
    days = _days(fields)
    if days == _EVERY_DAY and len(_members(fields.hours)) == 24:
        days = ""
    return f"{_times(fields)}{days}{_months(fields)}, {cron.timezone} time"


def rule_in_words(cron: Cron) -> str:
    """Which of the two daylight-saving rules applies, and why."""
    if cron.fields.is_elapsed:
        return (
            "Its hour field starts with *, so it follows real time: it fires whenever the clock shows a matching time. A time"
            " that the clock skips does not fire, and a time that the clock repeats fires twice."
        )
    return (
        "Its hour field names hours of the day, so each such time fires once a day: at its first occurrence if the clock"
        " repeats it, and right after the gap if the clock skips it. A gap of more than 3 hours is skipped."
    )


def _times(fields: CronFields) -> str:
    seconds, minutes, hours = _members(fields.seconds), _members(fields.minutes), _members(fields.hours)
    if len(hours) < 24 and len(seconds) * len(minutes) * len(hours) <= _MOST_TIMES:
        has_seconds = seconds != [0]
        times = [
            f"{hour:02}:{minute:02}" + (f":{second:02}" if has_seconds else "")
            for hour in hours
            for minute in minutes
            for second in seconds
        ]
        return f"at {_joined(times)}"
    parts = []
    if seconds != [0]:
        parts.append(_within(seconds, 60, "second", "every second"))
    if minutes != list(range(60)) or seconds == [0]:
        parts.append(_within(minutes, 60, "minute", "every minute"))
    words = " ".join(parts)
    if len(hours) == 24:
        return f"{words} of every hour" if " at " in f" {words}" else words
    return f"{words} {_hours(hours)}"


def _within(members: list[int], size: int, unit: str, all_words: str) -> str:
    if len(members) == size:
        return all_words
    if (step := _step(members, size)) is not None:
        return f"every {step} {unit}s"
    return f"at {unit}{'s' if len(members) > 1 else ''} {_joined([str(each) for each in members])}"


def _hours(hours: list[int]) -> str:
    if hours == list(range(hours[0], hours[-1] + 1)):
        return f"from {hours[0]:02}:00 to {hours[-1]:02}:59"
    if (step := _step(hours, 24)) is not None:
        return f"in every {_nth(step)} hour ({_joined([f'{hour:02}' for hour in hours])})"
    return f"in the hours {_joined([f'{hour:02}' for hour in hours])}"


def _step(members: list[int], size: int) -> int | None:
    """The distance between the members, if it is constant, wrap-around included."""
    if len(members) < 2 or members[0] != 0:
        return None
    step = members[1]
    return step if size % step == 0 and members == list(range(0, size, step)) else None


def _days(fields: CronFields) -> str:
    has_days = fields.days != _ALL_DAYS
    has_weekdays = fields.weekdays != _ALL_WEEKDAYS
    by_day, by_weekday = _days_of_month(fields), _days_of_week(fields)
    if fields.needs_both_days:
        if has_days and has_weekdays:
            return f" {by_day}, if that is {by_weekday}"
        return f" {by_day}" if has_days else f" on {by_weekday}" if has_weekdays else _EVERY_DAY
    # Either field suffices: one that allows every day makes the other redundant.
    return f" {by_day}, and also on {by_weekday}" if has_days and has_weekdays else _EVERY_DAY


def _days_of_month(fields: CronFields) -> str:
    named = [_nth(day) for day in _members(fields.days)]
    named += ["last day"] if fields.has_last_day else []
    named += ["last weekday (Monday to Friday)"] if fields.has_last_workday else []
    return f"on the {_joined(named)} of the month"


def _days_of_week(fields: CronFields) -> str:
    plain = _members(fields.weekdays)
    week = [day for day in (1, 2, 3, 4, 5, 6, 0) if day in plain]
    if len(week) > 2 and week == list(range(week[0], week[0] + len(week) - (week[-1] == 0))) + [0] * (week[-1] == 0):
        named = [f"{_WEEKDAYS[week[0]]} to {_WEEKDAYS[week[-1]]}"]
    else:
        named = [_WEEKDAYS[day] for day in week]
    named += [f"the {_NTH[nth]} {_WEEKDAYS[weekday]} of the month" for weekday, nth in fields.nth_weekdays]
    return _joined(named, "or")


def _months(fields: CronFields) -> str:
    if fields.months == _ALL_MONTHS:
        return ""
    return f" in {_joined([_MONTHS[month - 1] for month in _members(fields.months)])}"


def _nth(number: int) -> str:
    if 10 < number % 100 < 14:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _joined(items: list[str], word: str = "and") -> str:
    if len(items) > _MOST_ITEMS:
        return f"{', '.join(items[: _MOST_ITEMS - 2])}, … {items[-1]}"
    return f" {word} ".join([*([", ".join(items[:-1])] if len(items) > 1 else []), items[-1]])


def _members(numbers: int) -> list[int]:
    return [number for number in range(numbers.bit_length()) if numbers >> number & 1]
