"""Webhooks that send events: who signed a request, whether it is fresh, which delivery it is, and the event that it becomes.

Pure: the time is an argument. Signatures are compared in constant time, over the bytes that arrived.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from urllib.parse import parse_qsl

from evertick.domain.errors import Unauthenticated, UserError

SHORTEST_SECRET = 16
MOST_WEBHOOK_BYTES = 256 * 1024
USUAL_TOLERANCE_SECONDS, LONGEST_TOLERANCE_SECONDS = 300.0, 3600.0
_LONGEST_KEY, _LONGEST_NAME = 200, 200
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")


class WebhookKind(StrEnum):
    """The sender, whose way of signing is checked; `hmac` is any other, by its headers."""

    GITHUB = "github"
    GITLAB = "gitlab"
    STRIPE = "stripe"
    SLACK = "slack"
    HMAC = "hmac"


class Digest(StrEnum):
    SHA256 = "sha256"
    SHA512 = "sha512"


@dataclass(frozen=True, slots=True, kw_only=True)
class HmacHeaders:
    """How a sender of the kind `hmac` signs: the header with the signature in hex or base64, maybe after a prefix. With a header
    for the time, the signature is of the time, a dot and the body. One for the id of the delivery, or the time, is needed: the
    same delivery is one event."""

    signature: str = "X-Signature"
    digest: Digest = Digest.SHA256
    prefix: str = ""
    timestamp: str | None = None
    delivery: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """`event`: the name of the events, in which `{type}` is what the sender calls the type of its message."""

    name: str
    kind: WebhookKind
    secret: str
    event: str
    tolerance_seconds: float = USUAL_TOLERANCE_SECONDS
    headers: HmacHeaders | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A request whose signature is right. `challenge`: the sender only wants this text back, and nothing is an event."""

    event: str
    key: str
    payload: object
    challenge: str | None = None


class _Refused(Exception):
    """The signature is missing or wrong, or the request is too old."""


def check_webhook(hook: Webhook) -> None:
    """Raises UserError for what can never work."""
    if not hook.event or len(hook.event) > _LONGEST_NAME or re.search(r"[{}]", hook.event.replace("{type}", "")):
        raise UserError(f"event {hook.event[:100]!r} is not a name; its only placeholder is {{type}}.")
    if not 1 <= hook.tolerance_seconds <= LONGEST_TOLERANCE_SECONDS:
        raise UserError(f"tolerance_seconds is {hook.tolerance_seconds:g}: it must be from 1 to 3600.")
    if (hook.kind is WebhookKind.HMAC) != (hook.headers is not None):
        raise UserError("A webhook of the kind hmac needs `headers`, and only such a webhook has them.")
    if hook.kind is WebhookKind.HMAC and "{type}" in hook.event:
        raise UserError("A webhook of the kind hmac has no type: leave {type} out of the event's name.")
    if (given := hook.headers) is not None:
        for name in (given.signature, given.timestamp, given.delivery):
            if name is not None and not _HEADER.fullmatch(name):
                raise UserError(f"{name[:100]!r} is not the name of a header.")
        if given.timestamp is None and given.delivery is None:
            raise UserError("Name the header of the time or of the delivery's id: otherwise a replay is a new event.")


def read_delivery(hook: Webhook, secret: bytes, headers: Mapping[str, str], body: bytes, now: datetime) -> Delivery:
    """Raises Unauthenticated unless the sender signed exactly this, a moment ago. `headers`: their names in lower case."""
    read = {
        WebhookKind.GITHUB: _github,
        WebhookKind.GITLAB: _gitlab,
        WebhookKind.STRIPE: _stripe,
        WebhookKind.SLACK: _slack,
        WebhookKind.HMAC: _hmac,
    }[hook.kind]
    try:
        kind, key = read(hook, secret, headers, body, now)
    except _Refused:
        raise Unauthenticated(
            "The webhook is refused: its signature is missing or wrong, or its time is too far from now, or there is no"
            " such webhook."
        ) from None
    payload = _payload(headers, body)
    challenge = None
    if hook.kind is WebhookKind.SLACK and isinstance(payload, Mapping) and payload.get("type") == "url_verification":
        challenge = str(payload.get("challenge", ""))
    own = hook.kind in (WebhookKind.STRIPE, WebhookKind.SLACK) and isinstance(payload, Mapping)
    if own and isinstance(payload, Mapping):
        kind, key = _of_payload(hook.kind, payload, key)
    event = hook.event.replace("{type}", kind or "unknown")
    return Delivery(event=event[:_LONGEST_NAME], key=_short(key), payload=payload, challenge=challenge)


def _github(hook: Webhook, secret: bytes, headers: Mapping[str, str], body: bytes, now: datetime) -> tuple[str, str]:
    _compare(headers.get("x-hub-signature-256"), "sha256=" + _sign(secret, body))
    return headers.get("x-github-event", ""), _needed(headers, "x-github-delivery")


def _gitlab(hook: Webhook, secret: bytes, headers: Mapping[str, str], body: bytes, now: datetime) -> tuple[str, str]:
    _compare(headers.get("x-gitlab-token"), secret.decode())
    kind = headers.get("x-gitlab-event", "").lower().removesuffix(" hook").replace(" ", "_")
    # The key stays the same when GitLab tries again.
    return kind, headers.get("idempotency-key") or _needed(headers, "x-gitlab-event-uuid")


def _stripe(hook: Webhook, secret: bytes, headers: Mapping[str, str], body: bytes, now: datetime) -> tuple[str, str]:
    parts = [part.strip().partition("=")[::2] for part in headers.get("stripe-signature", "").split(",")]
    stamp = next((value for name, value in parts if name == "t"), "")
    _check_time(stamp, hook, now)
    expected = _sign(secret, stamp.encode() + b"." + body)
    # While a secret is rotated there are several.
    if not any(name == "v1" and _is_same(value, expected) for name, value in parts):
        raise _Refused
    return "", expected


def _slack(hook: Webhook, secret: bytes, headers: Mapping[str, str], body: bytes, now: datetime) -> tuple[str, str]:
    stamp = headers.get("x-slack-request-timestamp", "")
    _check_time(stamp, hook, now)
    expected = "v0=" + _sign(secret, b"v0:" + stamp.encode() + b":" + body)
    _compare(headers.get("x-slack-signature"), expected)
    return "", expected


def _hmac(hook: Webhook, secret: bytes, headers: Mapping[str, str], body: bytes, now: datetime) -> tuple[str, str]:
    how = hook.headers or HmacHeaders()
    signed = body
    if how.timestamp is not None:
        stamp = headers.get(how.timestamp.lower(), "")
        _check_time(stamp, hook, now)
        signed = stamp.encode() + b"." + body
    digest = hmac.new(secret, signed, how.digest.value).digest()
    given = headers.get(how.signature.lower(), "")
    if not given.startswith(how.prefix):
        raise _Refused
    given = given.removeprefix(how.prefix)
    if not (_is_same(given.lower(), digest.hex()) or _is_same(given, base64.b64encode(digest).decode())):
        raise _Refused
    return "", _needed(headers, how.delivery.lower()) if how.delivery is not None else digest.hex()


def _of_payload(kind: WebhookKind, payload: Mapping[str, object], key: str) -> tuple[str, str]:
    """What the sender calls the type and the id of the message, which are signed with it."""
    if kind is WebhookKind.STRIPE:
        return str(payload.get("type", "")), str(payload.get("id") or key)
    inner = payload.get("event")
    named = inner.get("type", "") if isinstance(inner, Mapping) else payload.get("command") or payload.get("type", "")
    return str(named), str(payload.get("event_id") or key)


def _payload(headers: Mapping[str, str], body: bytes) -> object:
    """A form becomes its fields; one with a field `payload` is that document."""
    text = body.decode("utf-8", "replace").replace("\x00", "")
    if headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        fields = dict(parse_qsl(text, max_num_fields=1000))
        if set(fields) != {"payload"}:
            return fields
        text = fields["payload"]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _sign(secret: bytes, signed: bytes) -> str:
    return hmac.new(secret, signed, hashlib.sha256).hexdigest()


def _is_same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _compare(given: str | None, expected: str) -> None:
    if given is None or not _is_same(given, expected):
        raise _Refused


def _check_time(stamp: str, hook: Webhook, now: datetime) -> None:
    """Seconds since 1970, not too far from now in either direction: clocks differ, and what was recorded is not replayed."""
    if not re.fullmatch(r"[0-9]{1,12}", stamp) or abs(now.timestamp() - int(stamp)) > hook.tolerance_seconds:
        raise _Refused


def _needed(headers: Mapping[str, str], name: str) -> str:
    if not (value := headers.get(name, "").strip()):
        raise _Refused
    return value


def _short(key: str) -> str:
    return key if len(key) <= _LONGEST_KEY else hashlib.sha256(key.encode()).hexdigest()
