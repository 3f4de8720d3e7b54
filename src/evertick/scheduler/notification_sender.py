"""Sends the notifications in the outbox: in the leader, on its own connection, concurrently with all other work.

A destination that hangs or is down backs off alone; other destinations, runs and ticks are unaffected. A leader claims
each delivery for a limited time. If it dies before it records the delivery, the next leader sends it again, under the
same id.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg

from evertick.db.notify import Channel
from evertick.db.queries import notifications
from evertick.db.queries.notifications import ClaimedDelivery
from evertick.domain.errors import DeliveryFailed, NotLeader, PostgresUnavailable
from evertick.domain.notifications import NotificationEvent, parse_destination, rest_seconds
from evertick.engine.notifications import OutboxSettings, Room, claim_deliveries, maintain_outbox
from evertick.engine.shards import PendingWork
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
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
MAINTAIN_SECONDS = 15.0
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
    def failing(self) -> list[str]:
        return sorted(self._failures)


class NotificationSender:
    def __init__(self, leadership: Leadership, *, notifier: Notifier, log: Log) -> None:
        self._settings, self._leadership, self._notifier, self._log = leadership.settings, leadership, notifier, log
        self._link = LeaderConnection(leadership, lock_share=0.5)
        self._backoff = DestinationBackoff()
        self._busy: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._pulse = LoopHealth("notify", is_essential=False)
        self._maintained_epoch: int | None = None
        self._maintain_at = 0.0
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
        async with asyncio.TaskGroup() as self._group:
            await run_loop(self.tick, wake=self._wake, name="notify", log=self._log, pulse=self._pulse)

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
        await self._link.close()

    async def _send_due(self, epoch: int) -> float:
        conn = await self._link.get()
        if self._maintained_epoch != epoch or boot_seconds() >= self._maintain_at:
            await self._maintain(epoch)
        if not self._may_wait:
            return self._settings.tick_seconds
        passed_over = list(self._backoff.now() | self._busy.keys())
        room = Room(passed_over=passed_over, each=EACH, limit=BATCH, seconds=TAKEN_SECONDS)
        taken = await claim_deliveries(conn, shard=self._leadership.shard, epoch=epoch, room=room)
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
            self._backoff.succeed(sink)
            await self._record(taken, "sent", answer, 0.0)
        except DeliveryFailed as error:
            if not error.is_final:
                self._backoff.fail(sink)
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
        tell_result, attempt = self._log.info if state == "sent" else self._log.warning, taken.attempts
        tell_result("delivery_attempted", delivery=taken.delivery_id, outcome=outcome, attempt=attempt, answer=answer)
        if state == "sent" and taken.sink.startswith("call:"):
            self._notifier.wake(Channel.TASKS)

    async def _maintain(self, epoch: int) -> None:
        give_up = self._settings.notify_expire_hours * 3600 or FOR_EVER_SECONDS
        wish = OutboxSettings(
            defaults=self._defaults(), give_up_seconds=give_up, limit=GIVE_UP_BATCH, most=MOST_COUNTED
        )
        found = await maintain_outbox(await self._link.get(), shard=self._leadership.shard, epoch=epoch, wish=wish)
        metrics.NOTIFICATIONS.labels(outcome="given_up").inc(found.given_up)
        rest = 0.0 if found.given_up == GIVE_UP_BATCH else MAINTAIN_SECONDS
        self._maintained_epoch, self._maintain_at = epoch, boot_seconds() + rest
        oldest = found.oldest_seconds or 0.0
        metrics.NOTIFICATIONS_WAITING.set(found.waiting)
        metrics.NOTIFICATIONS_OLDEST.set(oldest)
        why = f"; failing: {', '.join(self._backoff.failing[:3])}" if self._backoff.failing else ""
        text = f"{found.waiting} notifications wait, the oldest for {oldest / 60:.0f} minutes{why}"
        self._pulse.blocked = text if oldest > LATE_SECONDS else None

    def _forget(self) -> None:
        if self._maintained_epoch is not None:
            self._maintained_epoch, self._pulse.blocked = None, None
            metrics.NOTIFICATIONS_WAITING.set(0)
            metrics.NOTIFICATIONS_OLDEST.set(0)

    def _defaults(self) -> list[dict[str, object]]:
        settings, on_failure, on_deadline = self._settings, NotificationEvent.FAILURE, NotificationEvent.DEADLINE
        return [
            {"event": event, "sink": sink, "every_time": settings.notify_repeat}
            for event, sinks in ((on_failure, settings.notify_on_failure), (on_deadline, settings.notify_on_deadline))
            for sink in sorted({parse_destination(each).text for each in sinks})
        ]

    @property
    def _sending(self) -> Sending:
        """Created on first use: most installations send nothing, and every scheduler would load TLS and mail libraries."""
        if self._made is None:
            from evertick.notifications.delivery import Sending

            self._made = Sending(self._settings, connect=self._link.get)
        return self._made
