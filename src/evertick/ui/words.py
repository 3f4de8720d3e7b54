"""How values are written on pages: instants for machines and people, states in words, JSON as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from evertick.domain.cron_words import cron_in_words
from evertick.domain.schedule import ScheduleKind, ScheduleSpec, describe
from evertick.engine.plan import UNPLANNABLE, read_spec

# What a state means, for a person who sees it the first time.
STATE_WORDS = {
    "waiting": "waits for tasks before it",
    "pending": "may start as soon as a gate opens or a time comes",
    "available": "ready: waits for a runner",
    "queued": "about to begin",
    "running": "runs now",
    "deferred": "waits for something outside, without a slot",
    "success": "ended well",
    "failed": "failed",
    "skipped": "was left out",
    "canceled": "was stopped by somebody",
    "upstream_failed": "did not start: something before it failed",
    "paused": "does nothing until somebody unpauses it",
}


# What a schedule does when it fell behind, and when a run is still open.
MISFIRE_WORDS = {
    "skip": "skip what was missed",
    "latest": "run the last one that was missed",
    "all": "run all that were missed",
}
OVERLAP_WORDS = {
    "allow": "start beside it",
    "skip": "skip the new one",
    "queue_one": "let one wait",
    "queue_all": "let all wait",
    "cancel": "cancel the open one first",
}
_LONGEST_VALUE = 32


def instant(at: datetime) -> str:
    """The exact instant, without doubt about the zone."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def json_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def detail_words(detail: Mapping[str, object]) -> str:
    """What is on record of a deed, in a line: without what is empty or not so."""
    told = []
    for key, value in detail.items():
        name = key.replace("_", " ")
        if value is True:
            told.append(name)
        elif value not in (None, False, "", [], {}):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            longest = 12 if key == "hash" else _LONGEST_VALUE
            told.append(f"{name} {text[:longest]}{'…' if len(text) > longest else ''}")
    return "; ".join(told)


def schedule_words(raw: dict[str, object]) -> str:
    """A stored schedule for people; also one that cannot be read."""
    try:
        return spec_words(read_spec(raw))
    except UNPLANNABLE:
        return "cannot be read"


def spec_words(spec: ScheduleSpec) -> str:
    """Cron in plain words, the others as the domain says them."""
    return cron_in_words(spec.cron) if spec.kind is ScheduleKind.CRON else describe(spec)
