"""Signatures of webhooks: each sender's own, checked over the bytes, with a time and an id, and what the event becomes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from evertick.domain.errors import Unauthenticated, UserError
from evertick.domain.inbound.webhooks import (
    Delivery,
    Digest,
    HmacHeaders,
    Webhook,
    WebhookKind,
    check_webhook,
    read_delivery,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
STAMP = str(int(NOW.timestamp()))
SECRET = b"a secret of enough characters"
BODY = json.dumps({"id": "evt_1", "type": "invoice.paid", "event": {"type": "message"}, "event_id": "Ev1"}).encode()


def sign(signed: bytes, digest: str = "sha256") -> str:
    return hmac.new(SECRET, signed, digest).hexdigest()


def headers_of(kind: WebhookKind, body: bytes = BODY, stamp: str = STAMP) -> dict[str, str]:
    """What that sender sends."""
    timed = sign(f"{stamp}.".encode() + body)
    return {
        WebhookKind.GITHUB: {
            "x-hub-signature-256": f"sha256={sign(body)}", "x-github-event": "push", "x-github-delivery": "d1",
        },
        WebhookKind.GITLAB: {
            "x-gitlab-token": SECRET.decode(), "x-gitlab-event": "Merge Request Hook", "x-gitlab-event-uuid": "u1",
        },
        WebhookKind.STRIPE: {"stripe-signature": f"t={stamp},v1={'0' * 64},v1={timed}"},
        WebhookKind.SLACK: {
            "x-slack-request-timestamp": stamp, "x-slack-signature": "v0=" + sign(b"v0:" + stamp.encode() + b":" + body),
        },
        WebhookKind.HMAC: {"x-sig": f"v1={timed}", "x-time": stamp},
    }[kind]  # fmt: skip


def hook_of(kind: WebhookKind) -> Webhook:
    headers = HmacHeaders(signature="X-Sig", prefix="v1=", timestamp="X-Time") if kind is WebhookKind.HMAC else None
    event = "in" if kind is WebhookKind.HMAC else "in.{type}"
    return Webhook(name="x", kind=kind, secret="s", event=event, headers=headers)


def read(kind: WebhookKind, headers: dict[str, str], body: bytes = BODY, secret: bytes = SECRET) -> Delivery:
    return read_delivery(hook_of(kind), secret, headers, body, NOW)


@pytest.mark.parametrize(
    ("kind", "event", "key"),
    [
        (WebhookKind.GITHUB, "in.push", "d1"),
        (WebhookKind.GITLAB, "in.merge_request", "u1"),
        (WebhookKind.STRIPE, "in.invoice.paid", "evt_1"),
        (WebhookKind.SLACK, "in.message", "Ev1"),
        (WebhookKind.HMAC, "in", sign(f"{STAMP}.".encode() + BODY)),
    ],
)
def test_what_a_sender_signed_is_an_event(kind: WebhookKind, event: str, key: str) -> None:
    check_webhook(hook_of(kind))
    found = read(kind, headers_of(kind))
    assert (found.event, found.key, found.payload) == (event, key, json.loads(BODY))


@pytest.mark.parametrize("kind", WebhookKind)
def test_anything_else_is_refused(kind: WebhookKind) -> None:
    good = headers_of(kind)
    for name in good.keys() - {"x-github-event", "x-gitlab-event"}:
        for bad in ({**good, name: "x"}, {key: value for key, value in good.items() if key != name}):
            if name in ("x-github-delivery", "x-gitlab-event-uuid") and name in bad:
                continue  # they are not signed
            with pytest.raises(Unauthenticated):
                read(kind, bad)
    with pytest.raises(Unauthenticated):
        read(kind, good, secret=b"another secret")
    if kind is not WebhookKind.GITLAB:
        with pytest.raises(Unauthenticated):
            read(kind, good, BODY + b" ")
    if kind in (WebhookKind.STRIPE, WebhookKind.SLACK, WebhookKind.HMAC):
        for seconds in (-301, 301):
            stamp = str(int((NOW + timedelta(seconds=seconds)).timestamp()))
            with pytest.raises(Unauthenticated):
                read(kind, headers_of(kind, stamp=stamp))
            read(kind, headers_of(kind, stamp=str(int((NOW + timedelta(seconds=seconds * 0.99)).timestamp()))))


def test_other_ways_to_sign() -> None:
    how = HmacHeaders(signature="X-Sig", digest=Digest.SHA512, delivery="X-Id")
    hook = Webhook(name="x", kind=WebhookKind.HMAC, secret="s", event="in", headers=how)
    raw = hmac.new(SECRET, BODY, hashlib.sha512).digest()
    for text in (raw.hex().upper(), base64.b64encode(raw).decode()):
        assert read_delivery(hook, SECRET, {"x-sig": text, "x-id": "7"}, BODY, NOW).key == "7"
    with pytest.raises(Unauthenticated):
        read_delivery(hook, SECRET, {"x-sig": raw.hex()}, BODY, NOW)
    assert len(read_delivery(hook, SECRET, {"x-sig": raw.hex(), "x-id": "7" * 300}, BODY, NOW).key) == 64


def test_a_form_is_its_fields_and_a_challenge_is_no_event() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    for body, payload in (
        (b"payload=%7B%22a%22%3A+1%7D", {"a": 1}),
        (b"command=%2Fx&text=y", {"command": "/x", "text": "y"}),
    ):
        assert read(WebhookKind.GITHUB, {**headers_of(WebhookKind.GITHUB, body), **form}, body).payload == payload
    assert read(WebhookKind.GITHUB, headers_of(WebhookKind.GITHUB, b"plain"), b"plain").payload == "plain"
    body = b'{"type": "url_verification", "challenge": "abc"}'
    assert read(WebhookKind.SLACK, headers_of(WebhookKind.SLACK, body), body).challenge == "abc"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"event": "a.{b}"}, "only placeholder"),
        ({"tolerance_seconds": 0}, "from 1 to 3600"),
        ({"headers": None}, "needs `headers`"),
        ({"kind": WebhookKind.GITHUB}, "only such a webhook has them"),
        ({"event": "{type}"}, "has no type"),
        ({"headers": HmacHeaders(signature="a b", delivery="c")}, "not the name of a header"),
        ({"headers": HmacHeaders()}, "a replay is a new event"),
    ],
)
def test_what_can_never_work_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_webhook(replace(hook_of(WebhookKind.HMAC), **change))
