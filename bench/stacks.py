"""Profiles of Python processes: samples of a running process by py-spy, or its own cProfile output."""

from __future__ import annotations

import asyncio
import pstats
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.venv import CannotInstall, venv

RATE = 200
# A thread in one of these functions may be waiting, even if the sampler reports it as running.
_WAITING = {"EpollSelector.select", "_worker", "Condition.wait", "Event.wait"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds in a function itself, and including its callees."""

    function: str
    own: float
    total: float


async def py_spy() -> Path | None:
    """The path of py-spy, installed in a separate environment; None if that is not possible."""
    try:
        return await asyncio.to_thread(lambda: venv("py-spy", ["py-spy"]) / "py-spy")
    except CannotInstall:
        return None


async def sample(program: Path, pid: int, seconds: float, out: Path) -> str | None:
    """Sample a process. Returns the reason if that is not permitted. Counts CPU time only, without waiting."""
    watching = await asyncio.create_subprocess_exec(
        *(str(program), "record", "--pid", str(pid), "--duration", str(max(1, round(seconds)))),
        *("--rate", str(RATE), "--format", "raw", "--output", str(out)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await watching.communicate()
    if watching.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"exit code {watching.returncode}"
    return None


def from_samples(path: Path) -> list[Cost]:
    """Parse py-spy's raw format: frames from the outermost to the innermost, then the number of samples."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [_short(frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            total[frame] += int(count)
    return _dearest([Cost(function=name, own=own[name] / RATE, total=total[name] / RATE) for name in total])


def from_profile(path: Path) -> list[Cost]:
    """Parse a cProfile file. Its times are too long, because every call is instrumented."""
    rows = pstats.Stats(str(path)).stats.items()  # type: ignore[attr-defined]
    return _dearest(
        [
            Cost(function=f"{name} ({_place(file)}:{line})", own=own, total=total)
            for (file, line, name), (_, _, own, total, _) in rows
        ]
    )


def _dearest(costs: Sequence[Cost]) -> list[Cost]:
    return sorted(costs, key=lambda cost: -cost.own)


def _short(frame: str) -> str:
    """`name (folder/file.py:line)` without the line, to group the samples of one function."""
    name, _, place = frame.partition(" (")
    return f"{name} ({_place(place.rstrip(')').rpartition(':')[0])}){' [waiting included]' if name in _WAITING else ''}"


def _place(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
