"""Runs one service as `evertick SERVICE` does, and counts the statements that it sends.

`python -m bench.counted FILE SERVICE [PROFILE]` writes FILE when the service has ended; with PROFILE, the service runs
under cProfile and its statistics go there. The service's behavior does not change.
"""

from __future__ import annotations

import cProfile
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from psycopg import AsyncCursor

from evertick.cli.main import main
from evertick.db import failpoints
from evertick.db.statements import executed_name


class Tally:
    """Records one event per statement. For an exchange also whether it carried reports, and the number of free slots."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, float, int, bool | None, int | None]] = []

    def add(self, query: object, params: object, seconds: float, rows: int) -> None:
        name = executed_name(query) or " ".join(str(query).split())[:60]
        has_reports = free = None
        if name == "finish_and_claim" and isinstance(params, Mapping):
            has_reports, free = params.get("reports") is not None, int(params["free"])
        self.events.append((time.time(), name, seconds, rows, has_reports, free))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.events), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Event:
    """One statement, as recorded by `Tally`."""

    at: float
    name: str
    seconds: float
    rows: int
    has_reports: bool | None
    free: int | None


def read_events(path: Path) -> list[Event]:
    return [Event(*event) for event in json.loads(path.read_text(encoding="utf-8"))]


def counting_cursor(tally: Tally) -> type[AsyncCursor[Any]]:
    class CountingCursor(AsyncCursor[Any]):
        async def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
            started = time.perf_counter()
            await super().execute(query, params, **options)
            tally.add(query, params, time.perf_counter() - started, self.rowcount)
            return self

    return CountingCursor


def run(path: Path, service: str, statistics: Path | None) -> int:
    tally = Tally()
    failpoints.install(counting_cursor(tally))
    if statistics is None:
        status = main([service])
    else:
        profile = cProfile.Profile()
        status = profile.runcall(main, [service])
        profile.dump_stats(statistics)
    tally.write(path)
    return status


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None))
