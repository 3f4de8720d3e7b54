"""`make bench-compare WITH=origin/main`: this tree and another one, measured in turn, as a ratio per figure.

The machine's speed changes within minutes, so a round of one tree is followed by a round of the other, and each ratio is
the median over pairs of rounds. Ends with 1 if a figure is more than 5 % worse, by more than the spread of the pairs explains.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure, Sense, number, read
from bench.house import ROOT
from rich.console import Console
from rich.table import Table

CASES = "chain,hop,fan,singles,cron_lag,submit,idle,api_pollers"
# Without a goal that says so: more is better of these units, less of all others (seconds, megabytes, percent).
RATES = ("tasks/s", "runs/s", "rows/s", "ratio")
ALLOWED = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs of one figure: the other tree's value and this tree's, measured one after the other."""

    figure: Figure
    pairs: Sequence[tuple[float, float]]

    @property
    def slowdowns(self) -> list[float]:
        """How many times worse this tree is, per pair."""
        goal = self.figure.goal
        is_more_better = goal.sense is Sense.AT_LEAST if goal else self.figure.unit in RATES
        return [other / here if is_more_better else here / other for other, here in self.pairs if other and here]

    @property
    def slowdown(self) -> float:
        return statistics.median(self.slowdowns) if self.slowdowns else 1

    @property
    def is_worse(self) -> bool:
        """Above the limit, and in at least three of four pairs worse at all: otherwise the pairs do not agree."""
        worse = sum(slowdown > 1 for slowdown in self.slowdowns)
        return self.slowdown > ALLOWED and worse * 4 >= len(self.slowdowns) * 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-compare", description=__doc__)
    parser.add_argument("other", help="a commit, or the directory of a tree with its virtual environment")
    parser.add_argument("--only", default=CASES, help="cases, comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of rounds (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with other_tree(options.other, console) as other:
        found = compare(other, only=options.only, rounds=options.rounds, console=console)
    console.print(table(found, options.other))
    return int(any(each.is_worse for each in found))


@contextlib.contextmanager
def other_tree(name: str, console: Console) -> Iterator[Path]:
    """The directory of the other tree: as given, or checked out and set up in a temporary directory."""
    if (Path(name) / "bench" / "run.py").exists():
        yield Path(name).resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="evertick-compare-"))
    try:
        console.print(f"Setting up {name} in {folder} …", style="dim")
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
        subprocess.run(["make", "-s", ".venv/.installed"], cwd=folder, check=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(other: Path, *, only: str, rounds: int, console: Console) -> list[Comparison]:
    figures: dict[str, Figure] = {}
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for done in range(rounds):
        # Alternating order: a machine that becomes slower would otherwise always count against the same tree.
        order = [other, ROOT] if done % 2 == 0 else [ROOT, other]
        values = {tree: measure(tree, only=only) for tree in order}
        figures |= values[ROOT]
        for name in values[other].keys() & values[ROOT].keys():
            pairs[name].append((values[other][name].value or 0, values[ROOT][name].value or 0))
        console.print(f"round {done + 1} of {rounds}", style="dim")
    return [Comparison(figure=figures[name], pairs=found) for name, found in sorted(pairs.items())]


def measure(tree: Path, *, only: str) -> dict[str, Figure]:
    """One round of a tree, with its own interpreter and its own benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [
            str(tree / ".venv/bin/python"),
            "-m",
            "bench.run",
            "--only",
            only,
            "--rounds",
            "1",
            "--out",
            str(out),
        ]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        return {figure.name: figure for figure in read(out)}


def table(found: Sequence[Comparison], other: str) -> Table:
    shown = Table(title=f"This tree compared with {other}: above 1 it is worse", title_justify="left", show_edge=False)
    for column in ("figure", "other", "this", "times worse", "min … max", ""):
        shown.add_column(column, justify="left" if column in ("figure", "") else "right", no_wrap=True)
    for each in (each for each in found if each.slowdowns):
        before, after = (statistics.median(side) for side in zip(*each.pairs, strict=True))
        spread = f"{min(each.slowdowns):.2f} … {max(each.slowdowns):.2f}"
        values = (f"{number(before)} {each.figure.unit}", f"{number(after)} {each.figure.unit}")
        shown.add_row(each.figure.name, *values, f"{each.slowdown:.3f}", spread, "worse" if each.is_worse else "")
    return shown


if __name__ == "__main__":
    sys.exit(main())
