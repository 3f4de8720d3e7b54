"""Ships an attempt's lines to the API while it runs. While nobody answers they wait in their spool file; none is sent before
those before it are stored, so that there is neither a gap nor a double.
"""

from __future__ import annotations

import asyncio
import time

from evertick.domain.errors import EvertickError, Unanswered
from evertick.execution.local import LocalExecutor
from evertick.execution.spool import LogChunk
from evertick.services.agent_line import AgentLine
from evertick.services.events import Log

LOG_SECONDS = 0.5
PAUSE_SECONDS = 2.0
# As JSON a line may be six times as long: what is sent at once must stay below what the API takes.
CHUNKS_PER_REQUEST = 8


class AgentLog:
    def __init__(self, line: AgentLine, executor: LocalExecutor, *, log: Log) -> None:
        self._line, self._executor, self._log = line, executor, log
        self._unsent: list[LogChunk] = []
        self._is_unanswered = False
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Until canceled."""
        while True:
            is_heard = await self._ship() is not None
            await asyncio.sleep(LOG_SECONDS if is_heard else PAUSE_SECONDS)

    async def flush(self, seconds: float) -> bool:
        """All that there is. False if nobody answered, so that lines are left which can be sent later; what takes too long, or
        is refused, is given up."""
        give_up_at = time.monotonic() + seconds
        while await self._ship():
            if time.monotonic() > give_up_at:
                self._log.warning("log_left", chunks=len(self._unsent))
                return True
        return not (self._unsent and self._is_unanswered)

    async def _ship(self) -> int | None:
        """How many chunks were sent; None if nobody took them."""
        async with self._sending:
            # Polling again tells the executor that the last chunks are stored, so they go first.
            if not self._unsent:
                self._unsent = self._executor.poll_logs()
            sent = 0
            while self._unsent:
                batch = self._unsent[:CHUNKS_PER_REQUEST]
                try:
                    await self._line.ship(batch)
                except EvertickError as error:
                    self._is_unanswered = isinstance(error, Unanswered)
                    self._log.warning("log_unsent", chunks=len(self._unsent), error=error)
                    return None
                self._unsent = self._unsent[len(batch) :]
                sent += len(batch)
            return sent
