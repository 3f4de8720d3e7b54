"""Limits for agents in the outermost middleware: larger bodies for results, and no rate limit per address."""

from __future__ import annotations

from contextlib import suppress

from evertick.api.agent.door import PREFIX, token_of
from evertick.api.desk import Desk
from evertick.domain.agent_token import TokenUse
from evertick.domain.errors import EvertickError, Refused

# A finish request: the reason and the last log lines, with JSON escapes.
_ROOM_BYTES = 1024 * 1024


class Agents:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        settings = desk.settings
        # A result inside a JSON string: each quotation mark takes two characters.
        self._most_bytes = max(4 * _ROOM_BYTES, 3 * settings.result_spill_bytes + _ROOM_BYTES)
        self._most_result_bytes = settings.result_max_bytes

    def most_bytes(self, path: str) -> int | None:
        if not path.startswith(f"{PREFIX}/"):
            return None
        return self._most_result_bytes if path.startswith(f"{PREFIX}/results/") else self._most_bytes

    def are_known(self, path: str, authorization: str) -> bool:
        """Whether the token is valid. An invalid one must not bypass the rate limit per address."""
        if not path.startswith(f"{PREFIX}/"):
            return False
        for use in TokenUse:
            with suppress(Refused, EvertickError):
                self._desk.agent_tokens.read(token_of(authorization), use)
                return True
        return False
