"""The history of a run or a task: attempts with their reasons, actions of users and automatic repairs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from evertick.db.queries.overview import RunAttempt
from evertick.db.queries.runs import JournalEntry, RunRow
from evertick.db.queries.tasks import AttemptRow


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEvent:
    """`what` describes the event; `state` is the resulting state, if any; `who` is the actor, None for the engine."""

    at: datetime
    what: str
    state: str | None = None
    task: str | None = None
    map_index: int = -1
    reason: str | None = None
    who: str | None = None


def events_of_run(
    run: RunRow, attempts: Iterable[RunAttempt], journal: Iterable[JournalEntry], names: Mapping[int, str]
) -> list[HistoryEvent]:
    """The events of a run, newest first."""
    found = [HistoryEvent(at=run.created_at, what="run created", who=run.triggered_by)]
    if run.started_at is not None:
        found.append(HistoryEvent(at=run.started_at, what="run began", state="running"))
    if run.finished_at is not None:
        found.append(HistoryEvent(at=run.finished_at, what="run ended", state=run.state, reason=run.reason))
    for each in attempts:
        found += _of_attempt(each, task=each.task, map_index=each.map_index)
    found += [_of_entry(entry, names) for entry in journal]
    return _newest_first(found)


def of_task(attempts: Iterable[AttemptRow], journal: Iterable[JournalEntry]) -> list[HistoryEvent]:
    """The events of a task, newest first. `journal` holds entries of this task and of the whole run."""
    found = [event for each in attempts for event in _of_attempt(each, task=None, map_index=-1)]
    found += [_of_entry(entry, {}) for entry in journal]
    return _newest_first(found)


def _newest_first(found: list[HistoryEvent]) -> list[HistoryEvent]:
    """Sort, with ties (one transaction) in causal order: a task ends before the next starts; a run is created first, ends last."""
    steps = {"run created": 0, "run began": 1, "run ended": 4}

    def place(event: HistoryEvent) -> tuple[datetime, int]:
        return event.at, steps.get(event.what, 3 if event.state == "running" else 2)

    return sorted(found, key=place, reverse=True)


def _of_attempt(each: RunAttempt | AttemptRow, *, task: str | None, map_index: int) -> list[HistoryEvent]:
    event = partial(HistoryEvent, task=task, map_index=map_index)
    found = []
    host = f" on {each.host}" if isinstance(each, AttemptRow) and each.host else ""
    if each.started_at is not None:
        found.append(event(at=each.started_at, what=f"attempt {each.attempt} started{host}", state="running"))
    if each.finished_at is not None:
        what = f"attempt {each.attempt} ended: {each.outcome.replace('_', ' ')}"
        found.append(event(at=each.finished_at, what=what, state=each.outcome, reason=each.reason))
    return found


def concerns(entry: JournalEntry, *, task: str, idx: int, map_index: int) -> bool:
    """Whether the entry concerns this task, a group that contains it, or the whole run. Notes on the run are excluded."""
    if entry.verb == "note" and entry.task_index is None:
        return False
    group = entry.detail.get("group")
    if group is not None and not task.startswith(f"{group}."):
        return False
    return entry.task_index in (None, idx) and entry.map_index in (None, map_index)


def value_words(value: object) -> str:
    """A JSON value in words, without brackets and quotes."""
    match value:
        case Mapping():
            return ", ".join(
                f"{key} {value_words(each)}" for key, each in value.items() if each not in (None, "", [], {})
            )
        case list():
            return ", ".join(map(value_words, value))
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _again(detail: Mapping[str, object]) -> tuple[str, str]:
    """Describe an automatic retry of a group or of the whole run."""
    whole = f"group {detail['group']}" if "group" in detail else "the run"
    failed = detail.get("failed")
    why = f"failed: {', '.join(map(str, failed))}" if isinstance(failed, list) else str(detail.get("reason") or "")
    return f"{whole} restarted, retry {detail.get('retried')}", why


def _of_entry(entry: JournalEntry, names: Mapping[int, str]) -> HistoryEvent:
    detail = ", ".join(
        f"{key}: {value_words(value)}" for key, value in entry.detail.items() if value not in (None, "", [], {}, False)
    )
    what = entry.verb.replace("_", " ")
    if entry.verb == "note":
        what, detail = "note removed" if entry.detail.get("is_taken_away") else "note written", ""
    if entry.verb == "retry":
        what, detail = _again(entry.detail)
    return HistoryEvent(
        at=entry.occurred_at,
        what=what,
        task=None if entry.task_index is None else names.get(entry.task_index),
        map_index=-1 if entry.map_index is None else entry.map_index,
        reason=detail[:1000] or None,
        who=entry.actor,
    )
