"""Notifications: which events are reported, the text of the messages, and the retries of a failed delivery."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evertick.domain.params import JsonValue

MOST_NOTICES = 20
_LONGEST_LINE = 200
_LONGEST_TEXT = 3000
# The delay after the first failure; it doubles with each further one.
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 600.0

Fact = Mapping[str, JsonValue]


class Event(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    RETRY = "retry"
    SKIPPED = "skipped"
    DEADLINE = "deadline"


# The events of a run as a whole; a task has all events.
RUN_EVENTS = (Event.SUCCESS, Event.FAILURE, Event.RETRY, Event.DEADLINE)

_WORDS = {
    "success": "succeeded",
    "failure": "failed",
    "retry": "failed and will be retried",
    "skipped": "was skipped",
    "not_fired": "did not fire in time",
    "not_started": "did not start in time",
    "not_finished": "did not finish in time",
    "test": "sends this message as a test",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSpec:
    """The recipients of one kind of event. A failure is sent once per failure streak, unless `every_time`."""

    event: Event
    sink: str
    every_time: bool = False


def callback_dag(dag: str, name: str) -> str:
    """The DAG whose runs execute the DAG's callback of that name."""
    return f"{dag}.callback.{name}"


def headline(fact: Fact) -> str:
    """One line, whatever characters the names and reasons contain."""
    subject = f"{fact.get('dag', 'Evertick')}"
    if fact.get("schedule") and fact.get("event") == Event.DEADLINE:
        subject += f", schedule {fact['schedule']}"
    if fact.get("task"):
        subject += f": {fact['task']}"
    what = _WORDS.get(str(fact.get("alert") or fact.get("event")), str(fact.get("event")))
    run = f" (run {fact['run']})" if fact.get("run") is not None else ""
    return _one_line(f"{subject} {what}{run}")


def plain_text(fact: Fact) -> str:
    """The message for people: the headline, then one known fact per line."""
    shown = [headline(fact), ""]
    for name, value in fact.items():
        if name not in ("reason", "delivery") and value is not None:
            shown.append(f"{name}: {_one_line(str(value))}")
    if fact.get("reason"):
        shown += ["", str(fact["reason"])[:_LONGEST_TEXT]]
    return "\n".join(shown) + "\n"


def webhook_body(fact: Fact) -> bytes:
    return json.dumps({"text": headline(fact), **fact}).encode()


def slack_body(fact: Fact) -> bytes:
    """The format of Slack, Mattermost and compatible servers. Their markup is escaped, so that a reason mentions no users."""
    reason = f"\n```{str(fact['reason'])[:_LONGEST_TEXT]}```" if fact.get("reason") else ""
    text = headline(fact) + reason
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return json.dumps({"text": escaped}).encode()


def rest_seconds(attempts: int, asked_seconds: float | None = None) -> float:
    """The delay after that many failed attempts; longer if the receiver asked for a longer one."""
    own = min(FIRST_REST_SECONDS * 2.0 ** min(attempts - 1, 20), LONGEST_REST_SECONDS)
    return max(own, min(asked_seconds or 0.0, 3600.0))


def _one_line(text: str) -> str:
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
