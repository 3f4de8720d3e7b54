"""The agent: runs one attempt on a remote machine and reports it to the API over HTTP. It has no access to the
database.

Never starts user code before the API acknowledges the start. Never reports an outcome before it is written to disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf

from evertick.config import Settings
from evertick.domain.errors import EvertickError, InvalidSettings, Unanswered
from evertick.execution.linux import boot_seconds
from evertick.services.agent_line import AgentLine, keep_asking
from evertick.services.agent_outcome_file import leave_refusal
from evertick.services.agent_session import AgentExit, AgentSession
from evertick.services.events import Log


class Agent:
    """`stop` ends the attempt within its grace period, `hurry` ends it at once. An attempt that has not ended is
    returned to the queue."""

    def __init__(
        self, settings: Settings, *, server: str, token: str, log: Log, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` is the environment that user code sees; None passes on all of the agent's own."""
        self._settings, self._log, self._environment = settings, log, environment
        self._line = AgentLine(server, token, log=log)
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    async def run(self) -> AgentExit:
        asked_at = boot_seconds()

        async def start() -> None:
            nonlocal asked_at
            asked_at = boot_seconds()
            self._told = await self._line.start()

        try:
            await keep_asking(start, until=self.stop, seconds=inf, what="start", log=self._log)
        except EvertickError as error:
            self._log.error("not_started", error=error)
            leave_refusal(self._settings.agent_outcome_file, str(error))
            # Another agent runs the attempt, it was canceled, or it no longer belongs to the task: there is nothing to
            # do here.
            return AgentExit.UNREPORTED if isinstance(error, Unanswered) else AgentExit.NOT_OURS
        session = AgentSession(
            self._settings, self._told, line=self._line, heard_at=asked_at, log=self._log, environment=self._environment
        )
        return await session.run(self.stop, self.hurry)


def read_start_token(settings: Settings) -> str:
    """Read the start token from the named file or variable. Raises InvalidSettings, which never quotes the token."""
    token = settings.agent_token or ""
    if settings.agent_token_file is not None:
        try:
            token = settings.agent_token_file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "the file is not text"
            raise InvalidSettings(f"the token file {settings.agent_token_file} cannot be read: {why}.") from None
    if not token.strip():
        raise InvalidSettings(
            "an agent needs its start token: name the file that contains it with --token-file or EVERTICK_AGENT_TOKEN_FILE."
        )
    if not token.strip().isascii() or len(token.split()) > 1 or not token.strip().isprintable():
        raise InvalidSettings("the start token is malformed: it must be a single word.")
    return token.strip()
