"""Agents' tokens: their signing key, from a setting or a file that only its owner may read, and their lifetime.

The key is never in the database, in a log or with an agent. Runners that dispatch and all API processes need the same
key.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from evertick.config import Settings
from evertick.domain.agent_token import AgentKeys, Bearer, TokenUse, new_agent_key
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings


class AgentTokens:
    """The tokens of one process. Keys are read once: a changed file needs a restart."""

    def __init__(self, settings: Settings) -> None:
        self._keys = load_agent_keys(settings)
        self._start_seconds, self._attempt_seconds = settings.start_token_seconds, settings.attempt_token_seconds

    def make_start_token(self, *, key: TaskKey, epoch: int, session: int) -> str:
        """The token that an attempt's agent starts with: valid for this attempt only, and for the first agent that uses
        it."""
        return self._make(TokenUse.START, key, epoch, session, self._start_seconds)

    def make_attempt_token(self, *, key: TaskKey, epoch: int, session: int) -> str:
        return self._make(TokenUse.ATTEMPT, key, epoch, session, self._attempt_seconds)

    def read(self, token: str, use: TokenUse) -> Bearer:
        """Raises Refused."""
        return self._keys.read(token, use=use, now=time.time())

    def _make(self, use: TokenUse, key: TaskKey, epoch: int, session: int, seconds: float) -> str:
        expires_at = round(time.time() + seconds, 3)
        return self._keys.sign(Bearer(use=use, key=key, epoch=epoch, session=session, expires_at=expires_at))


def load_agent_keys(settings: Settings) -> AgentKeys:
    """The keys from the setting, or from the key file, which the first process that needs it creates."""
    if settings.agent_key:
        return AgentKeys(settings.agent_key)
    place = settings.agent_key_place
    if not place.exists():
        _make_file(place)
    return AgentKeys(tuple(_read(place)))


def _read(place: Path) -> list[str]:
    try:
        mode = place.stat().st_mode & 0o777
        text = place.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"the key file for agents' tokens, {place}, cannot be read: {error}") from None
    if mode & 0o077:
        raise InvalidSettings(f"the key file {place} can be read by others: run `chmod 600 {place}`.")
    return text.split()


def _make_file(place: Path) -> None:
    """Create the file atomically and once: of two processes, the second uses the first's file."""
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(f"{new_agent_key()}\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(draft, place)
        finally:
            draft.unlink()
    except OSError as error:
        raise InvalidSettings(
            f"no key for agents' tokens exists, and none can be created at {place}: {error.strerror}. Set EVERTICK_AGENT_KEY, or"
            " set EVERTICK_AGENT_KEY_FILE to the key's path."
        ) from None
