"""How backfills are shown: in a table, on a page, with a bar that moves, and as documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from psycopg import AsyncConnection
from rich.progress import BarColumn, Progress, TextColumn

from evertick.cli import far_backfills
from evertick.cli.connection import database_url
from evertick.cli.documents import document, iso
from evertick.cli.far import far_server, look_until_over
from evertick.cli.options import noun
from evertick.cli.poll import poll
from evertick.cli.tables import Cell, console, facts, heading, hint, line, show, state, table
from evertick.cli.times import clock
from evertick.config import read_settings
from evertick.db.queries.backfills import BackfillRow, FailedRun
from evertick.db.queries.shards import read_clock
from evertick.domain.durations import length, relative, took
from evertick.domain.schedules.misfire import never_was
from evertick.domain.schedules.spec import ScheduleSpec, describe
from evertick.domain.schedules.time_zones import find_zone
from evertick.engine.backfills import BackfillPreview, BackfillRequest, find_backfill
from evertick.engine.fire_schedules import in_words

_STYLES = {"running": "running", "paused": "paused", "done": "success", "canceled": "canceled", "failed": "failed"}
_BAR_WIDTH = 20


def backfill_document(row: BackfillRow, now: datetime) -> dict[str, object]:
    return {
        **document(row, without=("is_dag_paused",)),
        "done": row.done,
        "remaining_seconds": row.remaining_seconds(now),
        "when": in_words(row.spec),
    }


def outlook_document(outlook: BackfillPreview, wish: BackfillRequest) -> dict[str, object]:
    return {
        "dag": wish.dag,
        "schedule": outlook.schedule,
        "when": describe(outlook.spec),
        "first_at": outlook.first,
        "last_at": outlook.last,
        "count": outlook.total,
        "existing": outlook.existing,
        "new_runs": outlook.new_runs(wish.reprocess),
        "reprocess": wish.reprocess,
        "sample": list(outlook.sample),
    }


def show_outlook(outlook: BackfillPreview, wish: BackfillRequest) -> None:
    """What a backfill would do."""
    spec = outlook.spec
    runs = outlook.new_runs(wish.reprocess)
    made = "as many runs as have none" if runs is None else noun(runs, "run")
    show(line(f"{noun(outlook.total, 'instant')}: {made} would be made.", "bold"), hint(describe(spec)))
    if outlook.existing:
        kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(outlook.existing.items()))
        show(hint(f"Instants that have a run: {kinds}. --reprocess says which of them run again."))
    if lost := never_was(spec, outlook.first, outlook.last):
        show(hint(f"On the clock of {spec.timezone}, {noun(lost.count, 'time')} never was: no run is made for that."))
    order = "newest first" if wish.newest_first else "oldest first"
    if spec.timezone == "UTC":
        sample = table(("UTC",), [[iso(instant)] for instant in outlook.sample])
    else:
        sample = table((spec.timezone, "UTC"), [[_local(spec, instant), iso(instant)] for instant in outlook.sample])
    show(heading(f"The first of them, {order}"), sample)
    if outlook.total > len(outlook.sample):
        show(hint(f"and {outlook.total - len(outlook.sample):,} more"))
    show(hint("Nothing was made. Without --dry-run it is."))


def show_rows(rows: Sequence[BackfillRow], now: datetime) -> None:
    cells: list[list[Cell]] = []
    for row in rows:
        span = f"{row.first_at:%Y-%m-%d %H:%M} – {row.last_at:%Y-%m-%d %H:%M}"
        made = relative(row.created_at, now)
        cells.append([str(row.backfill_id), row.dag, _state(row), _progress(row), str(row.failed), span, made])
    show(table(("#ID", "DAG", "STATE", "PROGRESS", "#FAILED", "RANGE (UTC)", "MADE"), cells))


def show_backfill(row: BackfillRow, failed: Sequence[FailedRun], now: datetime) -> None:
    left = row.remaining_seconds(now)
    order = "newest first" if row.newest_first else "oldest first"
    values: dict[str, Cell] = {
        "Backfill": line(f"{row.backfill_id} of {row.dag}", "bold"),
        "State": _state(row),
        "Waits": "its DAG is paused" if row.is_dag_paused and row.state == "running" else None,
        "Reason": row.reason,
        "When": f"{in_words(row.spec)}" + (f" (schedule {row.schedule})" if row.schedule else ""),
        "Range": f"{iso(row.first_at)} to {iso(row.last_at)}, {order}",
        "Runs again": row.reprocess,
        "At once": f"at most {noun(row.parallel, 'run')}",
        "Progress": _progress(row),
        "Runs": f"{row.made:,} made: {row.open_runs:,} open, {row.succeeded:,} succeeded, {row.failed:,} failed,"
        f" {row.canceled:,} canceled",
        "Left alone": f"{noun(row.left_alone, 'instant')} that needed no run" if row.left_alone else None,
        "Still needs": f"about {length(left)}" if left is not None else None,
        "Took": took(row.created_at, row.finished_at, now),
        "Made": f"{clock(row.created_at)} by {row.created_by}",
    }
    show(facts(values))
    if failed:
        numbers = ", ".join(str(each.run_id) for each in failed)
        show(hint(f"Runs that failed: {numbers}. Look at one with: evertick runs show {failed[0].run_id}"))


def follow(backfill_id: int) -> None:
    """A bar that moves until it is over; lines now and then where there is no terminal."""
    out = console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[rest]}"),
    )
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task(f"backfill {backfill_id}", total=1, rest="")
        told = ""

        def tell(row: BackfillRow, now: datetime) -> bool:
            nonlocal told
            left = row.remaining_seconds(now)
            rest = f"{row.done:,} of {row.total:,}, {row.open_runs:,} open, {row.failed:,} failed"
            rest += f", about {length(left)} left" if left is not None else ""
            bar.update(task, total=row.total, completed=row.done, rest=rest)
            tenth = f"{row.state} {10 * row.done // row.total}"
            if not out.is_terminal and tenth != told:
                show(line(f"{row.state}: {rest}"))
            told = tenth
            return row.state in ("done", "failed", "canceled") and row.open_runs == 0

        async def look(conn: AsyncConnection) -> bool:
            return tell(await find_backfill(conn, backfill_id), await read_clock(conn))

        if (server := far_server()) is None:
            asyncio.run(poll(database_url(read_settings()), look))
        else:
            look_until_over(lambda: tell(far_backfills.find_backfill(server, backfill_id)[0], server.now))


def _progress(row: BackfillRow) -> str:
    share = row.done / row.total
    full = int(share * _BAR_WIDTH)
    return f"{'█' * full}{'░' * (_BAR_WIDTH - full)} {int(share * 100)} % ({row.done:,} of {row.total:,})"


def _state(row: BackfillRow) -> Cell:
    return state(_STYLES[row.state], row.state)


def _local(spec: ScheduleSpec, instant: datetime) -> str:
    return instant.astimezone(find_zone(spec.timezone)).isoformat(sep=" ", timespec="seconds")
