"""What an agent shows at the door: a signed text that names one attempt, what it is good for, and until when.

Signed with HMAC-SHA256 by whoever has the key; the database has neither key nor token. The first key signs, every key reads, so
that keys can be changed one after the other. Decides nothing about the attempt itself: the database knows whose it is.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings, Refused

PREFIX = "eva_"
# Far more than any token has; nothing longer is looked at.
LONGEST_TOKEN = 1024
SHORTEST_KEY = 32
# Servers' clocks differ a little; nobody is refused for that.
CLOCK_LEEWAY_SECONDS = 60.0
_PURPOSE = b"evertick agent token 1\n"


class TokenUse(StrEnum):
    """START begins the attempt, or asks again what was answered; ATTEMPT is good for everything after that."""

    START = "start"
    ATTEMPT = "attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """Whose token it is: one attempt's."""

    use: TokenUse
    key: TaskKey
    epoch: int
    session: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class AgentKeys:
    """Raises InvalidSettings for what is no key."""

    keys: tuple[str, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.keys:
            raise InvalidSettings("there is no key for agents' tokens: put one into EVERTICK_AGENT_KEY.")
        if any(len(key) < SHORTEST_KEY for key in self.keys):
            raise InvalidSettings(
                f"a key for agents' tokens is shorter than {SHORTEST_KEY} characters: use a random one."
            )

    def sign(self, bearer: Bearer) -> str:
        key = bearer.key
        payload = [
            bearer.use.value,
            key.run_id,
            key.idx,
            key.map_index,
            bearer.epoch,
            bearer.session,
            bearer.expires_at,
        ]
        text = _encode(json.dumps(payload, separators=(",", ":")).encode())
        return f"{PREFIX}{text}.{_signature(self.keys[0], text)}"

    def read(self, token: str, *, use: TokenUse, now: float) -> Bearer:
        """Raises Refused, which says what is wrong with it."""
        text, _, signature = token.removeprefix(PREFIX).partition(".")
        is_ours = token.startswith(PREFIX) and len(token) <= LONGEST_TOKEN and token.isascii()
        if not is_ours or not _is_signed(self.keys, text, signature):
            raise Refused(
                "This is no token of an attempt of this installation: is EVERTICK_AGENT_KEY of the runner that dispatches the same"
                " as the API's?"
            )
        bearer = _bearer(text)
        if bearer.use is not use:
            raise Refused(f"This is a token to {_GOOD_FOR[bearer.use]}, and is good for nothing else.")
        if now > bearer.expires_at + CLOCK_LEEWAY_SECONDS:
            raise Refused("The attempt's token has expired: ask for a new one with the start token.")
        return bearer


def new_agent_key() -> str:
    return secrets.token_urlsafe(32)


_GOOD_FOR = {TokenUse.START: "start an attempt", TokenUse.ATTEMPT: "report on an attempt that has started"}


def _is_signed(keys: Iterable[str], text: str, signature: str) -> bool:
    """All keys are tried, so that it takes as long whichever fits."""
    return sum(hmac.compare_digest(_signature(key, text), signature) for key in keys) > 0


def _signature(key: str, text: str) -> str:
    return _encode(hmac.new(key.encode(), _PURPOSE + text.encode(), hashlib.sha256).digest())


def _bearer(text: str) -> Bearer:
    """Of a text that we signed ourselves."""
    use, run_id, idx, map_index, epoch, session, expires_at = json.loads(_decode(text))
    key = TaskKey(run_id, idx, map_index)
    return Bearer(use=TokenUse(use), key=key, epoch=epoch, session=session, expires_at=expires_at)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
