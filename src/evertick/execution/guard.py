"""Children that must not outlive their runner's lease, and until when that lease is valid.

Kept by the fork server, which needs neither the runner nor the database to see that the deadline has passed.
"""

from __future__ import annotations

from evertick.execution.linux import boot_seconds

CUT_OFF = "lost_contact: no heartbeat was answered in time, so it was stopped before another runner could get its lease"
# After a suspend the deadline may be long past; a poll that was suspended with the machine must not last much longer.
_LONGEST_POLL_MS = 250


class ContactGuard:
    """Times are seconds since boot."""

    def __init__(self) -> None:
        self._children: set[int] = set()
        self._until = 0.0

    def keep_contact(self, until: float) -> None:
        self._until = until

    def add(self, number: int) -> None:
        self._children.add(number)

    def discard(self, number: int) -> None:
        self._children.discard(number)

    def poll_ms(self, otherwise_ms: int) -> int:
        """How long the fork server may sleep."""
        if not self._children:
            return otherwise_ms
        left_ms = max(0.0, self._until - boot_seconds()) * 1000
        return int(min(otherwise_ms, _LONGEST_POLL_MS, left_ms))

    def take_cut_off(self) -> list[int]:
        """The children whose deadline has passed, each once."""
        if not self._children or boot_seconds() < self._until:
            return []
        cut_off, self._children = sorted(self._children), set()
        return cut_off
