"""`make sweep`: every change of every zone's clock, with every expression, against brute force, on all cores.

Ends with status 0 only if there were cases and all of them agreed. The names of a zone that is known by several are
swept each: what an alias gives must be right as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from zoneinfo import available_timezones

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.domain.cron_oracle import EXPRESSIONS, Sweep, sweep

FIRST_YEAR, LAST_YEAR = 1970, 2038
MOST_SHOWN = 20


def sweep_all(zones: Sequence[str], years: Iterable[int], *, jobs: int) -> Iterator[Sweep]:
    """What came of each zone, in order."""
    years = list(years)
    with ProcessPoolExecutor(max_workers=jobs) as workers:
        # Neighbours in the list change their clocks together, and what is expected is found out once per process.
        yield from workers.map(_sweep_one, [(zone, years) for zone in zones], chunksize=4)


def _sweep_one(work: tuple[str, list[int]]) -> Sweep:
    zone, years = work
    return sweep([zone], years)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _read(arguments)
    zones = asked.zone or sorted(available_timezones())
    total, began_at = Sweep(), time.monotonic()
    out = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out) as bar:
        shown = bar.add_task("zones", total=len(zones))
        for found in sweep_all(zones, range(asked.first, asked.last + 1), jobs=asked.jobs):
            total.changes += found.changes
            total.cases += found.cases
            total.mismatches += found.mismatches
            bar.update(shown, advance=1, description=f"{total.cases:,} cases, {len(total.mismatches):,} wrong")
    seconds = time.monotonic() - began_at
    out.print(
        f"{len(zones):,} zones, {total.changes:,} changes of the clock from {asked.first} to {asked.last},"
        f" {len(EXPRESSIONS)} expressions: {total.cases:,} cases, {len(total.mismatches):,} mismatches, {seconds:,.0f} s"
    )
    for mismatch in total.mismatches[:MOST_SHOWN]:
        out.print(mismatch, markup=False)
    return int(bool(total.mismatches) or not total.cases)


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make sweep", description=__doc__)
    parser.add_argument("--first", type=int, default=FIRST_YEAR, help="first year")
    parser.add_argument("--last", type=int, default=LAST_YEAR, help="last year")
    parser.add_argument("--zone", action="append", help="only this zone; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
