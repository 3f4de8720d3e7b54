"""Why a task does not run, in words. The database finds the reasons, with the same rows and functions that decide; here they are
only told, and must never be weighed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evertick.domain.gates import EXCLUSIVE

Detail = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason, with what it is made of."""

    kind: str
    detail: Detail


@dataclass(frozen=True, slots=True)
class Blocked:
    """What holds back `waiting` tasks (or runs, where these wait to begin)."""

    kind: str
    name: str
    waiting: int
    since: datetime | None
    detail: Detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A task with its reasons; where it waits for another task, that one's own."""

    run_id: int
    task: str
    state: str
    reasons: Sequence[Reason]
    upstream: Explained | None = None


def tell(reason: Reason) -> str:
    """One sentence."""
    return _SENTENCES[reason.kind](reason.detail)


def _ended(it: Detail) -> str:
    return f"it has ended: {it['state']}" + (f" ({it['reason']})" if it["reason"] else "")


def _running(it: Detail) -> str:
    asked = f"; it was asked to stop ({it['asked']})" if it["asked"] else ""
    return f"it runs on {it['runner'] or 'a runner'} since {it['since']}{asked}"


def _quarantined(it: Detail) -> str:
    again = f"tried again at {it['retry_at']}" if it["retry_at"] else "until it is published anew"
    return f"set aside, {again}: {it['verb']} failed: {it['reason']}"


def _paused(it: Detail) -> str:
    return f"DAG {it['dag']} is paused: `evertick dags unpause {it['dag']}`"


def _run_queued(it: Detail) -> str:
    limit = it["limit"]
    if limit is not None and it["active"] >= limit:
        return f"its run waits: {it['active']} of {limit} runs are active (max_active_runs), {it['ahead']} before it"
    return "its run is about to begin"


def _upstream(it: Detail) -> str:
    return f"it waits for {it['task']}, which is {it['state']} ({it['ended']} of {it['total']} before it ended, rule {it['rule']})"


def _time(it: Detail) -> str:
    why = f": {it['reason']}" if it["reason"] else ""
    return f"it is tried again at {it['until']}, after attempt {it['attempt']}{why}"


def _retry_line(it: Detail) -> str:
    return (
        f"its retry is due since {it['due_at']}, but as many retries of queue {it['queue']} are active as"
        f" max_active_retries allows; {it['ahead']} before it"
    )


def _gate(it: Detail) -> str:
    held = _holders(it["holders"])
    if kept := it["reserved_for"]:
        who = f"{kept['task']} of run {kept['run_id']}, which needs {kept['need']} and has waited for over a minute"
        return f"{it['gate']} {it['name']} is reserved for {who}"
    place = f"; {it['ahead']} before it in line" if it["ahead"] is not None else ""
    if it["gate"] == "mutex":
        kind = "alone" if it["need"] >= EXCLUSIVE else "shared"
        return f"it needs key {it['name']} ({kind}), held by {held}{place}"
    if it["gate"] == "pool" and it["need"] > it["capacity"]:
        return (
            f"it needs {it['need']} slots of pool {it['name']}, which has {it['capacity']}:"
            f" `evertick pools set {it['name']} {it['need']}`"
        )
    need = f"needs {it['need']}, " if it["need"] > 1 else ""
    what = {"pool": "pool", "key": "key", "group": "group", "task": "max_active of", "dag": "max_active_tasks of"}[
        it["gate"]
    ]
    return f"{what} {it['name']} is full: {need}{it['used']}/{it['capacity']} used by {held}{place}"


def _holders(holders: Sequence[Detail]) -> str:
    if not holders:
        return "nobody"
    shown = ", ".join(f"{each['dag']}.{each['task']} of run {each['run_id']} ({each['state']})" for each in holders[:3])
    return f"{shown} and others" if len(holders) > 3 else shown


def _no_runner(it: Detail) -> str:
    last = (
        f"; the last one, {it['last']['runner']}, left at {it['last']['until']}"
        if it["last"]
        else "; there never was one"
    )
    draining = f" ({it['draining']} drain)" if it["draining"] else ""
    return f"no live runner serves queue {it['queue']}{draining}{last}: `evertick runner --queues {it['queue']}`"


def _in_line(it: Detail) -> str:
    return f"it is in line for queue {it['queue']}: {it['ahead']} before it, {it['busy']}/{it['slots']} slots of its runners busy"


_SENTENCES = {
    "ended": _ended,
    "running": _running,
    "quarantined": _quarantined,
    "dag_paused": _paused,
    "run_queued": _run_queued,
    "upstream": _upstream,
    "time": _time,
    "retry_line": _retry_line,
    "gate": _gate,
    "no_runner": _no_runner,
    "in_line": _in_line,
}
