"""Decides whether a runner may claim from a server that took over: only once it knows which attempts that server has it
hold. No I/O.

A claim that was lost with the old server can be made again on the new one, with the same epoch and by the same session.
The two attempts would be indistinguishable, so the first must be gone before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evertick.domain.attempt import TaskKey
from evertick.domain.failover import Server
from evertick.engine.extend import Held


class Changeover:
    """`holds`: whether the runner still has that attempt, running or not yet reported. `ask`: request a heartbeat now."""

    def __init__(self, holds: Callable[[TaskKey, int], bool], *, ask: Callable[[], None]) -> None:
        self._holds, self._ask = holds, ask
        self._has_begun = self._is_sure = False
        self._server: Server | None = None
        self._lost: list[Held] = []

    def allow(self, free: int, server: Server | None) -> int:
        """The number of tasks that may be claimed from that server now: all free slots, or none."""
        if not self._has_begun:
            # The first server has no earlier claims of this session.
            self._has_begun, self._is_sure, self._server = True, True, server
        self._lost = [held for held in self._lost if self._holds(*held)]
        if self._is_sure and server == self._server and not self._lost:
            return free
        self._ask()
        return 0

    def note_step(self, server: Server | None) -> None:
        """A claim that one server made while the latest heartbeat came from another must be looked up on both."""
        if server != self._server:
            self._is_sure = False

    def hear(self, server: Server | None, lost: Iterable[Held]) -> None:
        """That server answered a heartbeat, so it is known which attempts this session holds there. `lost` are attempts
        of this session that the server does not know."""
        if not self._has_begun or (self._is_sure and server == self._server):
            return
        self._is_sure, self._server = True, server
        self._lost = [held for held in lost if self._holds(*held)]
