"""`make chaos`: play the scenarios, show what happened, and fail on any violation or on too little of anything.

Nothing is left behind but, after a failure, the evidence in a folder of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from tests.chaos import dags
from tests.chaos.catalogue import SCENARIOS, find
from tests.chaos.cluster import Ground
from tests.chaos.machine import PRIVATE, lacks_mounts, sweep_clock_memory
from tests.chaos.report import Progress, show
from tests.chaos.scenario import Scenario, Verdict, perform
from tests.chaos.server import Template, from_template, make_template
from tests.chaos.stage import Size
from tests.databases import quick_folder

AT_ONCE = 3
DEFAULT_MINUTES = 10.0
# What the last scenario needs after its faults: the end of its load, the drain, the verdict, the tables.
RESERVE_SECONDS = 75.0
LEAST_COMPOSITE_SECONDS = 60.0
PREFIX = "evertick-chaos-"
INTERRUPTED = 130
ROOT = Path(__file__).parents[2]
Prepared = tuple[Template, dags.Work]
# Not the evidence, but what it was played on.
_LARGE = ("postgres", "standby", "wal", "bundles", "spool")


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if not os.environ.get(PRIVATE) and not lacks_mounts():
        _go_private(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    chosen = _chosen(options.scenario)
    seed = options.seed or str(random.SystemRandom().randrange(1_000_000_000))
    size = Size.FULL if options.full else Size.SCALED
    console.print(f"seed {seed}, {len(chosen)} scenarios, {size}, {options.minutes:g} minutes")
    try:
        verdicts, kept = asyncio.run(_play(chosen, seed, size, options, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"Interrupted; nothing is left behind. The seed was {seed}.")
        return INTERRUPTED
    totals = show(console, verdicts)
    wrong = [f"{v.name} failed" for v in verdicts if not v.is_good and not v.not_run]
    # A run of chosen scenarios proves what they prove; only the whole of it has to be large.
    wrong += [*totals.shortfalls(), *totals.late()] if options.scenario is None else []
    for line in wrong:
        console.print(f"[bold red]{line}[/]")
    if kept is not None and wrong:
        names = ",".join(v.name for v in verdicts if v.violations) or "…"
        console.print(f"Evidence: {kept}. Judge it again: python -m tests.chaos.again {kept}/N…")
        console.print(
            f"Play it again: make chaos SCENARIO={names} SEED={seed}{' FULL=1' if options.full else ''}{_shards(options)}"
        )
    console.print(f"seed {seed}: {'[bold red]FAILED[/]' if wrong else '[bold green]all good[/]'}")
    return 1 if wrong else 0


async def _play(
    chosen: list[Scenario], seed: str, size: Size, options: argparse.Namespace, console: Console
) -> tuple[list[Verdict], Path | None]:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, asyncio.current_task())
    over = time.monotonic() + options.minutes * 60 - RESERVE_SECONDS
    verdicts: list[Verdict] = []
    kept: Path | None = None
    with Progress(console=console, total=len(chosen)) as progress:
        async with ground() as (base, folder):
            room = asyncio.Semaphore(AT_ONCE)

            async def play(scenario: Scenario, seconds: float = 0.0) -> None:
                nonlocal kept
                async with room:
                    progress.begins(scenario.name, scenario.title)
                    place = folder / scenario.name
                    verdict = await perform(
                        scenario,
                        base,
                        place,
                        seed=seed,
                        size=size,
                        seconds=seconds,
                        shards=options.shards,
                        on_stage=lambda stage: progress.on_stage(scenario.name, stage),
                    )
                    if verdict.violations:
                        kept = _keep(place, seed)
                    shutil.rmtree(place, ignore_errors=True)
                    verdicts.append(verdict)
                    progress.ends(verdict)

            async with asyncio.TaskGroup() as group:
                for scenario in chosen:
                    if not scenario.is_alone:
                        group.create_task(play(scenario))
            for scenario in chosen:
                if scenario.is_alone:
                    await play(scenario, max(over - time.monotonic(), LEAST_COMPOSITE_SECONDS))
    return sorted(verdicts, key=lambda verdict: verdict.name), kept


@contextmanager
def folder_on_memory() -> Iterator[Path]:
    """It goes with the block, or, if this process is killed, with the next harness."""
    _sweep()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=quick_folder()) as name:
        yield Path(name)


async def prepare(folder: Path) -> Prepared:
    """The template of all databases, and the loaded DAGs."""
    return await make_template(folder / "template"), await dags.load(folder / "dags")


@asynccontextmanager
async def ground(prepared: Prepared | None = None) -> AsyncIterator[tuple[Ground, Path]]:
    """A folder on memory, what is prepared there unless it was before, and a server for the sinks."""
    with folder_on_memory() as folder:
        template, work = prepared or await prepare(folder)
        sink = await from_template(template, folder / "sink")
        await sink.start()
        try:
            yield Ground(template=template, work=work, sink_server=sink), folder
        finally:
            await sink.stop("immediate")


def _sweep() -> None:
    """What a killed harness left on memory."""
    for left in Path(quick_folder() or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    sweep_clock_memory()


def _keep(place: Path, seed: str) -> Path:
    kept = ROOT / "build" / "chaos" / seed
    shutil.copytree(place, kept / place.name, ignore=shutil.ignore_patterns(*_LARGE), symlinks=True, dirs_exist_ok=True)
    return kept


def _chosen(names: str | None) -> list[Scenario]:
    if names is None:
        return list(SCENARIOS)
    found = {name: find(name) for name in names.split(",")}
    unknown = [name for name, scenarios in found.items() if not scenarios]
    if unknown:
        sys.exit(
            f"There is no scenario {', '.join(unknown)}: it is one of {', '.join(each.name for each in SCENARIOS)}."
        )
    return [scenario for scenarios in found.values() for scenario in scenarios]


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", help="one or several of N01 to N37, with commas; all of them if left out")
    parser.add_argument("--full", action="store_true", help="at the size of the table of faults, not scaled to seconds")
    parser.add_argument("--seed", help="what all chance is drawn from; the same seed breaks the same things")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="how long all of it may take")
    parser.add_argument("--shards", type=int, help="so many shards, and at least three schedulers, in every scenario")
    return parser.parse_args(arguments)


def _shards(options: argparse.Namespace) -> str:
    return f" SHARDS={options.shards}" if options.shards else ""


def _go_private(arguments: list[str]) -> None:
    """Start again where nobody else sees our mounts, and where they end with us."""
    os.environ[PRIVATE] = "1"
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.chaos.run", *arguments]
    os.execvp(command[0], command)


def _stop(task: asyncio.Task[object] | None) -> None:
    if task is not None:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
