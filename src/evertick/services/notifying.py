"""Sends what is in the outbox: by the leader, on a connection of its own, beside everything else.

A sink that hangs or is down rests alone, longer each time; the others, runs and ticks do not notice. Each delivery is
taken for a while by one leader. Where that one dies before it could say that it sent, the next sends again, under the same id.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg

from evertick.config import Settings
from evertick.domain.errors import DeliveryFailed, NotLeader, PostgresUnavailable
from evertick.domain.notices import Event, rest_seconds
from evertick.engine.notify import Default, give_up_old, put_defaults, take_due
from evertick.services import metrics
from evertick.services.contained import boot_seconds
from evertick.services.events import Log
from evertick.services.lead import SHARD, Lead
from evertick.services.led_link import LedLink
from evertick.services.link import Waker
from evertick.services.loop import UNREACHABLE, run_loop
from evertick.services.pulse import Pulse
from evertick.store import outbox
from evertick.store.outbox import Room, Taken
from evertick.store.wake import Channel

if TYPE_CHECKING:
    from evertick.services.sending import Sending

# Of one sink at once, and of all.
EACH, BATCH = 4, 64
# Longer than any sending takes, so that nobody sends what is on its way; and how long a dead leader's are held up.
TAKEN_SECONDS = 30.0
RECORD_AGAIN_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0)
COUNT_SECONDS = 15.0
MOST_COUNTED = 100_000
GIVE_UP_BATCH = 1000
# People hear of it where health is asked for.
LATE_SECONDS = 300.0


class Resting:
    """Sinks that did not work lately, and until when they are left alone."""

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


class Notifying:
    def __init__(self, settings: Settings, *, url: str, lead: Lead, waker: Waker, log: Log) -> None:
        self._settings, self._lead, self._waker, self._log = settings, lead, waker, log
        self._link = LedLink(url, lead, settings, lock_share=0.5)
        self._resting = Resting()
        self._busy: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._pulse = Pulse("notify", is_essential=False)
        self._defaults_of: int | None = None
        self._count_at = 0.0
        self._made: Sending | None = None
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until canceled; what is being sent then is broken off, and sent again by whoever leads next."""
        never = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            self._group = group
            await run_loop(self.tick, wake=self._wake, stop=never, name="notify", log=self._log, pulse=self._pulse)

    async def tick(self) -> float:
        epoch = self._lead.current_epoch()
        if epoch is None:
            self._forget()
            return self._settings.tick_seconds
        try:
            return await self._send_due(epoch)
        except NotLeader as error:
            self._log.warning("refused", error=error)
            return self._settings.tick_seconds

    async def close(self) -> None:
        if self._made is not None:
            self._made.close()
        await self._link.close()

    async def _send_due(self, epoch: int) -> float:
        conn = await self._link.get()
        if self._defaults_of != epoch:
            every_time = self._settings.notify_every_time
            await put_defaults(conn, shard=SHARD, epoch=epoch, defaults=self._defaults(), every_time=every_time)
            self._defaults_of = epoch
        if boot_seconds() >= self._count_at:
            self._count_at = boot_seconds() + COUNT_SECONDS
            await self._count(epoch)
        room = Room(passed_over=self._resting.now() | self._busy.keys(), each=EACH, batch=BATCH, seconds=TAKEN_SECONDS)
        taken = await take_due(conn, shard=SHARD, epoch=epoch, room=room)
        assert self._group is not None
        for each in taken:
            self._busy[each.sink] = self._busy.get(each.sink, 0) + 1
            self._group.create_task(self._deliver(each))
        return self._settings.tick_seconds

    async def _deliver(self, taken: Taken) -> None:
        """One attempt at one delivery, to its end."""
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
            # Of ours, not of the sink: it is taken again when its time is over.
            self._log.warning("not_sent", delivery=taken.delivery_id, error=error)
        except Exception as error:
            await self._fail(taken, DeliveryFailed(f"{type(error).__name__} while it was prepared", is_final=True))
        finally:
            self._busy[sink] -= 1
            if self._busy[sink] == 0:
                del self._busy[sink]
                # More of the same may wait.
                self._wake.set()

    async def _fail(self, taken: Taken, error: DeliveryFailed) -> None:
        is_over = error.is_final or taken.attempts >= self._settings.notify_attempts
        rest = rest_seconds(taken.attempts, error.retry_after_seconds)
        await self._record(taken, "failed" if is_over else "waiting", str(error), 0.0 if is_over else rest)

    async def _record(self, taken: Taken, state: str, answer: str, rest: float) -> None:
        """As soon as the database can be asked. If it cannot for long, the delivery is taken again when its time is over."""
        for pause in (*RECORD_AGAIN_SECONDS, None):
            try:
                conn = await self._link.get()
                await outbox.record(conn, taken, state=state, answer=answer, rest_seconds=rest)
                break
            except (psycopg.Error, PostgresUnavailable, NotLeader, OSError) as error:
                if pause is None:
                    self._log.error("not_recorded", delivery=taken.delivery_id, state=state, error=error)
                    return
                await asyncio.sleep(pause)
        outcome = {"sent": "sent", "failed": "given_up", "waiting": "failed"}[state]
        metrics.NOTIFICATIONS.labels(outcome=outcome).inc()
        tell = self._log.info if state == "sent" else self._log.warning
        tell("notify", delivery=taken.delivery_id, outcome=outcome, attempt=taken.attempts, answer=answer)
        if state == "sent" and taken.sink.startswith("call:"):
            self._waker.wake(Channel.READY)

    async def _count(self, epoch: int) -> None:
        conn = await self._link.get()
        if hours := self._settings.notify_give_up_hours:
            given_up = await give_up_old(conn, shard=SHARD, epoch=epoch, seconds=hours * 3600, batch=GIVE_UP_BATCH)
            metrics.NOTIFICATIONS.labels(outcome="given_up").inc(given_up)
            if given_up == GIVE_UP_BATCH:
                self._count_at = 0.0
        found = await outbox.backlog(conn, shard=SHARD, most=MOST_COUNTED)
        oldest = found.oldest_seconds or 0.0
        metrics.NOTIFICATIONS_WAITING.set(found.waiting)
        metrics.NOTIFICATIONS_OLDEST.set(oldest)
        is_late = oldest > LATE_SECONDS
        why = f"; not working: {', '.join(self._resting.troubled[:3])}" if self._resting.troubled else ""
        self._pulse.blocked = (
            f"{found.waiting} notifications wait, the oldest for {oldest / 60:.0f} minutes{why}" if is_late else None
        )

    def _forget(self) -> None:
        if self._defaults_of is not None:
            self._defaults_of, self._pulse.blocked = None, None
            metrics.NOTIFICATIONS_WAITING.set(0)
            metrics.NOTIFICATIONS_OLDEST.set(0)

    def _defaults(self) -> list[Default]:
        failure = [(Event.FAILURE, sink) for sink in self._settings.notify_on_failure]
        return [*failure, *((Event.DEADLINE, sink) for sink in self._settings.notify_on_deadline)]

    @property
    def _sending(self) -> Sending:
        """Made when it is first needed: most installations send nothing, and every scheduler would carry TLS and mail."""
        if self._made is None:
            from evertick.services.sending import Sending

            self._made = Sending(self._settings, connect=self._link.get)
        return self._made
