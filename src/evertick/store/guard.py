"""What this process has seen of the server behind a URL, so that it never writes to one that was replaced.

Of the process, not of a connection: all its connections must agree, those of other threads too. A restart forgets, which
is how people tell a process that a restore was meant.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

from evertick.domain.errors import WrongServer
from evertick.domain.failover import Mark, Server, refusal
from evertick.store.line import Line


@dataclass(slots=True)
class Guard:
    """`seen` is the highest server; `mark` the newest one that is known to be committed there."""

    seen: Server | None = None
    mark: Mark | None = None
    alarms: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lines: weakref.WeakSet[Line] = field(default_factory=weakref.WeakSet)

    def admit(self, found: Server | None, place: str) -> None:
        """Take note of a server, or raise if it was replaced. One that does not tell who it is cannot be refused.

        Whoever still waits for an answer of its predecessor stops waiting: a commit there may wait for ever.
        """
        if found is None:
            return
        with self._lock:
            if why := refusal(self.seen, found):
                raise WrongServer(f"The PostgreSQL at {place} is refused: {why}.")
            if found != self.seen:
                self.seen = found
                for line in [line for line in self._lines if not self.trusts(line.server)]:
                    line.cut()

    def watch_over(self, line: Line) -> None:
        with self._lock:
            self._lines.add(line)

    def trusts(self, server: Server | None) -> bool:
        """Whether a connection that led to `server` when it was opened may still be used."""
        return server is self.seen or server is None or server == self.seen

    def alarm(self) -> None:
        """Behind one open connection another server has appeared: every connection is to be opened again."""
        self.alarms += 1

    def remember(self, mark: Mark) -> None:
        with self._lock:
            if self.mark is None or mark.server != self.mark.server or mark.lsn > self.mark.lsn:
                self.mark = mark

    def follow_up(self, mark: Mark) -> bool:
        """A later mark of the same server; whether it is one. The first of another server comes after the comparison only."""
        with self._lock:
            is_later = self.mark is not None and mark.server == self.mark.server and mark.lsn > self.mark.lsn
            if is_later:
                self.mark = mark
            return is_later

    def forget_mark(self) -> None:
        """It was compared with what the database holds, and told."""
        self.mark = None


_guards: dict[str, Guard] = {}


def guard_of(url: str) -> Guard:
    return _guards.setdefault(url, Guard())
