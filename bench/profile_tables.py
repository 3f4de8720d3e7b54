"""Formats the tables of a profile, with all costs divided by the number of tasks. Does not print or store them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.counters import HOT_TABLES
from bench.figures import number
from bench.stacks import Cost
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from bench.profile import Profile

_FUNCTIONS = 18
_TEXTS = {"what", "by", "statement", "function", "table", "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One table. Columns whose heads are in `_TEXTS` contain text, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary(seen: Profile, only: str, isolation: str) -> str:
    rate = f"{seen.tasks:,} tasks, {number(seen.tasks / seen.seconds)}/s" if seen.tasks else "no task"
    return f"{only}, {isolation}: {number(seen.seconds)} s, {rate}. Everything is per {seen.unit}."


def tables(seen: Profile, how: str) -> list[Shown]:
    found = [_costs(seen), _statements_sent(seen), _stored_functions(seen), _rows_written(seen), _dead(seen)]
    found += [
        _functions(seen, f"Python in the {service}, by {how}", costs) for service, costs in seen.functions.items()
    ]
    return [table for table in found if table.rows]


def statements(seen: Profile) -> Shown:
    """The statements of pg_stat_statements, including statements inside stored functions."""
    rows = [
        [
            f"{1000 * each.milliseconds / seen.amount:.1f}",
            number(each.calls / seen.amount),
            f"{1000 * each.milliseconds / max(each.calls, 1):.1f}",
            number(each.rows / seen.amount),
            number(each.wal_bytes / seen.amount),
            number(each.blocks / seen.amount),
            " ".join(each.text.split())[:200],
        ]
        for each in seen.statements
    ]
    title = "Statements by pg_stat_statements, those inside functions included (an outer one contains its inner ones)"
    heads = [f"µs/{seen.unit}", f"calls/{seen.unit}", "µs/call", "rows", "WAL bytes", "blocks", "statement"]
    return Shown(title=title, heads=heads, rows=rows)


def show(console: Console, shown: Shown) -> None:
    table = Table(title=escape(shown.title), title_justify="left", show_edge=False, pad_edge=False)
    for head in shown.heads:
        justify = "left" if head in _TEXTS else "right"
        table.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in shown.rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
    console.print()


def _costs(seen: Profile) -> Shown:
    rows = [[name, f"{1e6 * seconds / seen.amount:.0f} µs"] for name, seconds in seen.cpu.items()]
    rows.append(["all processes", f"{1e6 * sum(seen.cpu.values()) / seen.amount:.0f} µs"])
    wall = f"{1e6 * seen.seconds / seen.amount:.0f} µs"
    sent = sum(len(events) for events in seen.events.values())
    wal = {name: seen.after.wal[name] - seen.before.wal[name] for name in seen.after.wal}
    rows += [
        ["wall clock", wall],
        ["round trips (statements sent by runner and scheduler)", number(sent / seen.amount)],
        ["transactions", number((seen.after.transactions - seen.before.transactions) / seen.amount)],
        ["WAL", f"{(seen.after.wal_bytes - seen.before.wal_bytes) / seen.amount:,.0f} bytes"],
        ["WAL records", number(wal["wal_records"] / seen.amount)],
        ["full-page images", number(wal["wal_fpi"] / seen.amount)],
    ]
    return Shown(title="Costs", heads=["what", f"per {seen.unit}"], rows=rows)


def _statements_sent(seen: Profile) -> Shown:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for service, events in seen.events.items():
        for event in events:
            row = sums[service, event.name]
            row[0] += 1
            row[1] += event.seconds
            row[2] += max(event.rows, 0)
    rows = [
        [service, name, number(calls / seen.amount), f"{1e3 * seconds / calls:.2f}", number(found / calls)]
        for (service, name), (calls, seconds, found) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    heads = ["by", "statement", f"per {seen.unit}", "ms each", "rows each"]
    return Shown(title="Statements sent", heads=heads, rows=rows)


def _stored_functions(seen: Profile) -> Shown:
    rows = []
    for name, after in seen.after.functions.items():
        before = seen.before.functions.get(name, dict.fromkeys(after, 0.0))
        if calls := after["calls"] - before["calls"]:
            own, total = after["self_time"] - before["self_time"], after["total_time"] - before["total_time"]
            rows.append(
                (
                    own,
                    [
                        name,
                        number(calls / seen.amount),
                        _micro(own, seen),
                        _micro(total, seen),
                        f"{1000 * total / calls:.0f}",
                    ],
                )
            )
    shown = [row for _, row in sorted(rows, key=lambda row: -row[0])]
    heads = ["function", f"calls/{seen.unit}", f"own µs/{seen.unit}", f"total µs/{seen.unit}", "µs/call"]
    return Shown(title="Stored functions, by the server's own timing", heads=heads, rows=shown)


def _micro(milliseconds: float, seen: Profile) -> str:
    return f"{1000 * milliseconds / seen.amount:.1f}"


def _rows_written(seen: Profile) -> Shown:
    rows = []
    for name, after in sorted(seen.after.tables.items()):
        before: Mapping[str, float] = seen.before.tables.get(name, dict.fromkeys(after, 0.0))
        # A table without an index has no number of index scans.
        moved = {key: (after[key] or 0) - (before[key] or 0) for key in after}
        if not (moved["n_tup_ins"] or moved["n_tup_upd"] or moved["n_tup_del"]):
            continue
        hot = f"{100 * moved['n_tup_hot_upd'] / moved['n_tup_upd']:.0f} %" if moved["n_tup_upd"] else ""
        counts = [number(moved[key] / seen.amount) for key in ("n_tup_ins", "n_tup_upd", "n_tup_del")]
        scans = [number(moved[key] / seen.amount) for key in ("idx_scan", "seq_scan")]
        rows.append([name, *counts, hot, *scans, f"{moved['vacuums']:.0f}", number(moved["bytes"] / seen.amount)])
    heads = [
        "table",
        "inserts",
        "updates",
        "deletes",
        "HOT",
        "index scans",
        "seq scans",
        "vacuums in all",
        "bytes grown",
    ]
    return Shown(title=f"Rows per {seen.unit}", heads=heads, rows=rows)


def _dead(seen: Profile) -> Shown:
    names = [name for name in HOT_TABLES if any(counts.get(name) for _, counts in seen.dead)]
    rows = [[f"{at:.1f}", *(f"{counts.get(name, 0):,}" for name in names)] for at, counts in seen.dead]
    return Shown(title="Dead rows over time", heads=["s", *names], rows=rows if names else [])


def _functions(seen: Profile, title: str, costs: Sequence[Cost]) -> Shown:
    rows = [
        [f"{1e6 * cost.own / seen.amount:.1f}", f"{1e6 * cost.total / seen.amount:.1f}", cost.function]
        for cost in costs[:_FUNCTIONS]
        if cost.own
    ]
    return Shown(title=title, heads=[f"own µs/{seen.unit}", f"total µs/{seen.unit}", "function"], rows=rows)
