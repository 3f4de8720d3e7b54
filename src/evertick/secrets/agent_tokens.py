"""Agents' tokens: JSON Web Tokens (HS256), and the keys that sign them, from a setting or from a file.

The keys are never in the database, a log or an agent's folder. Dispatching runners and API processes need the same ones: the
first signs, each verifies, so that you can rotate them. The database decides about the attempt itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import jwt

from evertick.config import Settings
from evertick.domain.agent_protocol import AgentIdentity, TokenUse
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings, Unauthenticated
from evertick.secrets.key_files import read_keys, write_keys

PREFIX = "eva_"
# Many times the length of a token; anything longer is refused unread.
LONGEST_TOKEN = 1024
SHORTEST_KEY = 32
# Allows for clocks of servers that differ a little.
CLOCK_LEEWAY_SECONDS = 60
# Tokens of another program that shares the key are not accepted.
_ISSUER = "evertick"
_ALGORITHM = "HS256"
# The last character of a signature has two bits that its decoder ignores; they must be zero, so that a token has one form.
_TOKEN = re.compile(rf"{PREFIX}([\w-]+\.[\w-]+\.[\w-]{{42}}[AEIMQUYcgkosw048])", re.ASCII)
_WRONG_USE = {
    TokenUse.START: "This token is for an attempt that has started. Starting one needs its start token.",
    TokenUse.ATTEMPT: "This token can only start an attempt. Use the token that the start returned.",
}


class AgentKeys:
    """Signs and verifies tokens. Raises InvalidSettings for a missing or short key."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        if not keys:
            raise InvalidSettings("there is no key for agents' tokens: put one into EVERTICK_AGENT_KEY.")
        if any(len(key) < SHORTEST_KEY for key in keys):
            shortest = f"{SHORTEST_KEY} characters"
            raise InvalidSettings(f"a key for agents' tokens is shorter than {shortest}: use a random one.")
        self._signer = _key_id(keys[0])
        self._keys = {_key_id(key): key for key in keys}

    def derive(self, name: str) -> str:
        """A secret that every process with the same key derives for that name."""
        digest = hmac.digest(self._keys[self._signer].encode(), f"launched {name}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def sign(self, bearer: AgentIdentity) -> str:
        key = bearer.key
        claims = {
            "aud": bearer.use.value,
            "exp": bearer.expires_at,
            "task": [key.run_id, key.idx, key.map_index],
            "epoch": bearer.epoch,
            "session": bearer.session,
        }
        return self.encode(claims)

    def encode(self, claims: Mapping[str, object]) -> str:
        """A signed token. `aud` is what it is for, `exp` when it expires."""
        headers, key = {"kid": self._signer}, self._keys[self._signer]
        return PREFIX + jwt.encode({"iss": _ISSUER, **claims}, key, algorithm=_ALGORITHM, headers=headers)

    def verify(self, token: str, use: TokenUse) -> AgentIdentity:
        """Raises Refused, whose message says why."""
        try:
            claims = self.decode(token, use.value)
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("The attempt's token has expired: request a new one with the start token.") from None
        except jwt.InvalidAudienceError:
            raise Unauthenticated(_WRONG_USE[use]) from None
        except jwt.PyJWTError:
            raise Unauthenticated(
                "This is not a valid token of an attempt of this installation. Does the dispatching runner have the same"
                " EVERTICK_AGENT_KEY as the API?"
            ) from None
        key = TaskKey(*claims["task"])
        return AgentIdentity(
            use=use, key=key, epoch=claims["epoch"], session=claims["session"], expires_at=claims["exp"]
        )

    def decode(self, token: str, audience: str) -> dict[str, Any]:
        """Raises jwt.PyJWTError."""
        found = _TOKEN.fullmatch(token) if len(token) <= LONGEST_TOKEN else None
        if found is None:
            raise jwt.DecodeError
        key = self._keys.get(str(jwt.get_unverified_header(found[1]).get("kid")))
        if key is None:
            raise jwt.InvalidSignatureError
        return jwt.decode(
            found[1],
            key,
            algorithms=[_ALGORITHM],
            audience=audience,
            issuer=_ISSUER,
            leeway=CLOCK_LEEWAY_SECONDS,
            options={"require": ["iss", "aud", "exp"]},
        )


class AgentTokens:
    """The tokens of one process. It reads the keys once: a changed file needs a restart."""

    def __init__(self, settings: Settings) -> None:
        self._keys = load_agent_keys(settings)
        self._start_seconds, self._attempt_seconds = settings.start_token_seconds, settings.attempt_token_seconds

    def make_start_token(self, *, key: TaskKey, epoch: int, session: int) -> str:
        """The token that an agent starts with: it is valid for this attempt and for the first agent that uses it."""
        return self._make(TokenUse.START, key, epoch, session, self._start_seconds)

    def make_attempt_token(self, *, key: TaskKey, epoch: int, session: int) -> str:
        return self._make(TokenUse.ATTEMPT, key, epoch, session, self._attempt_seconds)

    def read(self, token: str, use: TokenUse) -> AgentIdentity:
        """Raises Refused."""
        return self._keys.verify(token, use)

    def _make(self, use: TokenUse, key: TaskKey, epoch: int, session: int, seconds: float) -> str:
        expires_at = round(time.time() + seconds)
        return self._keys.sign(AgentIdentity(use=use, key=key, epoch=epoch, session=session, expires_at=expires_at))


def new_agent_key() -> str:
    return secrets.token_urlsafe(32)


def load_agent_keys(settings: Settings) -> AgentKeys:
    """From the setting, or from the file, which the first process that needs it creates."""
    if settings.agent_key:
        return AgentKeys(settings.agent_key)
    place = settings.agent_key_place
    if not place.exists():
        try:
            # Of two processes that create it, the second uses the file of the first.
            write_keys(place, [new_agent_key()], replaces=False)
        except OSError as error:
            raise InvalidSettings(
                f"there is no key for agents' tokens, and {place} cannot be created: {error.strerror}. Set EVERTICK_AGENT_KEY,"
                " or EVERTICK_AGENT_KEY_FILE to the path of a file with the key."
            ) from None
    return AgentKeys(tuple(read_keys(place, if_missing=f"the key file {place} is missing: start this again.")))


def _key_id(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
