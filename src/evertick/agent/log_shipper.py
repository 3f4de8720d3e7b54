"""Ships an attempt's log lines to the API while it runs. While the API is unreachable they wait in the spool file. No
chunk is sent before the previous ones are stored, so there are neither gaps nor duplicates."""

from __future__ import annotations

import asyncio
import time

from evertick.agent.api_client import AgentClient
from evertick.domain.errors import ApiUnreachable, EvertickError
from evertick.executors.local.executor import LocalExecutor
from evertick.logs.spool import LogChunk
from evertick.observability.logging import Log

LOG_SECONDS = 0.5
PAUSE_SECONDS = 2.0
# Encoded as JSON, a line can be six times as long; one request must stay below the API's size limit.
CHUNKS_PER_REQUEST = 8


class AgentLog:
    def __init__(self, line: AgentClient, executor: LocalExecutor, *, log: Log) -> None:
        self._line, self._executor, self._log = line, executor, log
        self._unsent: list[LogChunk] = []
        self._is_unanswered = False
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            is_heard = await self._ship() is not None
            await asyncio.sleep(LOG_SECONDS if is_heard else PAUSE_SECONDS)

    async def flush(self, seconds: float) -> bool:
        """Send all remaining lines. False if the API did not answer, so that lines are left to send later. Lines that
        take too long or are refused are dropped."""
        give_up_at = time.monotonic() + seconds
        while await self._ship():
            if time.monotonic() > give_up_at:
                self._log.warning("logs_left_in_spool", chunks=len(self._unsent))
                return True
        return not (self._unsent and self._is_unanswered)

    async def _ship(self) -> int | None:
        """The number of chunks sent; None if the API did not accept them."""
        async with self._sending:
            # Polling again tells the executor that the previous chunks are stored, so send those first.
            if not self._unsent:
                self._unsent = self._executor.poll_logs()
            sent = 0
            while self._unsent:
                batch = self._unsent[:CHUNKS_PER_REQUEST]
                try:
                    await self._line.ship(batch)
                except EvertickError as error:
                    self._is_unanswered = isinstance(error, ApiUnreachable)
                    self._log.warning("log_upload_failed", chunks=len(self._unsent), error=error)
                    return None
                self._unsent = self._unsent[len(batch) :]
                sent += len(batch)
            return sent
