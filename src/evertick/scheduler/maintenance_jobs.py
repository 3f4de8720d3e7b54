"""Raises an alert for schedules, runs and tasks that miss their deadline: checked by the leader every few seconds, as
part of maintenance."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader
from evertick.engine.maintenance import raise_alerts
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import CircuitBreaker, boot_seconds
from evertick.scheduler.leadership import Leadership

# Alerts are for people: a delay of a few seconds does not matter.
EVERY_SECONDS = 5.0
# A change of leader takes up to 6 s, and a locked schedule can take a few more.
UNFIRED_SECONDS = 60.0
BATCH = 1000


class Alerting:
    def __init__(self, *, lead: Leadership, log: Log) -> None:
        self._lead, self._log = lead, log
        self._step = CircuitBreaker("alerts", log=log)
        self.begin()

    def begin(self) -> None:
        """Leadership begins: do not check at once, so that schedules that fell due meanwhile can fire first."""
        self._at = boot_seconds() + EVERY_SECONDS

    @property
    def next_at(self) -> float:
        return max(self._at, self._step.rests_until)

    async def attempt(self, conn: AsyncConnection) -> None:
        """Check once, if it is time."""
        if boot_seconds() < self.next_at:
            return
        self._at = boot_seconds() + EVERY_SECONDS
        await self._step.attempt(conn, lambda: self._raise(conn))

    async def _raise(self, conn: AsyncConnection) -> None:
        epoch = self._lead.epoch
        if epoch is None:
            raise NotLeader(f"shard {self._lead.shard} is led by another scheduler")
        changes = await raise_alerts(
            conn, shard=self._lead.shard, epoch=epoch, unfired_seconds=UNFIRED_SECONDS, batch=BATCH
        )
        for each in changes:
            fields = {"dag": each.dag, "schedule": each.schedule, "run": each.run_id}
            if each.task is not None:
                fields["task"] = each.task
            if each.has_ended:
                self._log.info("alert_over", kind=each.kind, **fields)
            else:
                metrics.ALERTS.labels(kind=each.kind).inc()
                self._log.error("alert", kind=each.kind, **fields)
