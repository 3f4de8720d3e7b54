"""The change feed: polls the database for changes since the last poll. One reader per process; the engine writes nothing for it.

Rows contain their transaction id. A poll selects rows written by transactions that are not older than the oldest one that was
open at the previous poll, so no change is missed whatever the commit order; rows already reported are remembered as long as they
can reappear. Polls must never read more than open, new or named runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import TypeVar

from psycopg import AsyncConnection

from evertick.db.queries import changes
from evertick.db.queries.changes import AuditChange, ChangedRun, ChangedTask, ChangeMark
from evertick.domain.states import TERMINAL_RUN_STATES

MOST_CHANGES = 5_000
# Limits: open runs remembered, open runs checked per poll, and runs whose tasks are polled.
MOST_OPEN, OPEN_PER_LOOK, MOST_WATCHED = 200_000, 10_000, 1_000
# Evertick's transactions are shorter than this. An older one belongs to another program and must not extend the polled range.
LONGEST_TRANSACTION_SECONDS = 120.0
# Ids are assigned before commit: a new row may have a lower id than rows already seen.
OVERLAP = 1_000

_ENDED = frozenset(state.value for state in TERMINAL_RUN_STATES)
_POOL_VERBS, _RUNNER_VERBS = frozenset({"set_pool", "delete_pool"}), frozenset({"drain", "undrain"})

Facts = dict[str, object]
Key = tuple[object, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`name` is the kind of event; `facts` are its fields, without the DAG's name."""

    name: str
    dag_id: int | None
    run_id: int | None
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """The watched tasks: those of `runs`, of open runs of `dags`, or of all open runs."""

    runs: frozenset[int] = frozenset()
    dags: frozenset[str] = frozenset()
    is_all: bool = False


class TooManyChanges(Exception):
    """Too many changes to report individually."""


@dataclass(slots=True)
class ChangeFeed:
    _marks: deque[tuple[float, ChangeMark]] = field(default_factory=deque)
    _open: dict[int, None] = field(default_factory=dict)
    # Reported rows with their transactions, and the transaction marks of earlier polls.
    _reported: dict[Key, tuple[int, int]] = field(default_factory=dict)

    async def begin(self, conn: AsyncConnection) -> None:
        """Start from the current state. Data read after this call is not older than the start of the first `look`."""
        mark = await changes.mark(conn)
        newest_run, newest_entry = max(mark.newest_run - OVERLAP, 0), max(mark.newest_entry - OVERLAP, 0)
        first = ChangeMark(mark.oldest, mark.next, newest_run, newest_entry, mark.at)
        self._marks, self._reported = deque([(time.monotonic(), first)]), {}
        self._open = dict.fromkeys(await changes.open_run_ids(conn, limit=MOST_OPEN))

    async def look(self, conn: AsyncConnection, interest: Callable[[], Interest]) -> list[Change]:
        """Return each change once. Raises TooMuch for a flood: it counts as reported, although a part may come again.

        `interest` is evaluated after the mark: later watchers are served by the next poll, from this mark on.
        """
        since, before = self._since(), self._marks[0][1]
        written_since = changes.xid(since)
        # Take the mark first, so that changes during the other queries are found again.
        mark = await changes.mark(conn)
        try:
            entries = _bounded(
                await changes.entries(conn, since=written_since, after=before.newest_entry, limit=MOST_CHANGES + 1)
            )
            moved = _bounded(
                await changes.changed_runs(
                    conn,
                    since=written_since,
                    after=before.newest_run,
                    were_open=self._next_open(),
                    limit=MOST_CHANGES + 1,
                )
            )
            touched = {*(row.run_id for row in moved), *(entry.run_id for entry in entries if entry.run_id is not None)}
            watched = await self._watched(conn, interest(), touched)
            tasks = _bounded(await changes.tasks(conn, since=written_since, run_ids=watched, limit=MOST_CHANGES + 1))
        except TooManyChanges:
            await self.begin(conn)
            raise
        self._marks.append((time.monotonic(), mark))
        found = [*self._entries(entries, mark), *self._runs(moved, tasks, mark)]
        self._reported = {key: reported for key, reported in self._reported.items() if reported[1] > since}
        return found

    def _since(self) -> int:
        """The oldest transaction that the last poll may not have seen completely. Drops obsolete marks."""
        since = self._marks[-1][1].oldest
        oldest_time = time.monotonic() - LONGEST_TRANSACTION_SECONDS
        since = max([since, *(mark.next for at, mark in self._marks if at < oldest_time)])
        # Keep the last mark before `since` and one more: an id may be assigned before its transaction has a number.
        while len(self._marks) > 2 and self._marks[2][1].next <= since:
            self._marks.popleft()
        return since

    def _next_open(self) -> list[int]:
        chosen = list(islice(self._open, OPEN_PER_LOOK))
        if len(self._open) > OPEN_PER_LOOK:
            for run_id in chosen:
                del self._open[run_id]
            self._open |= dict.fromkeys(chosen)
        return chosen

    async def _watched(self, conn: AsyncConnection, interest: Interest, touched: set[int]) -> list[int]:
        """The runs whose tasks are polled, including runs that just ended, so that the ends of their tasks are reported."""
        if interest.is_all or interest.dags:
            found = await changes.watched(
                conn, dags=sorted(interest.dags), is_all=interest.is_all, moved=sorted(touched), limit=MOST_WATCHED
            )
            return sorted({*found, *interest.runs})
        return sorted(interest.runs)

    def _entries(self, entries: list[AuditChange], mark: ChangeMark) -> Iterable[Change]:
        for entry in entries:
            name = _event_of(entry)
            if name is not None and self._is_new(("entry", entry.entry_id), entry.written_by, mark):
                facts: Facts = {"verb": entry.verb, "at": _text(entry.occurred_at)}
                if entry.run_id is not None:
                    facts |= {"run_id": entry.run_id, "state": entry.state}
                    facts |= {"task": entry.task, "map_index": entry.map_index} if entry.task is not None else {}
                elif entry.backfill is not None:
                    facts["backfill"] = entry.backfill
                elif entry.subject is not None:
                    facts[name] = entry.subject
                yield Change(name=name, dag_id=entry.dag_id, run_id=entry.run_id, facts=facts)

    def _runs(self, moved: list[ChangedRun], tasks: list[ChangedTask], mark: ChangeMark) -> Iterable[Change]:
        """The changes of runs and tasks, in order: a run starts before its tasks change and ends after them."""
        for row in moved:
            if row.state not in _ENDED:
                self._open[row.run_id] = None
                yield from self._run(row, mark)
        for task in tasks:
            if self._is_new(("task", task.run_id, task.task, task.map_index), task.written_by, mark):
                at = task.finished_at or (task.started_at if task.state == "running" else None) or mark.at
                facts: Facts = {"run_id": task.run_id, "task": task.task, "map_index": task.map_index}
                facts |= {"state": task.state, "attempt": task.attempt, "at": _text(at)}
                yield Change(name="task", dag_id=task.dag_id, run_id=task.run_id, facts=facts)
        for row in moved:
            if row.state in _ENDED:
                self._open.pop(row.run_id, None)
                yield from self._run(row, mark)

    def _run(self, row: ChangedRun, mark: ChangeMark) -> Iterable[Change]:
        if self._is_new(("run", row.run_id), row.written_by, mark):
            at = row.finished_at if row.state in _ENDED else mark.at
            facts: Facts = {"run_id": row.run_id, "state": row.state, "open_tasks": row.open_tasks, "at": _text(at)}
            yield Change(name="run", dag_id=row.dag_id, run_id=row.run_id, facts=facts)

    def _is_new(self, key: Key, written_by: int, mark: ChangeMark) -> bool:
        known = self._reported.get(key)
        self._reported[key] = (written_by, mark.next)
        return known is None or known[0] != written_by


def _event_of(entry: AuditChange) -> str | None:
    """The event name of an audit entry. Triggered runs are reported as runs; changes of users and tokens are not reported."""
    if entry.verb == "trigger":
        return None
    if entry.run_id is not None:
        return "run"
    if entry.dag_id is not None:
        return "backfill" if entry.backfill is not None else "schedule" if entry.verb.endswith("_schedule") else "dag"
    return "pool" if entry.verb in _POOL_VERBS else "runner" if entry.verb in _RUNNER_VERBS else None


def _bounded(rows: list[T]) -> list[T]:
    if len(rows) > MOST_CHANGES:
        raise TooManyChanges
    return rows


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat().replace("+00:00", "Z")
