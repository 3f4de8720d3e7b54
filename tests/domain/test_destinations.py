"""Where notifications go, in which words, and how long is waited after a failure."""

from __future__ import annotations

import json

import pytest

from evertick.domain.errors import UserError
from evertick.domain.notifications import (
    headline,
    parse_destination,
    plain_text,
    read_destination,
    rest_seconds,
    slack_body,
    webhook_body,
)


@pytest.mark.parametrize(
    "text",
    [
        "webhook:https://example.com/hook?x=1",
        "webhook:http://example.com:8080/",
        "webhook:secret/ops_url;sign=key",
        "webhook:https://example.com/hook;sign=key",
        "slack:secret/slack_url",
        "email:ops@example.com dev@example.com",
        "plugin:pagerduty:",
        "plugin:pagerduty:team: a/b",
        "plugin:pagerduty:team;secret=pager_key",
    ],
)
def test_a_sink_is_a_text_and_back(text: str) -> None:
    assert parse_destination(text).text == text
    assert read_destination(text).text == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a destination"),
        ("pager:me", "is not a destination"),
        ("call:nightly.callback.x", "is not a destination"),
        ("webhook:", "is not a webhook URL"),
        ("webhook:ftp://example.com", "is not a webhook URL"),
        ("webhook:https://example.com/\r\nX: y", "is not a webhook URL"),
        ("webhook:https://example.com:99999/", "is not a webhook URL"),
        ("webhook:https://me:pw@example.com/", "must not contain a password"),
        ("webhook:secret/", "is not a valid name for a secret"),
        ("webhook:https://example.com;sign=a b", "is not a valid name for a secret"),
        ("slack:https://example.com;sign=key", "cannot be signed"),
        ("plugin:", "'' is not the name of a notifier"),
        ("plugin:pager duty:x", "is not the name of a notifier"),
        ("plugin:pagerduty:a;b", "is not a target of a notifier"),
        ("plugin:pagerduty:a\nb", "is not a target of a notifier"),
        ("plugin:pagerduty:a;secret=", "is not a valid name for a secret"),
        ("email:", "1 to 20 recipients"),
        ("email:ops", "is not an email address"),
        ("email:ops@example.com\nBcc:x@y.z", "is not an email address"),
        ("webhook:https://example.com/" + "x" * 1000, "is not a destination"),
    ],
)
def test_what_is_no_sink_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_destination(text)


def test_a_headline_is_one_line_whatever_is_in_it() -> None:
    fact = {"event": "failure", "dag": "nightly", "run": 7, "task": "load\r\nBcc: x", "reason": "boom\nat line 3"}
    assert headline(fact) == "nightly: load Bcc: x failed (run 7)"
    assert plain_text(fact).endswith("boom\nat line 3\n")
    assert len(headline({**fact, "task": "x" * 5000})) == 200
    late = {"event": "deadline", "alert": "not_started", "dag": "nightly", "schedule": "main"}
    assert headline(late) == "nightly, schedule main did not start in time"


def test_bodies_are_json_and_a_reason_mentions_nobody() -> None:
    fact = {"event": "failure", "dag": "nightly", "run": 7, "reason": "<!channel> & <@U1>"}
    assert json.loads(webhook_body(fact)) == {"text": "nightly failed (run 7)", **fact}
    assert json.loads(slack_body(fact)) == {"text": "nightly failed (run 7)\n```&lt;!channel&gt; &amp; &lt;@U1&gt;```"}


def test_each_failure_doubles_the_rest_up_to_ten_minutes() -> None:
    assert [rest_seconds(n) for n in (1, 2, 3, 20, 10_000)] == [5, 10, 20, 600, 600]
    assert rest_seconds(1, 30.0) == 30
    assert rest_seconds(1, 1e9) == 3600
