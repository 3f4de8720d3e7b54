"""The destination of a notification, as text without secrets: `webhook:https://…`, `slack:secret/NAME`, `email:ops@example.com`.

A secret (a URL that allows anyone to post, a signing key, a password) is referenced by name and read when the message is sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind, check_name

LONGEST_SINK = 1000
MOST_RECIPIENTS = 20
_SECRET = "secret/"
_SIGN = ";sign="
_FORMS = (
    "webhook:https://example.com/hook, slack:secret/NAME or email:ops@example.com, with ;sign=SECRET after a webhook"
)
_MAILBOX = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")


class SinkKind(StrEnum):
    WEBHOOK = "webhook"
    SLACK = "slack"
    EMAIL = "email"
    CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """`target` is a URL, email addresses, or the name of a DAG; `secret` names the secret that holds the URL instead."""

    kind: SinkKind
    target: str = ""
    secret: str | None = None
    sign_with: str | None = None

    @property
    def text(self) -> str:
        place = f"{_SECRET}{self.secret}" if self.secret else self.target
        return f"{self.kind}:{place}" + (f"{_SIGN}{self.sign_with}" if self.sign_with else "")


def parse_sink(text: str) -> Sink:
    """Parse a sink from settings or a command line. The UserError says what is wrong."""
    kind, colon, rest = text.strip().partition(":")
    try:
        if not colon or len(text) > LONGEST_SINK or (chosen := SinkKind(kind)) is SinkKind.CALL:
            raise ValueError
    except ValueError:
        raise UserError(f"{text!r:.200} is not a sink: write {_FORMS}.") from None
    place, _, key = rest.partition(_SIGN)
    if chosen is SinkKind.EMAIL:
        return email_sink(rest.split())
    secret = place.removeprefix(_SECRET) if place.startswith(_SECRET) else None
    return web_sink(chosen, None if secret is not None else place, secret=secret, sign_with=key or None)


def web_sink(kind: SinkKind, url: str | None, *, secret: str | None, sign_with: str | None = None) -> Sink:
    if (url is None) == (secret is None):
        raise UserError(f"a {kind} sink needs one address: its URL, or the name of the secret that holds it.")
    if sign_with is not None:
        if kind is not SinkKind.WEBHOOK:
            raise UserError(f"a {kind} message cannot be signed: the receiver does not verify it. Remove sign_with.")
        check_name(ValueKind.SECRET, sign_with)
    if secret is not None:
        return Sink(kind=kind, secret=check_name(ValueKind.SECRET, secret), sign_with=sign_with)
    return Sink(kind=kind, target=check_url(url or ""), sign_with=sign_with)


def email_sink(recipients: list[str]) -> Sink:
    if not 1 <= len(recipients) <= MOST_RECIPIENTS:
        raise UserError(f"an email needs 1 to {MOST_RECIPIENTS} recipients.")
    for each in recipients:
        if not _MAILBOX.fullmatch(each):
            raise UserError(f"{each!r:.100} is not an email address: write one such as ops@example.com.")
    return Sink(kind=SinkKind.EMAIL, target=" ".join(recipients))


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


def read_sink(text: str) -> Sink:
    """Parse the text that `Sink.text` wrote, callbacks included."""
    if text.startswith(f"{SinkKind.CALL}:"):
        return Sink(kind=SinkKind.CALL, target=text.removeprefix(f"{SinkKind.CALL}:"))
    return parse_sink(text)
