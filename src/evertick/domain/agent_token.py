"""The identity that an agent's token carries: one attempt and one use. `services/agent_tokens` signs and verifies it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from evertick.domain.attempt import TaskKey


class TokenUse(StrEnum):
    """START begins the attempt or repeats that request; ATTEMPT authenticates every later request."""

    START = "start"
    ATTEMPT = "attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """The attempt that a token was issued for."""

    use: TokenUse
    key: TaskKey
    epoch: int
    session: int
    expires_at: int
