"""What holds for agents in the outermost layer: larger bodies where they send results, no bound on how many share an address."""

from __future__ import annotations

from contextlib import suppress

from evertick.api.agent.door import PREFIX, token_of
from evertick.api.desk import Desk
from evertick.domain.agent_token import TokenUse
from evertick.domain.errors import EvertickError, Refused

# Of a finish: its reason, the last lines of its log, and what JSON makes of them.
_ROOM_BYTES = 1024 * 1024


class Agents:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        settings = desk.settings
        # A result in a string of JSON: each quotation mark takes two characters.
        self._most_bytes = max(4 * _ROOM_BYTES, 3 * settings.result_spill_bytes + _ROOM_BYTES)
        self._most_result_bytes = settings.result_max_bytes

    def most_bytes(self, path: str) -> int | None:
        if not path.startswith(f"{PREFIX}/"):
            return None
        return self._most_result_bytes if path.startswith(f"{PREFIX}/results/") else self._most_bytes

    def are_known(self, path: str, authorization: str) -> bool:
        """By a token that is good, so that nobody gets round the bound of addresses with a made-up one."""
        if not path.startswith(f"{PREFIX}/"):
            return False
        for use in TokenUse:
            with suppress(Refused, EvertickError):
                self._desk.agent_tokens.read(token_of(authorization), use)
                return True
        return False
