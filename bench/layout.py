"""Measures three table layouts for tasks doing the same work on one real PostgreSQL: docs/decisions/0001 and 0002.

`python bench/layout.py` (about two minutes), `--quick` (a short run), `--json` (output for programs). Times depend on the
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
from collections.abc import Callable
from contextlib import ExitStack
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
    SESSION,
    VARIANTS,
    Connection,
    Variant,
    drain,
    list_run,
    lock_runs,
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

from evertick.supervisor.postgres import EmbeddedPostgres

_LIST_TIMES, _CLAIM_TIMES = 20, 100
_TABLES, _VACUUM = "tables", "vacuum afterwards"
_HELD, _HELD_CURSOR = "claim past dead rows", "claim past dead rows, with a cursor"
# WAL bytes without full-page images; vacuum runs only between measurements.
_SETTINGS = {"full_page_writes": "off", "autovacuum": "off", "fsync": "on", "checkpoint_timeout": "1h"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of one measurement."""

    rounds: int
    runs: int
    history: int
    dead: int


class Figures:
    """All samples by (variant, scenario, unit); reports show their medians."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, variant: Variant, scenario: str, **values: float) -> None:
        for unit, value in values.items():
            self._samples[variant.name, scenario, unit].append(value)

    def median(self, variant: Variant, scenario: str, unit: str) -> float:
        return statistics.median(self._samples[variant.name, scenario, unit])

    def ratio(self, variant: Variant, scenario: str, unit: str) -> float:
        """The ratio to the variant that it is compared with, per round, because a busy round affects both."""
        mine, theirs = (self._samples[name, scenario, unit] for name in (variant.name, variant.against))
        return statistics.median(one / other for one, other in zip(mine, theirs, strict=True))

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "layout": name,
                "scenario": scenario,
                "unit": unit,
                "median": round(statistics.median(samples), 3),
                "samples": [round(sample, 3) for sample in samples],
            }
            for (name, scenario, unit), samples in self._samples.items()
        ]


def claim_one_by_one(conn: Connection, from_seq: int) -> dict[str, float]:
    """The cost of a single claim; claimed tasks are finished afterwards, outside the measurement."""
    waits: list[float] = []
    rows: list[dict[str, object]] = []
    cpu_before = cpu_seconds(conn)
    for _ in range(_CLAIM_TIMES):
        start = time.perf_counter()
        claimed = conn.execute("select * from claim(%s, 1, %s)", [SESSION, from_seq], prepare=True).fetchall()
        waits.append(1e6 * (time.perf_counter() - start))
        rows += [{"r": r, "i": i, "m": m, "e": e, "kind": "success"} for r, i, m, e in claimed]
    cpu = 1e6 * (cpu_seconds(conn) - cpu_before) / _CLAIM_TIMES
    if len(rows) != _CLAIM_TIMES:
        raise SystemExit(f"Claimed {len(rows)} tasks instead of {_CLAIM_TIMES}: the layout is wrong.")
    conn.execute("select finish(%s, %s)", [SESSION, Jsonb(rows)])
    return {"cpu_us": cpu, "wall_us": statistics.median(waits)}


# The measurement ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One piece of work. `act` is measured and returns the number of processed tasks, which must be `tasks`."""

    name: str
    tasks: int
    act: Callable[[Connection, Variant], int]
    opened: tuple[int, int] | None = None


def scenarios(runs: int) -> tuple[Scenario, ...]:
    """The scenarios in order: each prepares the state that the next one needs."""

    def by(batch: int) -> Callable[[Connection, Variant], int]:
        return lambda conn, variant: drain(conn, variant.step, batch)

    return (
        Scenario(name="chain of 200", tasks=CHAIN_LENGTH, act=by(1), opened=(CHAIN, 1)),
        Scenario(name="fan 1 to 2,000 to 1", tasks=FAN_WIDTH + 2, act=by(200), opened=(FAN, 1)),
        Scenario(name="open one-task runs", tasks=runs, act=lambda conn, _: open_runs(conn, ONE_TASK, runs)),
        Scenario(name="list a run of 2,002 tasks", tasks=_LIST_TIMES, act=lambda conn, _: list_run(conn, _LIST_TIMES)),
        Scenario(name="un-admit and back", tasks=runs // 10, act=lambda conn, _: unadmit_and_back(conn, runs // 10)),
        Scenario(name="claim + finish, by 200", tasks=runs, act=by(200)),
        Scenario(name="claim + finish, by 20", tasks=runs, act=by(20), opened=(ONE_TASK, runs)),
        Scenario(name="claim + finish, by 1", tasks=runs // 10, act=by(1), opened=(ONE_TASK, runs // 10)),
        Scenario(name="lock runs, nothing else", tasks=1000, act=lambda conn, _: lock_runs(conn, 1000)),
    )


def measure_scenario(figures: Figures, scenario: Scenario, variant: Variant, conn: Connection) -> None:
    if scenario.opened is not None:
        open_runs(conn, *scenario.opened)
    wal = "select pg_current_wal_insert_lsn() - '0/0'"
    wal_before, cpu_before, start = scalar(conn, wal), cpu_seconds(conn), time.perf_counter()
    done = scenario.act(conn, variant)
    wall, cpu = time.perf_counter() - start, cpu_seconds(conn) - cpu_before
    wal_bytes = float(scalar(conn, wal) - wal_before)
    if done != scenario.tasks:
        raise SystemExit(f"{variant.name}, {scenario.name}: {done} tasks instead of {scenario.tasks}.")
    costs = {"cpu_us": 1e6 * cpu, "wall_us": 1e6 * wall, "wal_bytes": wal_bytes}
    figures.add(variant, scenario.name, **{unit: cost / done for unit, cost in costs.items()})


def cpu_seconds(conn: Connection) -> float:
    """CPU seconds of this connection's server process, without time spent waiting for a core."""
    return int(Path(f"/proc/{conn.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


def measure_vacuum(figures: Figures, variant: Variant, conn: Connection, finished: int) -> None:
    """The cost of vacuuming the dead rows of a round."""

    def act(conn: Connection, _: Variant) -> int:
        vacuum(conn)
        return finished

    measure_scenario(figures, Scenario(name=_VACUUM, tasks=finished, act=act), variant, conn)


def measure_held_horizon(figures: Figures, variant: Variant, conn: Connection, holder: Connection, dead: int) -> None:
    """Single claims while another open transaction prevents the removal of dead rows."""
    with holder.transaction():
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select count(*) from pg_class")
        open_runs(conn, ONE_TASK, dead)
        drain(conn, variant.step, 500)
        open_runs(conn, ONE_TASK, 2 * _CLAIM_TIMES)
        from_seq = scalar(conn, "select low_water()")
        figures.add(variant, _HELD_CURSOR, **claim_one_by_one(conn, from_seq))
        figures.add(variant, _HELD, **claim_one_by_one(conn, 0))
    vacuum(conn)


def table_stats(conn: Connection) -> tuple[int, int, int]:
    """Updates, HOT updates and dead rows so far in the tables that hold tasks. Runs are the same in every layout."""
    conn.execute("select pg_stat_force_next_flush()")
    row = conn.execute(
        "select sum(n_tup_upd), sum(n_tup_hot_upd), sum(n_dead_tup) from pg_stat_user_tables"
        " where schemaname = current_schema() and relname not in ('run_status', 'attempt')"
    ).fetchone()
    return tuple(int(value) for value in row or (0, 0, 0))  # type: ignore[return-value]


def measure_round(figures: Figures, connections: dict[Variant, Connection], runs: int) -> None:
    """Run every scenario once. Within a scenario, layouts take turns, so that a busy moment affects all alike."""
    before = {variant: table_stats(conn) for variant, conn in connections.items()}
    for scenario in scenarios(runs):
        for variant, conn in connections.items():
            measure_scenario(figures, scenario, variant, conn)
    finished = CHAIN_LENGTH + FAN_WIDTH + 2 + 2 * runs + runs // 10
    for variant, conn in connections.items():
        updates, hot, dead = (now - then for now, then in zip(table_stats(conn), before[variant], strict=True))
        figures.add(variant, _TABLES, hot_percent=100 * hot / max(updates, 1), dead_per_task=dead / finished)
        measure_vacuum(figures, variant, conn, finished)


def measure(url: str, size: Size, console: Console) -> Figures:
    figures = Figures()
    publish(url)
    with ExitStack() as stack:
        holder = stack.enter_context(psycopg.connect(url, autocommit=True))
        connections = {
            variant: stack.enter_context(prepared(url, variant, size.history)) for variant in VARIANTS
        }  # fmt: skip
        for number in range(size.rounds):
            console.print(f"round {number + 1} of {size.rounds}", style="dim")
            measure_round(figures, connections, size.runs)
            for variant in LAYOUTS:
                measure_held_horizon(figures, variant, connections[variant], holder, size.dead)
            # Rotate the order.
            connections = dict([*list(connections.items())[1:], next(iter(connections.items()))])
    return figures


# The report -----------------------------------------------------------------------------------------------------------


def show(figures: Figures, size: Size, console: Console) -> None:
    work = Table(title="per task (list: per listing): server CPU us | wall us, client included | WAL bytes")
    work.add_column("")
    for variant in VARIANTS:
        work.add_column(f"{variant.name} (CPU against {variant.against})", justify="right")
    for name in (*(scenario.name for scenario in scenarios(0)), _VACUUM):
        work.add_row(name, *(_work_cell(figures, variant, name) for variant in VARIANTS))
    console.print(work)
    tables = Table(title=f"the tables that hold tasks; claims past {size.dead:,} dead rows: server CPU us | wall us")
    for heading in ("", "HOT updates", "dead rows per task", "single claim", "with a cursor"):
        tables.add_column(heading, justify="right" if heading else "left")
    for variant in LAYOUTS:
        hot, dead = (figures.median(variant, _TABLES, unit) for unit in ("hot_percent", "dead_per_task"))
        claims = (_cell(figures, variant, name, "cpu_us", "wall_us") for name in (_HELD, _HELD_CURSOR))
        tables.add_row(f"{variant.name}: {variant.title}", f"{hot:.0f} %", f"{dead:.2f}", *claims)
    console.print(tables)


def _work_cell(figures: Figures, variant: Variant, scenario: str) -> str:
    ratio = figures.ratio(variant, scenario, "cpu_us")
    return f"x{ratio:.2f}  {_cell(figures, variant, scenario, 'cpu_us', 'wall_us', 'wal_bytes')}"


def _cell(figures: Figures, variant: Variant, scenario: str, *units: str) -> str:
    medians = (figures.median(variant, scenario, unit) for unit in units)
    return " | ".join(f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in medians)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Compare table layouts for tasks on a PostgreSQL of its own.")
    parser.add_argument("--runs", type=int, default=10_000, help="one-task runs in each round")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median is shown")
    parser.add_argument("--quick", action="store_true", help="a small run within 20 s")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    size = Size(rounds=options.rounds, runs=options.runs, history=100_000, dead=20_000)
    if options.quick:
        size = Size(rounds=1, runs=1_000, history=2_000, dead=5_000)
    console = Console(stderr=options.json, width=150)
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedPostgres(Path(directory) / "home", settings=_SETTINGS)
        url = await server.start()
        try:
            figures = await asyncio.to_thread(measure, url, size, console)
        finally:
            await server.stop()
    if options.json:
        print(json.dumps(figures.rows(), indent=1))
    else:
        show(figures, size, console)


if __name__ == "__main__":
    asyncio.run(main())
