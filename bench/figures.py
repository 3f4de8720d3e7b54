"""Figures: measured values with their goals and the settings they depend on. Stored in bench/latest.json."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import psycopg
from bench.house import ROOT
from rich.table import Table

LATEST = Path(__file__).with_name("latest.json")
Settings = dict[str, object]


class Sense(StrEnum):
    """Whether a value must be at most or at least its goal."""

    AT_MOST = "≤"
    AT_LEAST = "≥"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    sense: Sense
    value: float

    def is_met_by(self, value: float) -> bool:
        return value <= self.value if self.sense is Sense.AT_MOST else value >= self.value

    def __str__(self) -> str:
        return f"{self.sense} {number(self.value)}"


def at_most(value: float) -> Goal:
    return Goal(sense=Sense.AT_MOST, value=value)


def at_least(value: float) -> Goal:
    return Goal(sense=Sense.AT_LEAST, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value: the median of its samples unless its name says otherwise. None: it could not be measured.

    `raw` is the throughput of the raw claim-and-complete loop in the same rounds, by batch size; only throughputs have it.
    """

    name: str
    about: str
    unit: str
    value: float | None
    samples: Sequence[float] = ()
    goal: Goal | None = None
    ratio_to_raw: Mapping[str, float] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    problem: str | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value is not None and self.goal.is_met_by(self.value)


def median(
    name: str,
    about: str,
    unit: str,
    samples: Sequence[float],
    goal: Goal | None = None,
    settings: Settings | None = None,
) -> Figure:
    """A figure with one sample per round."""
    return Figure(
        name=name,
        about=about,
        unit=unit,
        value=statistics.median(samples),
        samples=tuple(samples),
        goal=goal,
        settings=settings or {},
    )


def number(value: float) -> str:
    """Format a number briefly: 0.0834, 12.4, 5,210."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine() -> Settings:
    """The client-side settings shared by all figures of this run."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "loadavg": [round(load, 2) for load in os.getloadavg()],
        "fdatasync_us": round(_fdatasync_seconds() * 1e6),
        "commit": _commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: value for name, value in sorted(os.environ.items()) if _is_tuning(name)},
    }


def server(url: str) -> Settings:
    """The server's version and durability settings."""
    names = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size")
    with psycopg.connect(url, autocommit=True) as conn:
        found: Settings = {"postgres": _shown(conn, "server_version")}
        return found | {name: _shown(conn, name) for name in names}


def to_json(figure: Figure) -> dict[str, object]:
    """The stored form: `goal` is a number, and `sense` tells which side of it is good."""
    row = asdict(figure)
    row["goal"] = figure.goal.value if figure.goal else None
    row["sense"] = figure.goal.sense.value if figure.goal else None
    row["met"] = figure.met
    row["samples"] = [round(sample, 6) for sample in figure.samples]
    return row


def from_json(row: Mapping[str, object]) -> Figure:
    fields = {name: row[name] for name in Figure.__dataclass_fields__ if name in row and name != "goal"}
    if row.get("goal") is not None:
        fields["goal"] = Goal(sense=Sense(str(row["sense"])), value=float(str(row["goal"])))
    return Figure(**fields)  # type: ignore[arg-type]


def read(path: Path = LATEST) -> list[Figure]:
    """The latest stored figures, if any."""
    if not path.exists():
        return []
    return [from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def write(figures: Sequence[Figure], path: Path = LATEST) -> None:
    """Store these figures. Figures of earlier runs that are not in this one remain, with their own dates and settings."""
    kept = {figure.name: figure for figure in read(path)}
    cases = {case_of(figure) for figure in figures}
    merged = [figure for figure in kept.values() if case_of(figure) not in cases] + list(figures)
    text = json.dumps([to_json(figure) for figure in merged], indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def case_of(figure: Figure) -> str:
    return figure.name.split(".")[0]


def table(figures: Sequence[Figure]) -> Table:
    """For people."""
    shown = Table(title="Evertick, measured", title_justify="left", show_edge=False, pad_edge=False)
    for column in HEADINGS:
        is_number = column in HEADINGS[1:5]
        shown.add_column(column, justify="right" if is_number else "left", no_wrap=column != HEADINGS[-1])
    for figure in figures:
        shown.add_row(*cells(figure), style="yellow" if figure.met is False else None)
    return shown


HEADINGS = ("figure", "value", "goal", "min … max", "÷ raw 1 | 100", "settings")


def cells(figure: Figure) -> tuple[str, ...]:
    """One row of a table, by HEADINGS."""
    mark = {True: " ✓", False: " ✗", None: ""}[figure.met]
    spread = f"{number(min(figure.samples))} … {number(max(figure.samples))}" if len(figure.samples) > 1 else ""
    return (
        figure.name,
        "not measured" if figure.value is None else f"{number(figure.value)} {figure.unit}",
        f"{figure.goal}{mark}" if figure.goal else "",
        spread,
        " | ".join(number(ratio) for ratio in figure.ratio_to_raw.values()),
        figure.problem or short_settings(figure.settings),
    )


def short_settings(settings: Mapping[str, object]) -> str:
    """The settings that differ between figures; shared ones are printed once."""
    rows = settings.get("rows_per_task")
    parts = [str(settings["isolation"])] if "isolation" in settings else []
    parts += [f"{settings['slots']} slots"] if "slots" in settings else []
    if isinstance(rows, Mapping):
        parts.append("rows: " + " ".join(f"{count:g} {name}" for name, count in rows.items()))
    parts += [str(settings["note"])] if "note" in settings else []
    return ", ".join(parts)


_SHARED = (
    "postgres",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "python",
    "cores",
    "fdatasync_us",
    "loadavg",
    "commit",
)


def shared_settings(settings: Mapping[str, object]) -> str:
    """The settings shared by all figures of one run."""
    return ", ".join(f"{name} {settings[name]}" for name in _SHARED if settings.get(name) is not None)


def _shown(conn: psycopg.Connection[tuple[object, ...]], name: str) -> str:
    row = conn.execute("select current_setting(%s)", [name]).fetchone()
    return str(row[0]) if row else ""


def _is_tuning(name: str) -> bool:
    return name.startswith("EVERTICK_") and name not in ("EVERTICK_DATABASE_URL", "EVERTICK_HOME")


def _fdatasync_seconds(times: int = 100) -> float:
    """The duration of a durable write on this disk, without a database."""
    path = ROOT / "build" / f"fdatasync-{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    taken = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(times):
            os.write(descriptor, b"x" * 512)
            started = time.perf_counter()
            os.fdatasync(descriptor)
            taken.append(time.perf_counter() - started)
    finally:
        os.close(descriptor)
        path.unlink()
    return statistics.median(taken)


def _commit() -> str | None:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None
