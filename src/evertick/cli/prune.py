"""`evertick db prune`: deletes what is over and old now, at the same gentle pace as the leader does by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Annotated

import typer
from psycopg import AsyncConnection
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from evertick.cli.connection import actor, ask, database_url, opened
from evertick.cli.documents import print_json
from evertick.cli.options import DryRun, Json, Yes, noun
from evertick.cli.prompt import confirm
from evertick.cli.tables import console, hint, line, show
from evertick.cli.times import clock
from evertick.config import Settings, read_settings
from evertick.db.connect import Purpose
from evertick.db.queries import retention, server, shards
from evertick.domain.durations import length, parse_duration
from evertick.domain.errors import NotLeader, UserError
from evertick.domain.retention import choose, rest_seconds
from evertick.engine.retention import Kind
from evertick.scheduler.retention import Limits, PruneRound, limits_of, old_run_ids

SHARD = 0
_WALK = 1000
# What people call one, and several.
_NAMES = {
    Kind.RUNS: ("run", "runs"),
    Kind.JOURNAL: ("journal entry", "journal entries"),
    Kind.SKIP_RECORDS: ("skip record", "skip records"),
    Kind.ALERTS: ("alert", "alerts"),
    Kind.NOTIFICATIONS: ("notification", "notifications"),
    Kind.BACKFILLS: ("backfill that is over", "backfills that are over"),
    Kind.CAUSES: ("cause of a run", "causes of runs"),
    Kind.EVENTS: ("event", "events"),
    Kind.ASSET_UPDATES: ("update of an asset", "updates of assets"),
    Kind.RUNNERS: ("runner that is gone", "runners that are gone"),
    Kind.VERSIONS: ("DAG version", "DAG versions"),
    Kind.BUNDLES: ("bundle of code", "bundles of code"),
}

OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="LENGTH",
        help="What ended longer ago than this: 30d, 12h. The retention (EVERTICK_RETENTION_DAYS) if left out.",
    ),
]
Advance = Callable[[int], None]


def prune_database(
    older_than: OlderThan = None, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Delete runs that ended long ago, with their tasks, logs and results, and whatever nothing needs any more.

    The leader does this by itself, for what is older than the retention. Work goes on meanwhile, and is not slowed down.
    """
    settings = read_settings()
    kept = _kept(older_than, settings)
    ids, now = ask(lambda conn: _old_runs(conn, kept))
    before = now - kept
    if dry_run:
        with _bar(ids, shown=not as_json) as advance:
            found, _ = ask(lambda conn: _count(conn, before, now, advance))
        _show(found, before, kept, as_json=as_json, is_dry=True)
        return
    confirm(f"Delete about {noun(len(ids), 'run')} that ended before {clock(before)}, for good?", yes=yes)
    with _bar(ids, shown=not as_json) as advance:
        done = asyncio.run(_prune(database_url(settings), limits_of(now, kept), advance))
    _show(done.counts, before, kept, as_json=as_json, is_dry=False)
    if done.refused:
        numbers = ", ".join(map(str, done.refused[:10]))
        raise UserError(
            f"PostgreSQL refused to delete {noun(len(done.refused), 'run')}: {numbers}. See the server's log."
        )


def _kept(older_than: str | None, settings: Settings) -> timedelta:
    if older_than is None:
        if not settings.retention_days:
            raise UserError(
                "EVERTICK_RETENTION_DAYS is 0: everything is kept. Name an age with --older-than, such as 30d."
            )
        return timedelta(days=settings.retention_days)
    try:
        return parse_duration(older_than)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--older-than {older_than!r}: {error}.") from None


async def _old_runs(conn: AsyncConnection, kept: timedelta) -> range:
    try:
        before = await shards.read_clock(conn) - kept
    except OverflowError:
        raise UserError("--older-than reaches back beyond the calendar. Name a shorter time.") from None
    return await old_run_ids(conn, before=before)


async def _count(conn: AsyncConnection, before: datetime, now: datetime, advance: Advance) -> dict[Kind, int]:
    runs, after, is_end = 0, 0, False
    while not is_end:
        seen = await retention.walk_runs(conn, after=after, batch=_WALK)
        chosen = choose(seen, after=after, before=before, now=now)
        runs, after, is_end = runs + len(chosen.ids), chosen.last, chosen.is_end
        advance(after)
    old = await retention.count_old(conn, before=before)
    return {Kind.RUNS: runs, Kind.JOURNAL: old.journal, Kind.SKIP_RECORDS: old.skip_records}


async def _prune(url: str, limits: Limits, advance: Advance) -> PruneRound:
    """In the leader's name: whoever leads when a step is made. A change of leader between two steps is no trouble."""
    done = PruneRound(limits, actor=actor())
    async with opened(url, Purpose.PLANNING) as conn:
        while not done.is_over:
            leader = await shards.leader(conn, shard=SHARD)
            started = time.monotonic()
            try:
                await done.step(conn, epoch=leader.epoch if leader else 0)
            except NotLeader:
                continue
            advance(done.last_run_id)
            took = time.monotonic() - started
            await asyncio.sleep(rest_seconds(took, is_behind=await server.is_behind(conn)))
    return done


@contextmanager
def _bar(ids: range, *, shown: bool) -> Iterator[Advance]:
    """How far the walk over the runs has come, for a terminal."""
    out = console()
    if not shown or not out.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        bar = progress.add_task("runs", total=max(len(ids), 1))
        yield lambda last: progress.update(bar, completed=last - ids.start)


def _show(counts: Mapping[Kind, int], before: datetime, kept: timedelta, *, as_json: bool, is_dry: bool) -> None:
    if as_json:
        print_json({"before": before, "is_dry_run": is_dry, **{kind.value: counts.get(kind, 0) for kind in Kind}})
        return
    parts = [f"{count:,} {_NAMES[kind][count != 1]}" for kind, count in counts.items() if count]
    age = f"older than {length(kept.total_seconds())} (before {clock(before)})"
    if not parts:
        show(line(f"Nothing is {age}."))
    elif is_dry:
        show(line(f"Would delete {', '.join(parts)}: {age}."))
        show(hint("Versions and code that no run needs then go as well. Without --dry-run it is done."))
    else:
        show(line(f"Deleted {', '.join(parts)}: {age}.", "green"))
