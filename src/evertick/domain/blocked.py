"""Describes in words what blocks work, across all runs. The database finds the blockers; this module only formats them."""

from __future__ import annotations

from evertick.domain.time_words import length
from evertick.domain.why import Blocked, Reason, When, tell

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


def tell_blocked(each: Blocked, when: When) -> str | None:
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
        return tell(Reason("no_runner", it), when)
    if each.kind == "run_queued":
        return f"{it['active']} of {it['limit']} runs active" if it["limit"] else None
    if each.kind == "time":
        return f"the next {when(it['next'])}"
    return f"{it['verb']}: {it['reason']}" if each.kind == "quarantined" else None
