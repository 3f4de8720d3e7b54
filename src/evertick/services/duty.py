"""The drain state of a runner: whether it may claim new work, and whether it should exit when idle. No I/O."""

from __future__ import annotations

from evertick.engine.extend import Request
from evertick.services.events import Log


class Duty:
    """Active until a drain is requested. Each change is reported once."""

    def __init__(self, request: Request | None, *, log: Log) -> None:
        self.request = request
        self._log = log
        self._was_told = False

    @property
    def is_free(self) -> bool:
        """Whether it may claim new work."""
        return self.request is None

    def hear(self, request: Request | None) -> bool:
        """Returns whether the request is new."""
        if request == self.request:
            return False
        self.request, self._was_told = request, False
        if request is None:
            self._log.info("undrain")
        else:
            self._log.info("drain", is_leaving=request is Request.LEAVE)
        return True

    def note_idle(self) -> bool:
        """The runner is idle. Returns whether it should exit now."""
        if self.request is not None and not self._was_told:
            self._was_told = True
            self._log.info("drained")
        return self.request is Request.LEAVE
