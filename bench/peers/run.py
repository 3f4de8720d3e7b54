"""`make bench-peers`: compares Evertick with other engines on the same work, in the same hour, one at a time.

`python -m bench.peers.run --only celery,dbos`. Each engine gets its own virtual environment and a fresh database on the same
durable server. One that cannot be installed or measured is listed with the reason. Keeps bench/peers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench import report
from bench.figures import Settings, machine, server
from bench.house import Server, postgres, working_folder
from bench.peers.engine import ENGINES, Engine, Row, measure_engine
from bench.peers.ours import measure_ours
from bench.system_postgres import programs, system_postgres
from rich.console import Console
from rich.table import Table


async def _measure(engines: Sequence[Engine], console: Console) -> tuple[list[Row], Settings]:
    """Measure Evertick first and last, to show how the machine's speed changed meanwhile."""
    async with working_folder() as folder, _server(folder) as on:
        facts = machine() | server(on.url)
        theirs: list[Row] = []
        with console.status("starting") as status:
            status.update("Evertick")
            before = await measure_ours(on, folder / "before")
            for engine in engines:
                for is_tuned in (False, True):
                    name = f"{engine.title}{', tuned' if is_tuned else ''}"
                    status.update(f"{name}: {engine.about}")
                    began = time.monotonic()
                    row = await measure_engine(engine, on, folder, is_tuned=is_tuned)
                    said = f"NOT RUN, {row['problem']}" if row.get("problem") else f"{time.monotonic() - began:.0f} s"
                    console.print(f"{name}: {said}", style="dim")
                    theirs.append(row)
                    if row.get("problem"):
                        break
            status.update("Evertick again")
            after = await measure_ours(on, folder / "after")
    ours = [{**first, **_means(first, last)} for first, last in zip(before, after, strict=True)]
    return [*ours, *theirs], facts


@asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[Server]:
    """One server for all engines: the system's, because some engines need its extensions, otherwise the embedded one."""
    if programs() is None:
        async with postgres(folder) as on:
            yield on
    else:
        async with system_postgres(folder / "postgres") as on:
            yield on


def _means(first: Row, last: Row) -> Row:
    found: Row = {}
    for name in report.WORKLOADS:
        a, b = first.get(name), last.get(name)
        if isinstance(a, int | float) and isinstance(b, int | float):
            found[name] = (a + b) / 2
    return found


def _table(rows: Sequence[Row]) -> Table:
    shown = Table(
        title="The same work. In brackets: how many times better Evertick was, with a process per task and with reused ones",
        title_justify="left",
        show_edge=False,
    )
    for head in ("engine", *(head for head, _ in report.WORKLOADS.values()), "notes"):
        shown.add_column(head, justify="left" if head in ("engine", "notes") else "right")
    for row in rows:
        shown.add_row(str(row["engine"]), *report.peer_cells(row, rows), report.peer_note(row))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated names (default: all)")
    parser.add_argument("--out", type=Path, default=report.PEERS, help="where the figures are kept")
    options = parser.parse_args(arguments)
    wanted = options.only.replace(",", " ").split() or list(ENGINES)
    if unknown := [name for name in wanted if name not in ENGINES]:
        print(f"Unknown engine {', '.join(unknown)}. Available: {', '.join(ENGINES)}.", file=sys.stderr)
        return 2
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 170)
    rows, facts = asyncio.run(_measure([ENGINES[name] for name in wanted], console))
    console.print(_table(rows))
    text = json.dumps({"settings": facts, "rows": rows}, indent=1, ensure_ascii=False)
    options.out.write_text(f"{text}\n", encoding="utf-8")
    if options.out == report.PEERS:
        report.refresh()
    return 0


if __name__ == "__main__":
    sys.exit(main())
