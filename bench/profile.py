"""`make profile ONLY=chain`: where the time of one task goes, in Evertick's processes and in the database.

CPU by process, Python's functions (py-spy, or cProfile where that is not allowed), statements and round trips, WAL, HOT
updates, dead rows over time; and the statements inside stored functions if pg_stat_statements is available.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg
from bench import counters, crowd, profile_tables, profiles, report, stacks, way
from bench.counted import Event, read_events
from bench.counters import Counters, Statement
from bench.house import House, NotMeasured, Server, as_installed, postgres, working_folder
from bench.profile_tables import Shown
from bench.stacks import Cost
from bench.system_postgres import system_postgres
from bench.usage import own_seconds, tree_seconds
from bench.work import run, warm_up
from rich.console import Console

DATABASE = "bench_profile"
CRON, RUNNERS = "cron", "runners"
WATCHED = ("runner", "scheduler")
SAMPLES = 10
DEAREST = 25
# A session publishes its counters with its next statement, but at most once a second. Scheduler and runner send a statement
# every second, the publisher every five.
SETTLE_SECONDS, STATISTICS_SECONDS = 6.0, 2.2

Load = Callable[[House, str], Awaitable[int]]


async def _chain(house: House, isolation: str) -> int:
    return len((await run(house, f"chain_{isolation}")).spans)


async def _fan(house: House, isolation: str) -> int:
    return len((await run(house, f"fan_{isolation}")).spans)


async def _singles(house: House, isolation: str) -> int:
    return len((await run(house, f"single_{isolation}", 2_000 if isolation == "warm" else 500)).spans)


async def _nothing(house: House, isolation: str) -> int:
    await asyncio.sleep(0.5)
    return 0


LOADS: Mapping[str, Load] = {"chain": _chain, "fan": _fan, "singles": _singles, "idle": _nothing}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All data collected during the load. Costs are divided by `amount`: tasks, or seconds of idling."""

    amount: float
    unit: str
    tasks: int
    seconds: float
    before: Counters
    after: Counters
    cpu: Mapping[str, float]
    events: Mapping[str, Sequence[Event]]
    functions: Mapping[str, Sequence[Cost]]
    dead: Sequence[tuple[float, Mapping[str, int]]]
    statements: Sequence[Statement]


class Profiling:
    """Profiles one load on one server."""

    def __init__(self, options: argparse.Namespace, server: Server, folder: Path, *, program: Path | None) -> None:
        self._options, self._server, self._folder, self._program = options, server, folder, program
        self._is_profiled_by_itself = program is None

    async def run(self) -> Profile:
        url = await self._server.make(DATABASE)
        has_statements = counters.prepare(url)
        house = House(url=url, folder=self._folder / "house", slots=self._options.slots, launcher=self._launch)
        async with house:
            await warm_up(house)
            await LOADS[self._options.only](house, self._options.isolation)
            await asyncio.sleep(SETTLE_SECONDS)
            if has_statements:
                counters.reset_statements(url)
            sampling = asyncio.create_task(self._sample_stacks(house))
            before, cpu_before, began = counters.read(url), self._cpu(house, url), time.time()
            tasks, dead = await self._load(house, url)
            seconds, cpu_after = time.time() - began, self._cpu(house, url)
            await asyncio.sleep(STATISTICS_SECONDS)
            after, statements = counters.read(url), counters.statements(url, DEAREST) if has_statements else []
            await sampling
        await self._server.drop(DATABASE)
        is_idle = tasks == 0
        return Profile(
            amount=seconds if is_idle else tasks,
            unit="s" if is_idle else "task",
            tasks=tasks,
            seconds=seconds,
            before=before,
            after=after,
            cpu={name: max(0.0, cpu_after[name] - cpu_before[name]) for name in cpu_after},
            events={name: self._events(name, began, began + seconds) for name in WATCHED},
            functions={name: self._functions(name) for name in WATCHED},
            dead=dead,
            statements=statements,
        )

    def _launch(self, service: str, number: int) -> Sequence[str]:
        if service not in WATCHED:
            return as_installed(service, number)
        profile = [str(self._folder / f"{service}.profile")] if self._is_profiled_by_itself else []
        return (sys.executable, "-m", "bench.counted", str(self._folder / f"{service}.json"), service, *profile)

    async def _load(self, house: House, url: str) -> tuple[int, list[tuple[float, Mapping[str, int]]]]:
        """Run the load until the time is over, sampling dead rows in between."""
        tasks, began = 0, time.monotonic()
        dead: list[tuple[float, Mapping[str, int]]] = []
        with psycopg.connect(url, autocommit=True) as conn:
            while (elapsed := time.monotonic() - began) < self._options.seconds:
                if elapsed >= len(dead) * self._options.seconds / SAMPLES:
                    dead.append((elapsed, counters.dead_rows(conn)))
                tasks += await LOADS[self._options.only](house, self._options.isolation)
            dead.append((time.monotonic() - began, counters.dead_rows(conn)))
        return tasks, dead

    def _cpu(self, house: House, url: str) -> dict[str, float]:
        """CPU seconds so far: the services, the processes started by the runner, and PostgreSQL."""
        found = {}
        for name, service in house.services.items():
            top = psutil.Process(service.pid)
            kind = name.partition("-")[0]
            found[kind] = own_seconds(top)
            if kind == "runner":
                found["attempts (all processes below the runner)"] = tree_seconds(top) - found[kind]
        with psycopg.connect(url) as conn:
            backend = conn.info.backend_pid
            if psutil.pid_exists(backend) and (parent := psutil.Process(backend).parent()) is not None:
                found["postgres (all processes)"] = tree_seconds(parent)
        return found

    async def _sample_stacks(self, house: House) -> None:
        if self._program is None:
            return
        for trouble in await asyncio.gather(
            *(
                stacks.sample(self._program, service.pid, self._options.seconds, self._folder / f"{kind}.raw")
                for name, service in house.services.items()
                if (kind := name.partition("-")[0]) in WATCHED
            )
        ):
            if trouble:
                print(f"py-spy: {trouble}", file=sys.stderr)

    def _events(self, service: str, first: float, last: float) -> list[Event]:
        return [each for each in read_events(self._folder / f"{service}.json") if first <= each.at <= last]

    def _functions(self, service: str) -> list[Cost]:
        raw, profile = self._folder / f"{service}.raw", self._folder / f"{service}.profile"
        if raw.exists():
            return stacks.from_samples(raw)
        return stacks.from_profile(profile) if profile.exists() else []


async def _profile(options: argparse.Namespace, console: Console) -> int:
    program = None if options.cprofile else await stacks.py_spy()
    async with AsyncExitStack() as stack:
        folder = await stack.enter_async_context(working_folder())
        server = await stack.enter_async_context(postgres(folder, url=os.environ.get("EVERTICK_DATABASE_URL")))
        with console.status(f"{options.only}, {options.isolation}: {options.seconds:g} s of load"):
            seen = await Profiling(options, server, folder, program=program).run()
        how = "py-spy" if program else "cProfile, which overstates the cost of calls"
        about = profile_tables.summary(seen, options.only, options.isolation)
        found = profile_tables.tables(seen, how)
        _show(console, f"{options.only}, {options.isolation}", about, found)
        if seen.statements:
            return 0
        inside = folder / "system"
        try:
            server = await stack.enter_async_context(system_postgres(inside, preload="pg_stat_statements"))
            with console.status("the same load on a PostgreSQL with pg_stat_statements"):
                seen = await Profiling(options, server, inside, program=program).run()
        except NotMeasured as error:
            console.print(f"Statements inside functions: not measured, {error}.", style="yellow")
            return 0
        profile_tables.show(console, profile_tables.statements(seen))
    return 0


async def _profile_fires(options: argparse.Namespace, console: Console) -> int:
    async with working_folder() as folder, postgres(folder, url=os.environ.get("EVERTICK_DATABASE_URL")) as server:
        with console.status(f"waiting for {options.fires} fires"):
            ways = await way.fires(server, folder, options.fires)
    _show(console, CRON, "A schedule on an idle system, each task in a process of its own.", [way.table(ways)])
    return 0


async def _profile_runners(options: argparse.Namespace, console: Console) -> int:
    async with working_folder() as folder, postgres(folder, url=os.environ.get("EVERTICK_DATABASE_URL")) as server:
        with console.status("one runner, and more"):
            found = await crowd.crowds(server, folder, options.rounds)
    about = f"{crowd.TASKS:,} one-task runs, warm, 32 slots each; medians of {options.rounds} rounds."
    _show(console, RUNNERS, about, found)
    return 0


def _show(console: Console, name: str, about: str, found: Sequence[Shown]) -> None:
    """Print the tables and store them for docs/explanation/performance.md."""
    console.print(f"{about}\n")
    for shown in found:
        profile_tables.show(console, shown)
    profiles.keep(name, about, found)
    report.refresh()


OTHERS = {CRON: _profile_fires, RUNNERS: _profile_runners}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make profile", description=__doc__)
    parser.add_argument("--only", default="chain", choices=[*LOADS, *OTHERS])
    parser.add_argument("--isolation", default="warm", choices=("process", "warm"))
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the load")
    parser.add_argument("--fires", type=int, default=150, help="number of fires to analyze, with --only cron")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, with --only runners")
    parser.add_argument("--slots", type=int, help="slots of the runner (default: the product's default)")
    parser.add_argument("--cprofile", action="store_true", help="use cProfile even if py-spy is available")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    return asyncio.run(OTHERS.get(options.only, _profile)(options, console))


if __name__ == "__main__":
    sys.exit(main())
