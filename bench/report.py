"""Writes the tables of docs/explanation/performance.md from the stored figures, so that no figure is typed by hand.

`python -m bench.report`. Changes only the text between its marks, which also states if nothing was measured yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import profiles
from bench.figures import LATEST, Figure, number, read, shared_settings, short_settings
from bench.house import ROOT

PAGE = ROOT / "docs/explanation/performance.md"
SCALE = ROOT / "docs/explanation/scale.md"
# The figures of that page: the cost of many runners and agents.
OF_SCALE = ("fleet", "agents", "dispatch")
PEERS = Path(__file__).with_name("peers.json")

_ROWS = 16
_NOT_ON_THE_PAGE = ("Dead rows", "Statements by")
_NOT_MEASURED = "*Not measured yet: run `{}`, which fills this in.*"
# For each workload: its name in peers.json, its heading, and whether less is better.
WORKLOADS = {
    "chain_s": ("40 in sequence, s", True),
    "gap_ms": ("median gap, ms", True),
    "fan_s": ("1 → 100 → 1, s", True),
    "runs_per_s": ("one-task runs/s", False),
    "late_ms": ("schedule late, ms", True),
}


def refresh(page: Path = PAGE, scale: Path = SCALE) -> None:
    """Update the pages from the stored figures."""
    page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    scale.write_text(rendered_scale(scale.read_text(encoding="utf-8")), encoding="utf-8")


def rendered(text: str, latest: Path = LATEST, peers: Path = PEERS) -> str:
    """The page's text with tables from the stored figures."""
    text = _between(text, "figures", figures_section(read(latest)))
    kept = json.loads(peers.read_text(encoding="utf-8")) if peers.exists() else None
    text = _between(text, "peers", peers_section(kept))
    return _between(text, "profiles", profiles_section(profiles.read()))


def rendered_scale(text: str, latest: Path = LATEST) -> str:
    figures = [figure for figure in read(latest) if figure.name.split(".")[0] in OF_SCALE]
    return _between(text, "figures", figures_section(figures))


def figures_section(figures: Sequence[Figure]) -> str:
    if not figures:
        return _NOT_MEASURED.format("make bench")
    heads = ["figure", "work", "value", "goal", "met", "min … max", "÷ raw 1 \\| 100", "settings"]
    rows = [
        [
            f"`{figure.name}`",
            figure.about,
            "not measured" if figure.value is None else f"**{number(figure.value)}** {figure.unit}",
            str(figure.goal or ""),
            {True: "✓", False: "✗", None: ""}[figure.met],
            f"{number(min(figure.samples))} … {number(max(figure.samples))}" if len(figure.samples) > 1 else "",
            " \\| ".join(number(ratio) for ratio in figure.ratio_to_raw.values()),
            figure.problem or short_settings(figure.settings),
        ]
        for figure in figures
    ]
    runs = {str(figure.settings.get("measured_at")): shared_settings(figure.settings) for figure in figures}
    dates = [f"- measured at {at}: {shared}" for at, shared in sorted(runs.items())]
    return f"{_table(heads, rows)}\n\n" + "\n".join(dates)


def profiles_section(kept: Mapping[str, profiles.Kept]) -> str:
    """The most expensive rows of each profile table."""
    if not kept:
        return _NOT_MEASURED.format("make profile")
    parts = []
    for name, profile in kept.items():
        parts.append(f"### {name}\n\n{profile.about} Measured at {profile.measured_at}, load average {profile.load:g}.")
        for table in profile.tables:
            if not table.title.startswith(_NOT_ON_THE_PAGE):
                rows = [[_cell(cell) for cell in row] for row in table.rows[:_ROWS]]
                parts.append(f"{table.title}:\n\n{_table(table.heads, rows)}")
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def peers_section(kept: Mapping[str, object] | None) -> str:
    if kept is None:
        return _NOT_MEASURED.format("make bench-peers")
    rows = kept["rows"]
    assert isinstance(rows, list)
    heads = ["engine", *(head for head, _ in WORKLOADS.values()), "notes"]
    table = _table(heads, [[str(row["engine"]), *peer_cells(row, rows), peer_note(row)] for row in rows])
    settings = kept["settings"]
    assert isinstance(settings, Mapping)
    return f"{table}\n\n- measured at {settings.get('measured_at')}: {shared_settings(settings)}"


def peer_cells(row: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Each figure of one engine, and how many times better Evertick was in the same run, for each isolation."""
    if row.get("problem"):
        return ["NOT RUN", *["–"] * (len(WORKLOADS) - 1)]
    references = [] if row.get("is_reference") else [each for each in rows if each.get("is_reference")]
    found = []
    for name, (_, is_less_better) in WORKLOADS.items():
        value = row.get(name)
        if not isinstance(value, int | float):
            found.append("–")
            continue
        if value < 0:
            found.append(f"{number(value)} (too early)")
            continue
        ours = [mine for each in references if isinstance(mine := each.get(name), int | float) and mine and value]
        times = [f"×{number(value / mine if is_less_better else mine / value)}" for mine in ours]
        found.append(f"{number(value)} ({', '.join(times)})" if times else number(value))
    return found


def peer_note(row: Mapping[str, object]) -> str:
    return str(row.get("problem") or row.get("note") or "").replace(f"{ROOT}/", "").replace("|", "/")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _between(text: str, mark: str, content: str) -> str:
    first, last = f"<!-- {mark}: written by bench/report.py -->", f"<!-- end of {mark} -->"
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise SystemExit(
            f"{PAGE.relative_to(ROOT)} lacks the marks {first} and {last}: put them where the table belongs."
        )
    return f"{before}{first}\n{content}\n{last}{after}"


if __name__ == "__main__":
    refresh()
    sys.exit(0)
