"""The failover guard: what this process has seen of the server behind a URL, so that it never writes to one that was replaced.

Kept per process, not per connection: all its connections must agree, across threads too. A restart clears it, which
is how an operator confirms that a restore was intended.
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
    """`seen` is the server with the highest timeline; `mark` the newest mark known to be committed there."""

    seen: Server | None = None
    mark: Mark | None = None
    alarms: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lines: weakref.WeakSet[Line] = field(default_factory=weakref.WeakSet)

    def admit(self, found: Server | None, place: str) -> None:
        """Record a server, or raise if it was replaced. A server that does not reveal its identity cannot be refused.

        Connections that still wait for a reply of its predecessor are cut: a commit there may never return.
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
        """Another server has appeared behind an open connection: all connections must be opened again."""
        self.alarms += 1

    def remember(self, mark: Mark) -> None:
        with self._lock:
            if self.mark is None or mark.server != self.mark.server or mark.lsn > self.mark.lsn:
                self.mark = mark

    def follow_up(self, mark: Mark) -> bool:
        """Record a later mark of the same server; returns whether it is one. Another server's first mark follows the comparison."""
        with self._lock:
            is_later = self.mark is not None and mark.server == self.mark.server and mark.lsn > self.mark.lsn
            if is_later:
                self.mark = mark
            return is_later

    def forget_mark(self) -> None:
        """The mark was compared with the database, and the result was reported."""
        self.mark = None


_guards: dict[str, Guard] = {}


def guard_of(url: str) -> Guard:
    return _guards.setdefault(url, Guard())
