"""`python -m bench.executor`: process-isolated attempts through the local executor alone, with no database.

Prints attempts per second and the cost of each: CPU time of the runner, of the fork server and of the attempts' processes,
and the number of page faults (about 2 µs each). Faults are the most reliable figure, because they are the same on a busy
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.house import DAGS, working_folder

from evertick.domain.attempt import AttemptOrder, Isolation, Outcome, OutcomeKind, TaskKey
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.processes.system import children_of

WARM_UP = 100
SETTLE_SECONDS = 0.6
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time and page faults of a process and of its reaped children."""

    own_seconds: float
    own_faults: int
    children_seconds: float
    children_faults: int


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    seconds = [int(field) / _TICKS for field in fields[11:15]]
    return Usage(sum(seconds[:2]), int(fields[7]), sum(seconds[2:]), int(fields[8]))


class Load:
    """Keeps a number of attempts running until all have ended."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        self._folder, self._slots = folder, slots
        self._made = self._left = self._over = 0
        self._done = asyncio.Event()
        self.executor = LocalExecutor(
            slots=slots, spool_dir=folder / "spool", session=1, resolve_bundle=self._place, put=self._took
        )

    async def run(self, count: int) -> float:
        """Seconds from the first order to the last outcome."""
        self._left, self._over = count, count
        self._done.clear()
        started = time.perf_counter()
        self._start(min(count, self._slots))
        await self._done.wait()
        return time.perf_counter() - started

    def _start(self, count: int) -> None:
        self._left -= count
        self.executor.start_many([self._order() for _ in range(count)])

    def _took(self, outcomes: list[Outcome]) -> None:
        self.executor.settle([(outcome.key, outcome.epoch) for outcome in outcomes])
        assert all(outcome.kind is OutcomeKind.SUCCESS for outcome in outcomes), outcomes
        self._over -= len(outcomes)
        self._start(min(self._left, len(outcomes)))
        if self._over == 0:
            self._done.set()

    def _order(self) -> AttemptOrder:
        self._made += 1
        return AttemptOrder(
            key=TaskKey(self._made, 0, -1),
            epoch=1,
            session=1,
            attempt=1,
            dag="single_process",
            task="light",
            version_id=1,
            bundle="bench",
            file="light.py",
            fire_at=None,
            params_json="{}",
            inputs_json="{}",
            timeout_seconds=None,
            isolation=Isolation.PROCESS,
        )

    async def _place(self, _bundle: str, _file: str) -> BundlePlace:
        return BundlePlace(self._folder, uses_threads=False)


async def measure(count: int, slots: int) -> str:
    async with working_folder() as folder:
        shutil.copy(DAGS / "light.py", folder)
        load = Load(folder, slots=slots)
        async with load.executor:
            await load.run(WARM_UP)
            (keeper,) = children_of(os.getpid())
            runner, (parent,) = os.getpid(), children_of(keeper)
            before = usage(runner), usage(parent)
            seconds = await load.run(count)
            await asyncio.sleep(SETTLE_SECONDS)  # until the last processes are reaped
            after = usage(runner), usage(parent)
    runner_us, parent_us = (
        (now.own_seconds - then.own_seconds) / count * 1e6 for then, now in zip(before, after, strict=True)
    )
    child_us = (after[1].children_seconds - before[1].children_seconds) / count * 1e6
    parent_faults = (after[1].own_faults - before[1].own_faults) / count
    child_faults = (after[1].children_faults - before[1].children_faults) / count
    return (
        f"{slots} slots: {count / seconds:,.0f} attempts/s; each: runner {runner_us:.0f} µs, "
        f"fork server {parent_us:.0f} µs and {parent_faults:.0f} faults, child {child_us:.0f} µs and {child_faults:.0f} faults"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.executor", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="attempts to measure")
    parser.add_argument("--slots", type=int, default=32, help="attempts at once")
    options = parser.parse_args(arguments)
    print(asyncio.run(measure(options.count, options.slots)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
