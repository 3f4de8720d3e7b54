"""`make bench`: measures Evertick as `evertick up` runs it, prints a table, and stores the figures in bench/latest.json.

`python -m bench.run --only chain,hop --rounds 5`. Exits with 1 only if a figure could not be measured; missed goals are only
shown. Never asserts a time.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench import (
    case_ageing,
    case_agents,
    case_airflow,
    case_api,
    case_dispatch,
    case_fleet,
    case_gates,
    case_history,
    case_https,
    case_idle,
    case_light,
    case_many,
    case_pinned,
    case_pollers,
    case_runners,
    case_schedules,
    case_time,
    case_ui,
    case_waiting,
    report,
)
from bench.case import FULL, QUICK, Bench
from bench.figures import LATEST, Figure, Settings, machine, server, shared_settings, table, write
from bench.house import ROOT, House, postgres, working_folder
from bench.raw import DATABASE, raw_loop
from bench.work import warm_up
from rich.console import Console
from rich.status import Status

InHouse = Callable[[Bench, House], Awaitable[list[Figure]]]
Alone = Callable[[Bench], Awaitable[list[Figure]]]

# These share one installation, in this order; the others start their own.
IN_ONE_HOUSE: dict[str, InHouse] = {
    "raw": case_many.raw,
    "chain": case_light.chain,
    "hop": case_light.hop,
    "envs": case_light.envs,
    "fan": case_light.fan,
    "singles": case_many.singles,
    "big_dag": case_many.big_dag,
    "pinned": case_pinned.pinned,
    "pool_overhead": case_gates.pool_overhead,
    "mutex_drain": case_gates.mutex_drain,
    "gates_blocked": case_gates.gates_blocked,
    "waiting_50k": case_waiting.waiting_50k,
    "schedules": case_time.schedules,
    "cron_lag": case_time.cron_lag,
    "submit": case_time.submit,
    "ageing": case_ageing.ageing,
}
ON_THEIR_OWN: dict[str, Alone] = {
    "idle": case_idle.idle,
    "fire_50k": case_schedules.fire_50k,
    "idle_schedules": case_schedules.idle_schedules,
    "runners": case_runners.runners,
    "fleet": case_fleet.fleet,
    "fleet_https": case_https.fleet_https,
    "agents": case_agents.agents,
    "dispatch": case_dispatch.dispatch,
    "history": case_history.history,
    "retention": case_history.retention,
    "api_reads": case_api.api_reads,
    "api_pollers": case_pollers.api_pollers,
    "api_crowd": case_api.api_crowd,
    "airflow": case_airflow.airflow,
    "soak": case_history.soak,
    "retention_10m": case_history.retention_10m,
    "ui": case_ui.ui,
}
# Only on request: they take an hour, need a browser or Airflow, or take longer than a smoke test may.
ON_REQUEST = {"soak", "retention_10m", "ui", "airflow"}
NOT_QUICK = {*ON_REQUEST, *ON_THEIR_OWN}
BUSY_LOAD = 0.7


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    known = [*IN_ONE_HOUSE, *ON_THEIR_OWN]
    skipped = NOT_QUICK if options.quick else ON_REQUEST
    wanted = options.only.replace(",", " ").split() or [name for name in known if name not in skipped]
    if unknown := [name for name in wanted if name not in known]:
        print(f"Unknown benchmark {', '.join(unknown)}. Available: {', '.join(known)}.", file=sys.stderr)
        return 2
    # A pipe has no width, and a truncated table is useless.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    compileall.compile_dir(ROOT / "src" / "evertick", quiet=1)
    facts = machine()
    _warn_if_busy(console)
    figures = asyncio.run(_measure(options, wanted, console, facts))
    console.print(table(figures))
    console.print(shared_settings(figures[0].settings), style="dim")
    write(figures, options.out)
    if options.out == LATEST:
        report.refresh()
        console.print(
            f"Stored in {LATEST.relative_to(ROOT)}; docs/explanation/performance.md shows the figures.", style="dim"
        )
    return 1 if any(figure.value is None for figure in figures) else 0


async def _measure(
    options: argparse.Namespace, wanted: Sequence[str], console: Console, facts: Settings
) -> list[Figure]:
    size = QUICK if options.quick else FULL
    changes = {"rounds": options.rounds, "soak_minutes": options.soak_minutes}
    size = replace(size, **{name: value for name, value in changes.items() if value is not None})
    figures: list[Figure] = []
    async with working_folder() as folder, postgres(folder, url=os.environ.get("EVERTICK_DATABASE_URL")) as on:
        facts = facts | server(on.url)
        await on.make(DATABASE, is_migrated=False)
        with raw_loop(on) as raw, console.status("starting") as status:
            bench = Bench(
                server=on,
                folder=folder,
                size=size,
                slots=options.slots,
                raw=raw,
                say=lambda text: _tell(console, status, f"{case}: {text}"),
            )
            shared = [name for name in wanted if name in IN_ONE_HOUSE]
            case = shared[0] if shared else wanted[0]
            if shared:
                await on.make("bench")
                async with bench.house("bench") as house:
                    await warm_up(house)
                    for case in shared:
                        figures += await _attempt(case, IN_ONE_HOUSE[case](bench, house), console)
            for case in [name for name in wanted if name in ON_THEIR_OWN]:
                figures += await _attempt(case, ON_THEIR_OWN[case](bench), console)
        for name in _databases():
            await on.drop(name)
    return [replace(figure, settings=facts | figure.settings) for figure in figures]


def _tell(console: Console, status: Status, text: str) -> None:
    """Report progress in the status line, or in separate lines without a terminal."""
    status.update(text)
    if not console.is_terminal:
        console.print(text, style="dim")


def first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _attempt(name: str, measuring: Awaitable[list[Figure]], console: Console) -> list[Figure]:
    """Run one benchmark. A failed one is reported and does not stop the others."""
    try:
        found = await measuring
    except Exception as failure:
        error = first_leaf(failure)
        console.print(f"{name}: not measured. {type(error).__name__}: {error}", style="red")
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Figure(name=name, about=name, unit="", value=None, problem=problem)]
    console.print(f"{name}: done", style="dim")
    return found


def _databases() -> tuple[str, ...]:
    return (
        "bench",
        DATABASE,
        *case_runners.DATABASES,
        *case_fleet.DATABASES,
        *case_https.DATABASES,
        *case_history.DATABASES,
        *case_ui.DATABASES,
    )


def _warn_if_busy(console: Console) -> None:
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        console.print(f"The machine is busy (load {load:.1f}), so these figures are not reliable.", style="red")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "--only", default="", help="comma-separated names (default: all except soak, retention_10m and ui)"
    )
    parser.add_argument("--rounds", type=int, help="interleaved rounds; the median is shown")
    parser.add_argument("--slots", type=int, help="slots per runner (default: the product's default)")
    parser.add_argument("--soak-minutes", type=float, help="duration of the load of soak")
    parser.add_argument("--quick", action="store_true", help="a smoke test: every figure once, from too few samples")
    parser.add_argument("--out", type=Path, default=LATEST, help="the file for the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
