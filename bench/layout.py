"""Measures three table layouts for tasks doing the same work on one real PostgreSQL: docs/decisions/0001 and 0002.

`python bench/layout.py` (about two minutes), `--quick` (a look), `--json` (figures for a program). Times depend on the
machine: compare the columns of one run, never two runs. Bytes of WAL repeat. Needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from layout_work import (
    CHAIN,
    CHAIN_LENGTH,
    FAN,
    FAN_WIDTH,
    LAYOUTS,
    ONE_TASK,
    PIPELINE,
    SESSION,
    VARIANTS,
    Connection,
    Variant,
    drain,
    open_runs,
    prepared,
    publish,
    scalar,
    unadmit_and_back,
    vacuum,
)
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table

from evertick.services.postgres import EmbeddedPostgres

_DEAD_ROWS, _LIST_TIMES, _CLAIM_TIMES = 20_000, 20, 200
_HELD = "claim past 20,000 dead rows"
# Bytes are logical without page images; vacuum runs when the measurement says so, not in the middle of it.
_SETTINGS = {"full_page_writes": "off", "autovacuum": "off", "fsync": "on", "checkpoint_timeout": "1h"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything one measurement does."""

    rounds: int
    runs: int
    history: int


class Figures:
    """Every sample by (variant, scenario, unit); what is shown is their median."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, variant: Variant, scenario: str, **values: float) -> None:
        for unit, value in values.items():
            self._samples[variant.name, scenario, unit].append(value)

    def median(self, variant: Variant, scenario: str, unit: str) -> float:
        return statistics.median(self._samples[variant.name, scenario, unit])

    def as_json(self) -> str:
        rows = [
            {"layout": name, "scenario": scenario, "unit": unit, "median": round(statistics.median(samples), 3),
             "min": round(min(samples), 3), "max": round(max(samples), 3), "rounds": len(samples)}
            for (name, scenario, unit), samples in self._samples.items()
        ]  # fmt: skip
        return json.dumps(rows, indent=1)


def claim_milliseconds(conn: Connection, from_seq: int) -> float:
    """The median of single claims; what was claimed is finished afterwards, outside the measurement."""
    taken: list[float] = []
    rows: list[dict[str, object]] = []
    for _ in range(_CLAIM_TIMES):
        start = time.perf_counter()
        claimed = conn.execute("select * from claim(%s, 1, %s)", [SESSION, from_seq], prepare=True).fetchall()
        taken.append(1000 * (time.perf_counter() - start))
        rows += [{"r": r, "i": i, "m": m, "e": e, "kind": "success"} for r, i, m, e in claimed]
    if len(rows) != _CLAIM_TIMES:
        raise SystemExit(f"Claimed {len(rows)} tasks instead of {_CLAIM_TIMES}: the layout is wrong.")
    conn.execute("select finish(%s, %s)", [SESSION, Jsonb(rows)])
    return statistics.median(taken)


# The measurement ------------------------------------------------------------------------------------------------------


def cpu_seconds(conn: Connection) -> float:
    """What the server process behind this connection has used. Other programs' load is not in it."""
    return int(Path(f"/proc/{conn.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def measured(figures: Figures, variant: Variant, conn: Connection, scenario: str, tasks: int) -> Iterator[None]:
    wal = "select pg_current_wal_insert_lsn() - '0/0'"
    wal_before, cpu_before, start = scalar(conn, wal), cpu_seconds(conn), time.perf_counter()
    yield
    wall, cpu = time.perf_counter() - start, cpu_seconds(conn) - cpu_before
    wal_bytes = float(scalar(conn, wal) - wal_before)
    figures.add(variant, scenario, wall_us=1e6 * wall / tasks, cpu_us=1e6 * cpu / tasks, wal_bytes=wal_bytes / tasks)


def measure_round(figures: Figures, variant: Variant, conn: Connection, size: Size) -> None:
    """Every scenario once, on tables that have just been vacuumed."""
    stats_before = table_stats(conn)
    tasks = 0

    def drained(scenario: str, expected: int, batch: int) -> None:
        nonlocal tasks
        with measured(figures, variant, conn, scenario, expected):
            finished = drain(conn, variant.step, batch)
        if finished != expected:
            raise SystemExit(f"{variant.name}, {scenario}: finished {finished} tasks instead of {expected}.")
        tasks += finished

    open_runs(conn, CHAIN, 1)
    drained("chain of 200", CHAIN_LENGTH, 1)
    open_runs(conn, FAN, 1)
    fan_run = scalar(conn, "select max(run_id) from run_status")
    drained("fan 1 to 2,000 to 1", FAN_WIDTH + 2, 200)
    with measured(figures, variant, conn, "open one-task runs", size.runs):
        open_runs(conn, ONE_TASK, size.runs)
    with measured(figures, variant, conn, "list a run of 2,002 tasks", _LIST_TIMES):
        for _ in range(_LIST_TIMES):
            conn.execute("select * from listing where run_id = %s", [fan_run], prepare=True)
    with measured(figures, variant, conn, "un-admit and back", size.runs // 10):
        unadmit_and_back(conn, size.runs // 10)
    drained("claim + finish, by 200", size.runs, 200)
    open_runs(conn, ONE_TASK, size.runs)
    drained("claim + finish, by 20", size.runs, 20)
    open_runs(conn, ONE_TASK, size.runs // 10)
    drained("claim + finish, by 1", size.runs // 10, 1)
    updates, hot, dead = (after - before for after, before in zip(table_stats(conn), stats_before, strict=True))
    figures.add(variant, "tables", hot_percent=100 * hot / max(updates, 1), dead_per_task=dead / tasks)
    with measured(figures, variant, conn, "vacuum afterwards", tasks):
        vacuum(conn)


def measure_held_horizon(figures: Figures, variant: Variant, conn: Connection, url: str) -> None:
    """Single claims while an open transaction elsewhere keeps every dead row from being removed."""
    with psycopg.connect(url) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("select count(*) from pg_class")
        open_runs(conn, ONE_TASK, _DEAD_ROWS)
        drain(conn, variant.step, 200)
        open_runs(conn, ONE_TASK, 2 * _CLAIM_TIMES)
        from_seq = scalar(conn, "select low_water()")
        with_cursor = claim_milliseconds(conn, from_seq)
        figures.add(variant, _HELD, with_cursor_ms=with_cursor, ms=claim_milliseconds(conn, 0))
    vacuum(conn)


def table_stats(conn: Connection) -> tuple[int, int, int]:
    """Updates, HOT updates and dead rows so far in the tables that hold tasks. Runs are the same in every layout."""
    conn.execute("select pg_stat_force_next_flush()")
    row = conn.execute(
        "select sum(n_tup_upd), sum(n_tup_hot_upd), sum(n_dead_tup) from pg_stat_user_tables"
        " where schemaname = current_schema() and relname not in ('run_status', 'attempt')"
    ).fetchone()
    return tuple(int(value) for value in row or (0, 0, 0))  # type: ignore[return-value]


def measure(url: str, size: Size, console: Console) -> Figures:
    figures = Figures()
    with psycopg.connect(url, autocommit=True, options="-c search_path=plan") as conn:
        conn.execute("create schema plan")
        publish(conn)
    connections = {variant.name: prepared(url, variant, size.history) for variant in VARIANTS}
    for number in range(size.rounds):
        console.print(f"round {number + 1} of {size.rounds}", style="dim")
        # The order turns, so that no layout always follows the same one.
        for turn in range(len(VARIANTS)):
            variant = VARIANTS[(number + turn) % len(VARIANTS)]
            measure_round(figures, variant, connections[variant.name], size)
            if variant is not PIPELINE:
                measure_held_horizon(figures, variant, connections[variant.name], url)
    for conn in connections.values():
        conn.close()
    return figures


# The report -----------------------------------------------------------------------------------------------------------

_WORK = (
    "open one-task runs",
    "un-admit and back",
    "claim + finish, by 200",
    "claim + finish, by 20",
    "claim + finish, by 1",
    "chain of 200",
    "fan 1 to 2,000 to 1",
    "list a run of 2,002 tasks",
    "vacuum afterwards",
)


def show(figures: Figures, console: Console) -> None:
    work = Table(title="per task (list: per listing): server CPU us | wall us, client included | WAL bytes")
    work.add_column("")
    for variant in VARIANTS:
        work.add_column(variant.name, justify="right")
    for scenario in _WORK:
        work.add_row(scenario, *(_cell(figures, variant, scenario) for variant in VARIANTS))
    console.print(work)
    tables = Table(title="the tables that hold tasks")
    for heading in ("", "HOT updates", "dead rows per task", "claim past 20,000 dead rows", "with a cursor"):
        tables.add_column(heading, justify="right" if heading else "left")
    for variant in LAYOUTS:
        hot, dead = (figures.median(variant, "tables", unit) for unit in ("hot_percent", "dead_per_task"))
        slow, quick = (figures.median(variant, _HELD, unit) for unit in ("ms", "with_cursor_ms"))
        tables.add_row(
            f"{variant.name}: {variant.title}", f"{hot:.0f} %", f"{dead:.2f}", f"{slow:.2f} ms", f"{quick:.2f} ms"
        )
    console.print(tables)


def _cell(figures: Figures, variant: Variant, scenario: str) -> str:
    cpu, wall, wal = (figures.median(variant, scenario, unit) for unit in ("cpu_us", "wall_us", "wal_bytes"))
    return f"{cpu:,.1f} | {wall:,.1f} | {wal:,.0f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description="Compare table layouts for tasks on a PostgreSQL of its own.")
    parser.add_argument("--runs", type=int, default=10_000, help="one-task runs in each round")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median is shown")
    parser.add_argument("--quick", action="store_true", help="a small run within 20 s")
    parser.add_argument("--json", action="store_true", help="print figures for a program")
    options = parser.parse_args()
    size = Size(rounds=options.rounds, runs=options.runs, history=100_000)
    if options.quick:
        size = Size(rounds=1, runs=2_000, history=10_000)
    console = Console(stderr=options.json)
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedPostgres(Path(directory) / "home", settings=_SETTINGS)
        url = await server.start()
        try:
            figures = await asyncio.to_thread(measure, url, size, console)
        finally:
            await server.stop()
    if options.json:
        print(figures.as_json())
    else:
        show(figures, console)


if __name__ == "__main__":
    asyncio.run(main())
