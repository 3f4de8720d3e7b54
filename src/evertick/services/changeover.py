"""What a runner must know before it claims from a server that took over: what it holds there. No I/O.

A claim that was lost with the old server can be made again on the new one, with the same epoch and by the same session.
The two attempts could not be told apart, so the first one must be gone before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evertick.domain.attempt import TaskKey
from evertick.domain.failover import Server
from evertick.engine.extend import Held


class Changeover:
    """`holds`: whether the runner still has that attempt, running or not yet reported. `ask`: have a heartbeat sent now."""

    def __init__(self, holds: Callable[[TaskKey, int], bool], *, ask: Callable[[], None]) -> None:
        self._holds, self._ask = holds, ask
        self._has_begun = self._is_sure = False
        self._server: Server | None = None
        self._lost: list[Held] = []

    def allow(self, free: int, server: Server | None) -> int:
        """How many may be claimed from that server now: all that are free, or none."""
        if not self._has_begun:
            # The first server has nothing of ours yet.
            self._has_begun, self._is_sure, self._server = True, True, server
        self._lost = [held for held in self._lost if self._holds(*held)]
        if self._is_sure and server == self._server and not self._lost:
            return free
        self._ask()
        return 0

    def note_step(self, server: Server | None) -> None:
        """What one server gave us while another's books were the last that we saw must be looked for in both."""
        if server != self._server:
            self._is_sure = False

    def hear(self, server: Server | None, lost: Iterable[Held]) -> None:
        """A heartbeat was answered by that server: it has told what we hold by its books, and what not."""
        if not self._has_begun or (self._is_sure and server == self._server):
            return
        self._is_sure, self._server = True, server
        self._lost = [held for held in lost if self._holds(*held)]
