"""Formats of values on pages: timestamps, descriptions of states and schedules, JSON as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from evertick.domain.cron_words import cron_in_words
from evertick.domain.schedule import ScheduleKind, ScheduleSpec, describe
from evertick.engine.plan import UNPLANNABLE, read_spec

# A short explanation of each state.
STATE_WORDS = {
    "waiting": "waits for upstream tasks",
    "pending": "waits for a free slot or for its start time",
    "available": "ready, waits for a runner",
    "queued": "about to start",
    "running": "is running",
    "deferred": "waits for an external event, without using a slot",
    "success": "succeeded",
    "failed": "failed",
    "skipped": "was skipped",
    "canceled": "was canceled",
    "upstream_failed": "did not start because an upstream task failed",
    "paused": "starts no new runs until it is unpaused",
}


# What a schedule does about missed fires, and when a run is still open.
MISFIRE_WORDS = {
    "skip": "skip missed fires",
    "latest": "run the latest missed fire",
    "all": "run all missed fires",
}
OVERLAP_WORDS = {
    "allow": "start another run",
    "skip": "skip the new run",
    "queue_one": "queue one run",
    "queue_all": "queue all runs",
    "cancel": "cancel the open run first",
}
_LONGEST_VALUE = 32


def instant(at: datetime) -> str:
    """The exact timestamp in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def json_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def detail_words(detail: Mapping[str, object]) -> str:
    """The details of an audit entry in one line, without empty and false values."""
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
    """Describe a stored schedule, also one that cannot be read."""
    try:
        return spec_words(read_spec(raw))
    except UNPLANNABLE:
        return "cannot be read"


def spec_words(spec: ScheduleSpec) -> str:
    """Describe a schedule: cron expressions in words, other kinds as the domain formats them."""
    return cron_in_words(spec.cron) if spec.kind is ScheduleKind.CRON else describe(spec)
