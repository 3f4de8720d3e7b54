"""Notifications of a task or run: `on_failure=[notify.email("ops@example.com"), my_function]`.

Evertick sends them, whatever happened to the process that failed. A function of yours runs as a separate task.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from evertick.domain.errors import UserError
from evertick.domain.notifications import (
    MOST_NOTICES,
    Destination,
    DestinationKind,
    NotificationEvent,
    NotificationRuleSpec,
    email_destination,
    plugin_destination,
    web_destination,
)
from evertick.sdk.source_location import refused

_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
_DEFAULT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """A user's function that is called with the event, as a separate task."""

    name: str
    function: Callable[..., object] = field(compare=False)
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationRule:
    """A recipient, for any event."""

    sink: Destination
    callback: Callback | None = None
    every_time: bool = False


Recipient: TypeAlias = NotificationRule | Callable[..., object]
# The value of `on_failure=` and the others.
Recipients: TypeAlias = Recipient | Iterable[Recipient] | None


def webhook(
    url: str | None = None, *, secret: str | None = None, sign_with: str | None = None, every_time: bool = False
) -> NotificationRule:
    """POST JSON to a URL, or to the URL stored in a secret; `sign_with` names the secret that signs it."""
    return _web(DestinationKind.WEBHOOK, url, secret, sign_with, every_time=every_time)


def slack(url: str | None = None, *, secret: str | None = None, every_time: bool = False) -> NotificationRule:
    """POST a message in the format of Slack and Mattermost: `notify.slack(secret="slack_url")`."""
    return _web(DestinationKind.SLACK, url, secret, None, every_time=every_time)


def email(*recipients: str, every_time: bool = False) -> NotificationRule:
    """Send an email by the installation's SMTP connection: `notify.email("ops@example.com")`."""
    try:
        return NotificationRule(
            sink=email_destination([str(each) for each in recipients]), every_time=_flag(every_time)
        )
    except UserError as error:
        raise refused(f"notify.email: {error}") from None


def plugin(name: str, target: str = "", *, secret: str | None = None, every_time: bool = False) -> NotificationRule:
    """Send by a notifier that another package provides: `notify.plugin("pagerduty", "team-a", secret="pagerduty_key")`."""
    try:
        return NotificationRule(
            sink=plugin_destination(str(name), str(target), secret=secret), every_time=_flag(every_time)
        )
    except UserError as error:
        raise refused(f"notify.plugin: {error}") from None


def call(function: Callable[..., object], *, every_time: bool = False, **options: object) -> NotificationRule:
    """Call a function with the event, in a separate task; options are a task's: `timeout`, `retries`, `secrets`."""
    function = getattr(function, "function", function)  # a task's own function is accepted, too
    name = str(options.pop("name", None) or getattr(function, "__name__", ""))
    if not callable(function) or not _NAME.fullmatch(name):
        raise refused(f"{function!r} cannot be a callback: pass a named function, or notify.call(..., name='tell_me').")
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        raise refused(f"callback {name!r} must take one argument, the event as a dict: {error}.") from None
    made = Callback(name=name, function=function, options={"timeout": _DEFAULT_SECONDS, **options})
    return NotificationRule(
        sink=Destination(kind=DestinationKind.CALL, target=name), callback=made, every_time=_flag(every_time)
    )


def read_rules(value: object) -> list[NotificationRule]:
    """One sink or function, or a list of them."""
    listed = [value] if isinstance(value, NotificationRule) or callable(value) else value
    if listed is None:
        return []
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise TypeError('it must be a list, as in [notify.email("ops@example.com"), my_function]')
    found = [each if isinstance(each, NotificationRule) else _called(each) for each in listed]
    if len(found) > MOST_NOTICES:
        raise ValueError(f"at most {MOST_NOTICES} recipients are allowed per event")
    return found


def rule_specs(event: NotificationEvent, value: object) -> tuple[NotificationRuleSpec, ...]:
    """The published form: each sink once."""
    by_sink = {each.sink.text: each for each in read_rules(value)}
    return tuple(
        NotificationRuleSpec(event=event, sink=sink, every_time=each.every_time)
        for sink, each in sorted(by_sink.items())
    )


def callbacks_in(options: Mapping[str, object]) -> list[Callback]:
    """The functions that a task's or DAG's options name."""
    values = [value for name, value in options.items() if name in NOTICE_OPTIONS]
    return [each.callback for value in values for each in read_rules(value) if each.callback is not None]


NOTICE_OPTIONS = {f"on_{event}": event for event in NotificationEvent}


def _web(
    kind: DestinationKind, url: object, secret: str | None, sign_with: str | None, *, every_time: bool
) -> NotificationRule:
    try:
        if url is not None and not isinstance(url, str):
            raise UserError(f"{url!r} is not a URL.")
        return NotificationRule(
            sink=web_destination(kind, url, secret=secret, sign_with=sign_with), every_time=_flag(every_time)
        )
    except (UserError, TypeError) as error:
        raise refused(f"notify.{kind}: {error}") from None


def _called(value: object) -> NotificationRule:
    if not callable(value):
        raise TypeError(f"{value!r} is neither a sink such as notify.email(...) nor a function")
    return call(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise UserError("every_time must be True or False.")
    return value
