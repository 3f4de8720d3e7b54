"""Session tokens of runners over HTTPS: short-lived JSON Web Tokens, signed with the keys of agents' tokens.

A token names a session and until when it may claim; the database decides about everything else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import jwt

from evertick.config import Settings
from evertick.domain.errors import Unauthenticated
from evertick.secrets.agent_tokens import load_agent_keys

_AUDIENCE = "runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIdentity:
    """`claims_until`: when the token that it joined with expires, in seconds since the epoch."""

    session: int
    token_id: int
    claims_until: float

    @property
    def may_claim(self) -> bool:
        return time.time() < self.claims_until


class RunnerSessionTokens:
    """The tokens of one process. It reads the keys once: a changed file needs a restart."""

    def __init__(self, settings: Settings) -> None:
        self._keys, self._seconds = load_agent_keys(settings), settings.attempt_token_seconds

    def make(self, who: RunnerIdentity) -> str:
        claims = {"session": who.session, "token": who.token_id, "until": who.claims_until}
        return self._keys.encode({**claims, "aud": _AUDIENCE, "exp": round(time.time() + self._seconds)})

    def read(self, token: str) -> RunnerIdentity:
        try:
            claims = self._keys.decode(token, _AUDIENCE)
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("The runner's session token has expired: join again with the same session.") from None
        except jwt.PyJWTError:
            raise Unauthenticated(
                "This is not a valid session token of a runner of this installation. Do all API processes have the same"
                " EVERTICK_AGENT_KEY?"
            ) from None
        return RunnerIdentity(session=claims["session"], token_id=claims["token"], claims_until=claims["until"])
