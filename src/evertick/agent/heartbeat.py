"""An agent's heartbeat over HTTP: extends the lease, and long-polls for a request to stop. Never decides what is
reported."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from evertick.agent.api_client import ANSWER_SECONDS, AgentClient
from evertick.domain.agent_protocol import AgentLimits
from evertick.domain.attempt import AttemptOrder
from evertick.domain.errors import Conflict, EvertickError, LeaseLost
from evertick.executors.local.executor import LocalExecutor
from evertick.observability.logging import Log
from evertick.processes.linux import boot_seconds
from evertick.runner.state import RunnerState

# A canceled body must be gone soon after the command; this is its time to clean up.
CANCEL_GRACE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
# An API process that shuts down answers all waiting requests at once; do not repeat them in a tight loop.
SHORTEST_REST_SECONDS = 0.2


class AgentHeartbeat:
    def __init__(
        self,
        line: AgentClient,
        limits: AgentLimits,
        *,
        state: RunnerState,
        executor: LocalExecutor,
        order: AttemptOrder,
        on_lost: Callable[[], None],
        log: Log,
    ) -> None:
        self._line, self._seconds, self._state = line, limits.heartbeat_seconds, state
        self._executor, self._order, self._on_lost, self._log = executor, order, on_lost, log
        line.answer_seconds = min(ANSWER_SECONDS, max(1.0, limits.lost_after_seconds / 10))
        executor.extend_lease(state.stop_at)

    async def run(self) -> None:
        """Run until the attempt is lost or canceled."""
        failures = 0
        while True:
            sent_at = boot_seconds()
            try:
                word, rest_seconds = await self._line.heartbeat(self._seconds)
            except (LeaseLost, Conflict):
                word, rest_seconds = "lost", 0.0
            except EvertickError as error:
                # The API may come back. Until then the attempt continues, unless its fork server has a lease deadline.
                failures += 1
                self._log.warning("heartbeat_failed", failures=failures, error=error)
                pause = min(LONGEST_PAUSE_SECONDS, self._seconds, 0.1 * 2 ** min(failures, 10))
                await asyncio.sleep(pause * (0.5 + random.random() / 2))
                continue
            if failures:
                self._log.info("heartbeat_recovered", after_failures=failures)
            failures = 0
            if self._obey(word):
                return
            self._state.on_answer(sent_at)
            self._executor.extend_lease(self._state.stop_at)
            is_early = boot_seconds() - sent_at < self._seconds / 2
            await asyncio.sleep(max(rest_seconds, SHORTEST_REST_SECONDS if is_early else 0.0))

    def _obey(self, word: str) -> bool:
        """Act on the API's answer. Returns whether the heartbeat can end."""
        key, epoch = self._order.key, self._order.epoch
        if word == "lost":
            self._executor.kill(key, epoch, "lease lost")
            self._on_lost()
            return True
        if word == "stop":
            self._executor.kill(key, epoch, "stop requested", CANCEL_GRACE_SECONDS)
        return False
