"""Sends the notifications in the outbox: in the leader, on its own connection, concurrently with all other work.

A destination that hangs or is down backs off alone; other destinations, runs and ticks are unaffected. A leader claims
each delivery for a limited time. If it dies before it records the delivery, the next leader sends it again, under the
same id.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import notifications
from evertick.db.queries.notifications import ClaimedDelivery, DeliveryResult, Room
from evertick.db.queries.shards import PendingWork
from evertick.domain.errors import DeliveryFailed, NotLeader, PostgresUnavailable
from evertick.domain.notifications import Event, parse_destination, rest_seconds
from evertick.engine.notifications import take_due, tend_outbox
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import boot_seconds
from evertick.runtime.connections import Notifier
from evertick.runtime.loop import UNREACHABLE, run_loop
from evertick.scheduler.leadership import LeaderConnection, Leadership

if TYPE_CHECKING:
    from evertick.notifications.delivery import Sending

# Concurrent deliveries per destination, and in total.
EACH, BATCH = 4, 64
# Longer than any delivery takes, so that none is sent twice at once; also the delay of a dead leader's deliveries.
TAKEN_SECONDS = 30.0
RECORD_AGAIN_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0)
TEND_SECONDS = 15.0
FOR_EVER_SECONDS = 1e9
IDLE_TICKS = 2
MOST_COUNTED = 100_000
GIVE_UP_BATCH = 1000
# Reported as a health problem after this time.
LATE_SECONDS = 300.0


class DestinationBackoff:
    """Destinations that failed recently, and until when each is paused."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}

    def fail(self, sink: str) -> None:
        failures = self._failures.get(sink, (0, 0.0))[0] + 1
        self._failures[sink] = (failures, boot_seconds() + min(2.0 ** min(failures - 1, 10), 60.0))

    def succeed(self, sink: str) -> None:
        self._failures.pop(sink, None)

    def now(self) -> set[str]:
        at = boot_seconds()
        return {sink for sink, (_, until) in self._failures.items() if until > at}

    @property
    def troubled(self) -> list[str]:
        return sorted(self._failures)


class NotificationSender:
    def __init__(self, settings: Settings, *, url: str, leadership: Leadership, waker: Notifier, log: Log) -> None:
        self._settings, self._leadership, self._waker, self._log = settings, leadership, waker, log
        self._link = LeaderConnection(url, leadership, settings, lock_share=0.5)
        self._resting = DestinationBackoff()
        self._busy: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._pulse = LoopHealth("notify", is_essential=False)
        self._tended_for: int | None = None
        self._tend_at = 0.0
        self._may_wait = True
        self._made: Sending | None = None
        self._group: asyncio.TaskGroup | None = None

    def on_poll(self, seen: PendingWork) -> None:
        """The leader's latest poll: whether notifications wait, so that idle ticks need no query."""
        could_wait, self._may_wait = self._may_wait, seen.has_deliveries is not False
        if self._may_wait and not could_wait:
            self._wake.set()

    async def run(self) -> None:
        """Run until canceled. A delivery in progress is then aborted, and the next leader sends it again."""
        never = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            self._group = group
            await run_loop(self.tick, wake=self._wake, stop=never, name="notify", log=self._log, pulse=self._pulse)

    async def tick(self) -> float:
        epoch = self._leadership.current_epoch()
        if epoch is None:
            self._forget()
            return self._settings.tick_seconds
        try:
            return await self._send_due(epoch)
        except NotLeader as error:
            self._log.warning("leadership_lost", error=error)
            return self._settings.tick_seconds

    async def close(self) -> None:
        if self._made is not None:
            self._made.close()
        await self._link.close()

    async def _send_due(self, epoch: int) -> float:
        conn = await self._link.get()
        if self._tended_for != epoch or boot_seconds() >= self._tend_at:
            await self._tend(epoch)
        if not self._may_wait:
            return self._settings.tick_seconds
        room = Room(passed_over=self._resting.now() | self._busy.keys(), each=EACH, batch=BATCH, seconds=TAKEN_SECONDS)
        taken = await take_due(conn, shard=self._leadership.shard, epoch=epoch, room=room)
        assert self._group is not None
        for each in taken:
            self._busy[each.sink] = self._busy.get(each.sink, 0) + 1
            self._group.create_task(self._deliver(each))
        # People wait for notifications, tasks do not: an idle leader asks seldom.
        return self._settings.tick_seconds * (1 if taken else IDLE_TICKS)

    async def _deliver(self, taken: ClaimedDelivery) -> None:
        """Attempt one delivery."""
        sink = taken.sink
        try:
            answer = await self._sending.send(sink, taken.fact, delivery=str(taken.delivery_id))
            self._resting.succeed(sink)
            await self._record(taken, "sent", answer, 0.0)
        except DeliveryFailed as error:
            if not error.is_final:
                self._resting.fail(sink)
            await self._fail(taken, error)
        except (*UNREACHABLE, NotLeader) as error:
            # An internal error, not the destination's: the delivery is claimed again when its claim expires.
            self._log.warning("delivery_failed", delivery=taken.delivery_id, error=error)
        except Exception as error:
            await self._fail(taken, DeliveryFailed(f"{type(error).__name__} while it was prepared", is_final=True))
        finally:
            self._busy[sink] -= 1
            if self._busy[sink] == 0:
                del self._busy[sink]
                # More for the same destination may wait.
                self._wake.set()

    async def _fail(self, taken: ClaimedDelivery, error: DeliveryFailed) -> None:
        is_over = error.is_final or taken.attempts >= self._settings.notify_attempts
        rest = rest_seconds(taken.attempts, error.retry_after_seconds)
        await self._record(taken, "failed" if is_over else "waiting", str(error), 0.0 if is_over else rest)

    async def _record(self, taken: ClaimedDelivery, state: str, answer: str, rest: float) -> None:
        """Record the result as soon as the database answers. If it does not for long, the delivery is claimed again
        when its claim expires."""
        for pause in (*RECORD_AGAIN_SECONDS, None):
            try:
                conn = await self._link.get()
                await notifications.record(conn, taken, state=state, answer=answer, rest_seconds=rest)
                break
            except (psycopg.Error, PostgresUnavailable, NotLeader, OSError) as error:
                if pause is None:
                    self._log.error("delivery_unrecorded", delivery=taken.delivery_id, state=state, error=error)
                    return
                await asyncio.sleep(pause)
        outcome = {"sent": "sent", "failed": "given_up", "waiting": "failed"}[state]
        metrics.NOTIFICATIONS.labels(outcome=outcome).inc()
        tell_result = self._log.info if state == "sent" else self._log.warning
        tell_result(
            "delivery_attempted", delivery=taken.delivery_id, outcome=outcome, attempt=taken.attempts, answer=answer
        )
        if state == "sent" and taken.sink.startswith("call:"):
            self._waker.wake(Channel.TASKS)

    async def _tend(self, epoch: int) -> None:
        settings = self._settings
        wish = DeliveryResult(
            defaults=self._defaults(),
            give_up_seconds=settings.notify_expire_hours * 3600 or FOR_EVER_SECONDS,
            batch=GIVE_UP_BATCH,
            most=MOST_COUNTED,
        )
        found = await tend_outbox(await self._link.get(), shard=self._leadership.shard, epoch=epoch, wish=wish)
        metrics.NOTIFICATIONS.labels(outcome="given_up").inc(found.given_up)
        rest = 0.0 if found.given_up == GIVE_UP_BATCH else TEND_SECONDS
        self._tended_for, self._tend_at = epoch, boot_seconds() + rest
        oldest = found.oldest_seconds or 0.0
        metrics.NOTIFICATIONS_WAITING.set(found.waiting)
        metrics.NOTIFICATIONS_OLDEST.set(oldest)
        why = f"; failing: {', '.join(self._resting.troubled[:3])}" if self._resting.troubled else ""
        text = f"{found.waiting} notifications wait, the oldest for {oldest / 60:.0f} minutes{why}"
        self._pulse.blocked = text if oldest > LATE_SECONDS else None

    def _forget(self) -> None:
        if self._tended_for is not None:
            self._tended_for, self._pulse.blocked = None, None
            metrics.NOTIFICATIONS_WAITING.set(0)
            metrics.NOTIFICATIONS_OLDEST.set(0)

    def _defaults(self) -> list[dict[str, object]]:
        told = {Event.FAILURE: self._settings.notify_on_failure, Event.DEADLINE: self._settings.notify_on_deadline}
        return [
            {"event": event, "sink": sink, "every_time": self._settings.notify_repeat}
            for event, sinks in told.items()
            for sink in sorted({parse_destination(each).text for each in sinks})
        ]

    @property
    def _sending(self) -> Sending:
        """Created on first use: most installations send nothing, and every scheduler would load TLS and mail libraries."""
        if self._made is None:
            from evertick.notifications.delivery import Sending

            self._made = Sending(self._settings, connect=self._link.get)
        return self._made
