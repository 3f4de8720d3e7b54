"""What a run of the suite shows: its progress while it runs, and at the end who broke what, and how it went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.chaos.record import Fault
from tests.chaos.scenario import Verdict
from tests.chaos.stage import Stage

LEAST_FAULTS = 200
LEAST_KINDS = 12
LEAST_OF_A_KIND = 5
LEAST_FIRES = 5_000
LEAST_ATTEMPTS = 20_000
LEAST_STALE_WRITES = 500

# docs/explanation/guarantees.md; of a fault's name as the table shows it.
PROMISED_SECONDS = {
    "kill leader": 2,
    "kill runner": 3,
    "freeze leader": 6,
    "freeze planning_leader": 6,
    "cut leader blackhole": 6,
    "one_way leader deaf": 6,
    "one_way leader mute": 6,
}

_SHOWN_VIOLATIONS = 12
_STYLES = {"passed": "green", "FAILED": "bold red", "NOT RUN": "yellow"}


@dataclass(slots=True, kw_only=True)
class Progress:
    """Shows what is being played now. Where nobody looks, one line per scenario that has ended."""

    console: Console
    total: int
    playing: dict[str, tuple[str, float]] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    ended: list[Verdict] = field(default_factory=list)
    live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live = Live(get_renderable=self.table, console=self.console, refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def begins(self, name: str, title: str) -> None:
        self.playing[name] = (title, time.monotonic())

    def on_stage(self, name: str, stage: Stage) -> None:
        self.stages[name] = stage

    def ends(self, verdict: Verdict) -> None:
        self.playing.pop(verdict.name, None)
        self.stages.pop(verdict.name, None)
        self.ended.append(verdict)
        self.console.print(_line(verdict))

    def table(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, (title, since) in self.playing.items():
            stage = self.stages.get(name)
            faults = f"{stage.nemesis.done.total()} faults" if stage is not None else ""
            table.add_row(Text(name, style="bold cyan"), title, f"{time.monotonic() - since:.0f} s", faults)
        table.add_row("", Text(f"{len(self.ended)} of {self.total} played", style="dim"), "", "")
        return table


def _line(verdict: Verdict) -> Text:
    line = Text(f"{verdict.name:<5}")
    line.append(f"{verdict.status:<8}", style=_STYLES[verdict.status])
    line.append(f" {verdict.seconds:6.1f} s  {verdict.title}")
    if verdict.not_run:
        line.append(f" ({verdict.not_run})", style="yellow")
    elif verdict.violations:
        line.append(f": {len(verdict.violations)} violations", style="red")
    return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """All scenarios together."""

    faults: Counter[str]
    kinds: Counter[str]
    recoveries: dict[str, list[float]]
    alone: dict[str, list[float]]
    fires: int
    attempts: int
    stale_refused: int
    stale_accepted: int
    stale_unanswered: int
    violations: int

    @property
    def stale_tried(self) -> int:
        return self.stale_refused + self.stale_accepted + self.stale_unanswered

    def shortfalls(self) -> list[str]:
        """What a default run must reach to prove anything, and did not."""
        enough = [kind for kind, count in self.kinds.items() if count >= LEAST_OF_A_KIND]
        found = [
            (self.faults.total(), LEAST_FAULTS, "faults"),
            (len(enough), LEAST_KINDS, f"kinds of faults with {LEAST_OF_A_KIND} or more"),
            (self.fires, LEAST_FIRES, "fires"),
            (self.attempts, LEAST_ATTEMPTS, "attempts"),
            (self.stale_tried, LEAST_STALE_WRITES, "stale writes tried"),
        ]
        return [f"only {count:,} {what}, {least:,} are needed" for count, least, what in found if count < least]

    def late(self) -> list[str]:
        """Promises of how long a recovery takes, with nothing else broken meanwhile, that were not kept at the 99th percentile."""
        worst = {name: percentile(sorted(seconds), 0.99) for name, seconds in self.alone.items() if seconds}
        return [
            f"{name}: well again after {worst[name]:.2f} s, {limit:g} s are promised"
            for name, limit in PROMISED_SECONDS.items()
            if worst.get(name, 0) > limit
        ]


def add_up(verdicts: Iterable[Verdict]) -> Totals:
    faults: Counter[str] = Counter()
    recoveries: dict[str, list[float]] = {}
    alone: dict[str, list[float]] = {}
    played = [verdict for verdict in verdicts if not verdict.not_run]
    for verdict in played:
        faults += verdict.faults
        for all_of, some in ((recoveries, verdict.recoveries), (alone, verdict.alone)):
            for name, seconds in some.items():
                all_of.setdefault(name, []).extend(seconds)
    kinds: Counter[str] = Counter()
    for name, count in faults.items():
        kinds[str(Fault(name.split()[0]))] += count
    return Totals(
        faults=faults,
        kinds=kinds,
        recoveries=recoveries,
        alone=alone,
        fires=sum(verdict.fires for verdict in played),
        attempts=sum(verdict.attempts for verdict in played),
        stale_refused=sum(verdict.stale_refused for verdict in played),
        stale_accepted=sum(verdict.stale_accepted for verdict in played),
        stale_unanswered=sum(verdict.stale_unanswered for verdict in played),
        violations=sum(len(verdict.violations) for verdict in played),
    )


def show(console: Console, verdicts: list[Verdict]) -> Totals:
    """The tables of the end."""
    totals = add_up(verdicts)
    console.print()
    console.print(_faults(totals))
    console.print(_scenarios(verdicts))
    for verdict in verdicts:
        if verdict.violations:
            _complain(console, verdict)
    console.print(_sums(totals))
    return totals


def _faults(totals: Totals) -> Table:
    table = Table(title="Faults, and seconds until all was well again", title_justify="left")
    table.add_column("fault")
    for heading in ("times", "recovered", "p50", "p99", "worst", "alone", "p50", "p99"):
        table.add_column(heading, justify="right")
    for name, count in sorted(totals.faults.items()):
        seconds, alone = (sorted(found.get(name, [])) for found in (totals.recoveries, totals.alone))
        shown = [f"{percentile(seconds, share):.2f}" if seconds else "" for share in (0.5, 0.99, 1.0)]
        shown += [
            str(len(alone)) if seconds else "",
            *(f"{percentile(alone, x):.2f}" if alone else "" for x in (0.5, 0.99)),
        ]
        table.add_row(name, str(count), str(len(seconds)), *shown)
    table.caption = "alone: nothing else was broken from its begin until all was well"
    table.caption_justify = "left"
    return table


def _scenarios(verdicts: list[Verdict]) -> Table:
    table = Table(title="Scenarios", title_justify="left")
    for heading in ("", "what", "result"):
        table.add_column(heading)
    for heading in ("s", "faults", "fires", "attempts"):
        table.add_column(heading, justify="right")
    table.add_column("notes", overflow="fold")
    for verdict in verdicts:
        status = Text(verdict.status, style=_STYLES[verdict.status])
        notes = verdict.not_run or "; ".join(verdict.notes)
        numbers = (verdict.faults.total(), verdict.fires, verdict.attempts)
        table.add_row(
            verdict.name, verdict.title, status, f"{verdict.seconds:.0f}", *(f"{n:,}" for n in numbers), notes
        )
    return table


def _complain(console: Console, verdict: Verdict) -> None:
    console.print(Text(f"\n{verdict.name} {verdict.title}", style="bold red"))
    for violation in verdict.violations[:_SHOWN_VIOLATIONS]:
        console.print(Text(f"  {violation}"))
    if len(verdict.violations) > _SHOWN_VIOLATIONS:
        console.print(f"  … and {len(verdict.violations) - _SHOWN_VIOLATIONS} more")


def _sums(totals: Totals) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("faults", f"{totals.faults.total():,} of {len(totals.kinds)} kinds: {_told(totals.kinds)}")
    table.add_row("fires", f"{totals.fires:,}")
    table.add_row("attempts", f"{totals.attempts:,}")
    table.add_row("stale writes", told_stale(totals))
    table.add_row("violations", f"{totals.violations:,}")
    return table


def told_stale(totals: Totals) -> str:
    """Every write that was tried is in one of the other three."""
    return (
        f"{totals.stale_tried:,} tried: {totals.stale_refused:,} refused, {totals.stale_accepted:,} accepted,"
        f" {totals.stale_unanswered:,} never answered"
    )


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
