"""The reasons why a task does not run or a DAG does not start, in words.

The database finds them with the same rows and functions that decide; this module only formats them, and must never
evaluate them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evertick.domain.dags.gates import EXCLUSIVE
from evertick.domain.durations import length

Detail = Mapping[str, Any]


# The fields of a reason's detail that name tasks, possibly of other DAGs.
_BLOCKERS = {"holders", "smaller", "reserved_for"}


_NAMELESS = {"dag": None, "task": None, "run_id": None}


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason, with the data of its sentence."""

    kind: str
    detail: Detail


@dataclass(frozen=True, slots=True)
class Blocked:
    """A blocker of `waiting` tasks (or runs, if they wait to begin)."""

    kind: str
    name: str
    waiting: int
    since: datetime | None
    detail: Detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A task with its reasons and, if it waits for another task, the reasons of that one."""

    run_id: int
    task: str
    state: str
    reasons: Sequence[Reason]
    upstream: Explained | None = None


def dags_named(reasons: Sequence[Reason]) -> set[str]:
    """The DAGs, the task's own or others, whose tasks the reasons name as blockers."""
    return {str(each["dag"]) for reason in reasons for name in _BLOCKERS for each in _several(reason.detail.get(name))}


def visible_to(reason: Reason, known: Collection[str]) -> Reason:
    """The reason for a caller who may see only some DAGs: it tells that a task of another one blocks, and not which."""
    detail = dict(reason.detail)
    for name in _BLOCKERS & detail.keys():
        shown = [each if each["dag"] in known else {**each, **_NAMELESS} for each in _several(detail[name])]
        detail[name] = shown if isinstance(detail[name], list) else next(iter(shown), None)
    return Reason(reason.kind, detail)


def _several(found: Any) -> Sequence[Detail]:
    return found if isinstance(found, list) else [found] if found else []


def _task(it: Detail) -> str:
    """The task that blocks, or only that there is one: see `visible_to`."""
    return f"{it['dag']}.{it['task']} of run {it['run_id']}" if it["dag"] else "a task of another DAG"


# Formats an instant of a reason's detail for people.
When = Callable[[str], str]


def _as_it_is(instant: str) -> str:
    return f"at {instant}"


def describe(reason: Reason, when: When = _as_it_is) -> str:
    """One sentence."""
    return _SENTENCES[reason.kind](reason.detail, when)


def _ended(it: Detail, when: When) -> str:
    return f"it has already finished: {it['state']}" + (f" ({it['reason']})" if it["reason"] else "")


def _running(it: Detail, when: When) -> str:
    asked = f"; a stop was requested ({it['asked']})" if it["asked"] else ""
    return f"it is running on {it['runner'] or 'a runner'} and started {when(it['since'])}{asked}"


def _queued(it: Detail, when: When) -> str:
    if it["executor"] is None:
        return "it is queued, but its queue entry is missing; the next reconciliation adds it again"
    asked = f"; a stop was requested ({it['asked']})" if it["asked"] else ""
    if not it["has_runner"]:
        who = f"no live runner of executor {it['executor']} that serves queue {it['queue']}"
        return f"queued {when(it['since'])}; {who}: start one{asked}"
    trouble = f": {it['trouble']}" if it["trouble"] else ""
    if it["submitted_at"]:
        return f"executor {it['executor']} accepted it {when(it['submitted_at'])}; its agent has not started yet{trouble}{asked}"
    again = f", next try {when(it['retry_at'])}" if it["retry_at"] else ""
    often = "once" if it["tries"] == 1 else f"{it['tries']} times, last"
    tried = f"submission was tried {often} {when(it['tried_at'])}{again}" if it["tries"] else "not submitted yet"
    who = f"runner {it['runner']}" if it["runner"] else "a runner that stopped responding"
    return f"queued {when(it['since'])} for executor {it['executor']} by {who}, {it['ahead']} ahead; {tried}{trouble}{asked}"


def _quarantined(it: Detail, when: When) -> str:
    again = f"retried {when(it['retry_at'])}" if it["retry_at"] else "until it is published again"
    return f"quarantined, {again}: {it['verb']} failed: {it['reason']}"


def _paused(it: Detail, when: When) -> str:
    return f"DAG {it['dag']} is paused: `evertick dags unpause {it['dag']}`"


def _run_queued(it: Detail, when: When) -> str:
    limit = it["limit"]
    if limit is not None and it["active"] >= limit:
        return f"its run is queued: {it['active']} of {limit} runs are active (max_active_runs), {it['ahead']} ahead"
    return "its run is about to begin"


def _run_delayed(it: Detail, when: When) -> str:
    return f"its run begins {when(it['until'])}, as it was requested"


def _upstream(it: Detail, when: When) -> str:
    return f"it waits for {it['task']}, which is {it['state']} ({it['ended']} of {it['total']} upstream ended, rule {it['rule']})"


def _time(it: Detail, when: When) -> str:
    why = f": {it['reason']}" if it["reason"] else ""
    return f"it will be retried {when(it['until'])}, after attempt {it['attempt']}{why}"


def _retry_line(it: Detail, when: When) -> str:
    return (
        f"its retry was due {when(it['due_at'])}, but max_active_retries limits the active retries of queue {it['queue']};"
        f" {it['ahead']} ahead"
    )


def _gate(it: Detail, when: When) -> str:
    held = _holders(it["holders"])
    if kept := it["reserved_for"]:
        who = f"{_task(kept)}, which needs {kept['need']} and has waited for more than a minute"
        return f"{it['gate']} {it['name']} is reserved for {who}"
    place = f"; {it['ahead']} ahead in the queue" if it["ahead"] is not None else ""
    if it["gate"] in _CHECKS:
        return _CHECKS[it["gate"]](it, when) + (place if it["gate"] == "rate" else "")
    if it["gate"] == "mutex":
        kind = "exclusive" if it["need"] >= EXCLUSIVE else "shared"
        return f"it needs key {it['name']} ({kind}), held by {held}{place}"
    if it["gate"] == "pool" and it["need"] > it["capacity"]:
        return (
            f"it needs {it['need']} slots of pool {it['name']}, which has {it['capacity']}:"
            f" `evertick pools set {it['name']} {it['need']}`"
        )
    need = f"needs {it['need']}, " if it["need"] > 1 else ""
    what = {"task": "max_active of", "dag": "max_active_tasks of"}.get(it["gate"], it["gate"])
    return f"{what} {it['name']} is full: {need}{it['used']}/{it['capacity']} used by {held}{place}"


def _order(it: Detail, when: When) -> str:
    smaller = it["smaller"]
    if not smaller:
        return f"version {it['need']} on key {it['name']} is about to start"
    first, more = smaller[0], f" and {it['ahead'] - 1} more" if it["ahead"] > 1 else ""
    who = f"{_task(first)} ({first['state']})"
    return f"version {it['need']} on key {it['name']} waits for version {first['version']}: {who}{more}"


def _rate(it: Detail, when: When) -> str:
    until = f"next slot {when(it['until'])}" if it["until"] else "the next slot opens now"
    return f"rate {it['name']} is used up: {it['used']}/{it['capacity']} in {it['period']:g} s; {until}"


def _past(it: Detail, when: When) -> str:
    run = f"run {it['run_id']} (the previous run, {it['run_state']})"
    text = f"it waits for {it['task']} of {run}, which is {it['state']}"
    if it["state"] in ("failed", "canceled", "upstream_failed"):
        text += f": `evertick tasks clear {it['run_id']} {it['task']}`, or mark it as success or skipped"
    return text


_CHECKS = {"order": _order, "rate": _rate, "past": _past}


def _holders(holders: Sequence[Detail]) -> str:
    if not holders:
        return "no task"
    shown = ", ".join(f"{_task(each)} ({each['state']})" for each in holders[:3])
    return f"{shown} and others" if len(holders) > 3 else shown


def _fleet(it: Detail) -> str | None:
    """What the launcher of the queue does about it."""
    fleet = it["fleet"]
    if not fleet:
        return None
    who = f"fleet {fleet['name']} on {fleet['engine']}"
    if not fleet["is_led"]:
        return f"{who} starts its runners, but no launcher is alive: `evertick launcher`"
    trouble = f" ({fleet['trouble']})" if fleet["trouble"] else ""
    if fleet["starting"]:
        what = "a runner is" if fleet["starting"] == 1 else f"{fleet['starting']} runners are"
        return f"{what} being started by {who}: {fleet['reason'] or 'not joined yet'}{trouble}"
    if fleet["trouble"]:
        return f"{who} can start no runner: {fleet['trouble']}"
    return None


def _no_runner(it: Detail, when: When) -> str:
    if fleet := it["fleet"]:
        soon = f"fleet {fleet['name']} on {fleet['engine']} is about to start one"
        return f"no live runner serves queue {it['queue']}; {_fleet(it) or soon}"
    if it["others"] and not it["draining"]:
        names = ", ".join(it["others"][:5])
        return (
            f"no live runner of queue {it['queue']} takes this task: the runners that serve it match only {names}:"
            f" start one without --task-patterns, or with a pattern that matches the task"
        )
    last = "; none has ever connected"
    if gone := it["last"]:
        last = f"; the last one, {gone['runner']}, left {when(gone['until'])}"
    draining = f" ({it['draining']} draining)" if it["draining"] else ""
    return f"no live runner serves queue {it['queue']}{draining}{last}: `evertick runner --queues {it['queue']}`"


def _queued_ahead(it: Detail, when: When) -> str:
    place = (
        f"it waits in queue {it['queue']}: {it['ahead']} ahead, {it['busy']}/{it['slots']} slots of its runners busy"
    )
    fleet = _fleet(it)
    return f"{place}; {fleet}" if fleet else place


def _deferred(it: Detail, when: When) -> str:
    until = f", and times out {when(it['deadline'])}" if it["deadline"] else ""
    match it["kind"]:
        case "run":
            return f"it waits for run {it['run_id']} of {it['dag']}, which is {it['state']}{until}"
        case "start":
            return f"it is about to start a run of {it['dag']}"
        case "time":
            return f"it waits for a time: it continues {when(it['until'])}"
        case "event":
            return f"it waits for event {it['event']}: `evertick events send {it['event']}`{until}"
        case "approval":
            return f"it waits for an approval, {it['title']!r}: `evertick approvals list`{until}"
        case "trigger":
            where = f", run by {it['runner']}" if it["runner"] else f"; a runner of queue {it['queue']} must run it"
            return f"it waits for trigger {it['trigger']}, deferred {when(it['trigger_since'])}{where}{until}"
        case "poll":
            return f"it is polled next {when(it['until'])}, after {it['polls'] or 0} polls{until}"
    return "it is about to start waiting"


_SENTENCES = {
    "deferred": _deferred,
    "ended": _ended,
    "queued": _queued,
    "running": _running,
    "quarantined": _quarantined,
    "dag_paused": _paused,
    "run_queued": _run_queued,
    "run_delayed": _run_delayed,
    "upstream": _upstream,
    "time": _time,
    "retry_line": _retry_line,
    "gate": _gate,
    "no_runner": _no_runner,
    "in_line": _queued_ahead,
}


_KINDS = {
    "no_runner": "no live runner",
    "dag_paused": "DAG is paused",
    "run_queued": "max_active_runs",
    "retry_line": "max_active_retries",
    "time": "time",
    "quarantined": "quarantined",
}


def kind_of(each: Blocked) -> str:
    """The kind of blocker, in at most two words."""
    if each.kind == "gate":
        return {"order": "smaller version", "rate": "used up", "past": "previous run"}.get(each.detail["gate"], "full")
    return _KINDS[each.kind]


def describe_blocked(each: Blocked, when: When) -> str | None:
    """The current holder, or the condition that ends the wait."""
    it = each.detail
    if each.kind == "gate" and it["gate"] == "order":
        first = it["smaller"][0] if it["smaller"] else None
        return f"version {first['version']}: {first['dag']}.{first['task']} of run {first['run_id']}" if first else None
    if each.kind == "gate" and it["gate"] == "rate":
        until = f", the next {when(it['until'])}" if it["until"] else ""
        return f"{it['used']}/{it['capacity']} in {length(it['period'])}{until}"
    if each.kind == "gate" and it["gate"] == "past":
        return f"{it['task']} of run {it['run_id']} is {it['state']}"
    if each.kind == "gate":
        held = ", ".join(f"{x['dag']}.{x['task']} of run {x['run_id']}" for x in it["holders"]) or "no task"
        if each.name.startswith("mutex "):
            return f"held by {held}"
        return f"{it['used']}/{it['capacity']} used by {held}"
    if each.kind == "no_runner":
        return describe(Reason("no_runner", it), when)
    if each.kind == "run_queued":
        return f"{it['active']} of {it['limit']} runs active" if it["limit"] else None
    if each.kind == "time":
        return f"the next {when(it['next'])}"
    return f"{it['verb']}: {it['reason']}" if each.kind == "quarantined" else None
