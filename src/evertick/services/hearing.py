"""Applies a heartbeat's answer to a runner: stops attempts that it lost or must stop, returns unknown claims, follows
drain requests.

The answer has two sides: attempts that this session no longer holds, and attempts recorded as its own that its list
lacked. Never starts or reports anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from evertick.engine.extend import Held, Request
from evertick.execution.local import LocalExecutor
from evertick.services import metrics
from evertick.services.changeover import Changeover
from evertick.services.contact import Contact
from evertick.services.duty import Duty
from evertick.services.events import Log
from evertick.services.heartbeat import Beat
from evertick.services.holding import Holding
from evertick.services.link import Link

ASK_AGAIN_SECONDS = 0.2
# A canceled body must be gone within a second of the command (DESIGN, States); this is its time to clean up.
CANCEL_GRACE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """The heartbeat handler of one session. `hot` is the connection of its exchanges, `wake` wakes its loop,
    `ask_again` sends another heartbeat."""

    holding: Holding
    executor: LocalExecutor
    contact: Contact
    changeover: Changeover
    duty: Duty
    hot: Link
    wake: asyncio.Event
    log: Log
    ask_again: Callable[[], None]
    on_buried: Callable[[], None]
    on_idle: Callable[[], None]

    def on_beat(self, beat: Beat) -> None:
        """A heartbeat was answered."""
        reply = beat.reply
        if reply.is_gone:
            self.on_buried()
        elif self.note_heard(beat.sent_at):
            self._obey(reply.request)
        if beat.by_spare and self.contact.is_step_suspect(beat.sent_at):
            # A new connection answers while the old one does not: requests sent on the old one may be lost.
            self.hot.cut()
        self._end(reply.lost, "lease lost", 0.0)
        self._end(reply.stop, "stop requested", CANCEL_GRACE_SECONDS)
        self.changeover.hear(beat.server, reply.lost)
        self._give_back(reply.unknown, beat.sent_at)

    def note_heard(self, sent_at: float) -> bool:
        """The database answered a request sent at that time. Returns whether that is the latest answer so far."""
        if not self.contact.may_claim(sent_at):
            self.wake.set()
        is_latest = self.contact.note_heard(sent_at)
        self.executor.keep_contact(self.contact.stop_at)
        return is_latest

    def _end(self, attempts: list[Held], reason: str, grace_seconds: float) -> None:
        for key, epoch in attempts:
            if self.holding.holds(key, epoch):
                self.executor.kill(key, epoch, reason, grace_seconds=grace_seconds)

    def _give_back(self, unknown: list[Held], sent_at: float) -> None:
        if self.contact.stepping_since is not None:
            if any(not self.holding.holds(*held) for held in unknown):
                # The reply in flight may carry them; ask again once it has arrived.
                asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self.ask_again)
            return
        if (count := self.holding.give_back(unknown, "claim_reply_lost")) > 0:
            metrics.CLAIMS_LOST.inc(count)
            self.log.warning("claim_reply_lost", attempts=count)
            self.wake.set()
        if self.contact.settle_doubt(sent_at):
            self.wake.set()

    def _obey(self, request: Request | None) -> None:
        """Follow an operator's drain or undrain request."""
        if self.duty.hear(request):
            self.wake.set()
            self.on_idle()
