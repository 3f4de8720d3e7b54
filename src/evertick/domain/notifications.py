"""Notifications: which events are reported, the text of a message, its destination, and the delay before a retry.

Pure: nothing is sent, and no address is resolved here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, urlsplit

from evertick.domain.dags.params import JsonValue
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind, check_name

MOST_NOTICES = 20


_LONGEST_LINE = 200


_LONGEST_TEXT = 3000


# The delay after the first failure; it doubles with each further one.
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 600.0


Fact = Mapping[str, JsonValue]


class NotificationEvent(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    RETRY = "retry"
    SKIPPED = "skipped"
    DEADLINE = "deadline"


# The events of a run as a whole; a task has all events.
RUN_EVENTS = (NotificationEvent.SUCCESS, NotificationEvent.FAILURE, NotificationEvent.RETRY, NotificationEvent.DEADLINE)


_WORDS = {
    "success": "succeeded",
    "failure": "failed",
    "retry": "failed and will be retried",
    "skipped": "was skipped",
    "not_fired": "did not fire in time",
    "not_started": "did not start in time",
    "not_finished": "did not finish in time",
    "will_miss": "is expected to miss its deadline",
    "no_checkin": "did not check in in time",
    "checkin_failed": "reported a failure",
    "violation": "violates a guarantee",
    "test": "sends this message as a test",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationRuleSpec:
    """The recipients of one kind of event. A failure is sent once per failure streak, unless `every_time`."""

    event: NotificationEvent
    sink: str
    every_time: bool = False


def callback_dag(dag: str, name: str) -> str:
    """The DAG whose runs execute the DAG's callback of that name."""
    return f"{dag}.callback.{name}"


def headline(fact: Fact) -> str:
    """One line, whatever characters the names and reasons contain."""
    subject = f"{fact.get('dag', 'Evertick')}"
    if fact.get("checkin"):
        subject = f"Check-in {fact['checkin']}"
    if fact.get("schedule") and fact.get("event") == NotificationEvent.DEADLINE:
        subject += f", schedule {fact['schedule']}"
    if fact.get("task"):
        subject += f": {fact['task']}"
    what = _WORDS.get(str(fact.get("alert") or fact.get("event")), str(fact.get("event")))
    run = f" (run {fact['run']})" if fact.get("run") is not None else ""
    return _one_line(f"{subject} {what}{run}")


def path_of(fact: Fact) -> str:
    """The page of the web UI that shows the task, the run or the DAG of the event."""
    if fact.get("run") is None:
        return f"/dags/{quote(str(fact['dag']), safe='')}" if fact.get("dag") else "/"
    task, bracket, index = str(fact.get("task") or "").partition("[")
    page = f"/tasks/{quote(task, safe='')}" if task else ""
    return f"/runs/{fact['run']}{page}" + (f"?map_index={index.rstrip(']')}" if bracket else "")


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
    text = headline(fact) + reason + (f"\n{fact['url']}" if fact.get("url") else "")
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return json.dumps({"text": escaped}).encode()


def rest_seconds(attempts: int, asked_seconds: float | None = None) -> float:
    """The delay after that many failed attempts; longer if the receiver asked for a longer one."""
    own = min(FIRST_REST_SECONDS * 2.0 ** min(attempts - 1, 20), LONGEST_REST_SECONDS)
    return max(own, min(asked_seconds or 0.0, 3600.0))


def _one_line(text: str) -> str:
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


LONGEST_SINK = 1000


MOST_RECIPIENTS = 20


_SECRET = "secret/"


_SIGN = ";sign="


_WITH_SECRET = ";secret="


_FORMS = (
    "webhook:https://example.com/hook, slack:secret/NAME, email:ops@example.com or plugin:NAME:TARGET, with ;sign=SECRET after"
    " a webhook and ;secret=SECRET after a plugin"
)


_MAILBOX = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")


class DestinationKind(StrEnum):
    WEBHOOK = "webhook"
    SLACK = "slack"
    EMAIL = "email"
    PLUGIN = "plugin"
    CALL = "call"
    PAUSE = "pause"
    FAIL_FAST = "fail_fast"
    OPENLINEAGE = "openlineage"


# Not written by users: what DAG files declare otherwise, and the collector of the settings.
_INTERNAL = (DestinationKind.CALL, DestinationKind.PAUSE, DestinationKind.FAIL_FAST, DestinationKind.OPENLINEAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """`target` is a URL, email addresses, the name of a DAG to start, or the number of failures after which the DAG is paused;
    `secret` names the secret that holds the URL instead. For a plugin `target` is `NAME:TARGET`, and the secret is an additional
    one."""

    kind: DestinationKind
    target: str = ""
    secret: str | None = None
    sign_with: str | None = None

    @property
    def text(self) -> str:
        if self.kind is DestinationKind.PLUGIN:
            return f"{self.kind}:{self.target}" + (f"{_WITH_SECRET}{self.secret}" if self.secret else "")
        place = f"{_SECRET}{self.secret}" if self.secret else self.target
        return f"{self.kind}:{place}" + (f"{_SIGN}{self.sign_with}" if self.sign_with else "")


def parse_destination(text: str) -> Destination:
    """Parse a sink from settings or a command line. The UserError says what is wrong."""
    kind, colon, rest = text.strip().partition(":")
    try:
        if not colon or len(text) > LONGEST_SINK or (chosen := DestinationKind(kind)) in _INTERNAL:
            raise ValueError
    except ValueError:
        raise UserError(f"{text!r:.200} is not a destination: write {_FORMS}.") from None
    if chosen is DestinationKind.PLUGIN:
        place, has_secret, key = rest.partition(_WITH_SECRET)
        name, _, target = place.partition(":")
        return plugin_destination(name, target, secret=key if has_secret else None)
    place, _, key = rest.partition(_SIGN)
    if chosen is DestinationKind.EMAIL:
        return email_destination(rest.split())
    secret = place.removeprefix(_SECRET) if place.startswith(_SECRET) else None
    return web_destination(chosen, None if secret is not None else place, secret=secret, sign_with=key or None)


def web_destination(
    kind: DestinationKind, url: str | None, *, secret: str | None, sign_with: str | None = None
) -> Destination:
    if (url is None) == (secret is None):
        raise UserError(f"a {kind} sink needs one address: its URL, or the name of the secret that holds it.")
    if sign_with is not None:
        if kind is not DestinationKind.WEBHOOK:
            raise UserError(f"a {kind} message cannot be signed: the receiver does not verify it. Remove sign_with.")
        check_name(ValueKind.SECRET, sign_with)
    if secret is not None:
        return Destination(kind=kind, secret=check_name(ValueKind.SECRET, secret), sign_with=sign_with)
    return Destination(kind=kind, target=check_url(url or ""), sign_with=sign_with)


def plugin_destination(name: str, target: str, *, secret: str | None) -> Destination:
    """Whether the notifier is installed is known where it sends: at the scheduler."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        raise UserError(f"{name!r:.100} is not the name of a notifier: write plugin:NAME:TARGET.")
    if not target.isprintable() or ";" in target or len(target) > LONGEST_SINK // 2:
        raise UserError(f"{target!r:.100} is not a target of a notifier: use printable characters without ';'.")
    if secret is not None:
        check_name(ValueKind.SECRET, secret)
    return Destination(kind=DestinationKind.PLUGIN, target=f"{name}:{target}", secret=secret)


def email_destination(recipients: list[str]) -> Destination:
    if not 1 <= len(recipients) <= MOST_RECIPIENTS:
        raise UserError(f"an email needs 1 to {MOST_RECIPIENTS} recipients.")
    for each in recipients:
        if not _MAILBOX.fullmatch(each):
            raise UserError(f"{each!r:.100} is not an email address: write one such as ops@example.com.")
    return Destination(kind=DestinationKind.EMAIL, target=" ".join(recipients))


def check_url(url: str) -> str:
    """Validate a URL to post to. Whether its address is allowed is checked when its name is resolved."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good or len(url) > LONGEST_SINK or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"{url!r:.100} is not a webhook URL: write one such as https://example.com/hook, in ASCII.")
    if "@" in parts.netloc or ";" in url:
        raise UserError(
            "a webhook URL must not contain a password: store the whole URL in a secret and name that secret."
        )
    return url


def read_destination(text: str) -> Destination:
    """Parse the text that `Sink.text` wrote, those that only DAG files declare included."""
    for kind in _INTERNAL:
        if text.startswith(f"{kind}:"):
            return Destination(kind=kind, target=text.removeprefix(f"{kind}:"))
    return parse_destination(text)
