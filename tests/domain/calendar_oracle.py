"""Twenty years of exchanges: the open days of `exchange(...)` against the sessions of the library exchange_calendars.

`python -m tests.domain.calendar_oracle` is `make calendars`. It needs the packages exchange_calendars and holidays.
"""

from __future__ import annotations

import sys
from datetime import date, timedelta
from importlib import import_module

from evertick.sdk.calendars import exchange

# Those whose days both libraries have for all of that time. Of others, one of them lacks old or special days.
EQUAL = ("XASX", "XKRX", "XLON", "XNYS", "XNZE", "XSWX")
NEAR = ("XIST", "XSES", "XSHG", "XTSE")
FIRST, LAST = date(2006, 1, 1), date(2025, 12, 31)


def differences(code: str) -> list[date]:
    """The days that are open for one of the two only."""
    oracle = import_module("exchange_calendars").get_calendar(code, start=FIRST.isoformat(), end=LAST.isoformat())
    sessions = {each.date() for each in oracle.sessions}
    ours, days = exchange(code), [FIRST + timedelta(days=number) for number in range((LAST - FIRST).days + 1)]
    return [day for day in days if ours.is_open(day) is not (day in sessions)]


def main() -> int:
    wrong = 0
    for code in (*EQUAL, *NEAR):
        found = differences(code)
        wrong += len(found) if code in EQUAL else 0
        print(f"{code}: {len(found)} days differ in 20 years {', '.join(map(str, found[:8]))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
