"""Requests for runs: the inbox, dead letters, and when delayed runs begin."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection

from evertick.db.statements import query
from evertick.domain.schedules.events import EventWindow, SentEvent


@dataclass(frozen=True, slots=True)
class InboxRow:
    inbox_id: int
    dag: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that could not become a run, with the reason. `replayed_at`: when it was put back into the inbox."""

    letter_id: int
    dag: str
    params: dict[str, Any]
    key: str | None
    run_at: datetime | None
    unique_for_seconds: float | None
    sent_at: datetime
    sent_by: str
    reason: str
    failed_at: datetime
    replayed_at: datetime | None
    replayed_by: str | None


@query
async def inbox(conn: AsyncConnection, *, limit: int) -> list[InboxRow]: ...


@query
async def dead_letters(conn: AsyncConnection, *, before: int, is_all: bool, limit: int) -> list[DeadLetter]:
    """The newest first; `is_all`: also replayed ones."""


@query
async def find_letter(conn: AsyncConnection, *, letter_id: int) -> DeadLetter | None: ...


@query
async def start_of_run(conn: AsyncConnection, *, run_id: int) -> datetime | None:
    """When a delayed run begins; None for any other."""


@dataclass(frozen=True, slots=True)
class PendingEvent:
    event_id: int
    name: str
    key: str | None
    payload: Any
    sent_at: datetime
    read_at: datetime

    @property
    def event(self) -> SentEvent:
        return SentEvent(
            event_id=self.event_id, name=self.name, key=self.key, payload=self.payload, sent_at=self.sent_at
        )


@dataclass(frozen=True, slots=True)
class EventSchedule:
    """A schedule that runs for events. `is_held`: paused by a person, so that its events start nothing."""

    schedule_id: int
    name: str
    dag: str
    dag_id: int
    params: dict[str, Any]
    event: str
    is_held: bool


@dataclass(frozen=True, slots=True)
class WindowRow:
    """Events that are not a run yet. `is_run_open`: those of an ordered key wait for the run before."""

    schedule_id: int
    group_key: str
    event_ids: list[int]
    first_at: datetime | None
    last_at: datetime | None
    run_id: int | None
    is_run_open: bool
    read_at: datetime

    @property
    def window(self) -> EventWindow:
        return EventWindow(event_ids=tuple(self.event_ids), first_at=self.first_at, last_at=self.last_at)


@query
async def arrivals(conn: AsyncConnection, *, limit: int) -> list[PendingEvent]:
    """Events that are not decided yet, the oldest first."""


@query
async def sent_events(conn: AsyncConnection, *, event_ids: list[int]) -> list[PendingEvent]: ...


@query
async def event_schedules(conn: AsyncConnection) -> list[EventSchedule]: ...


@query
async def due_windows(conn: AsyncConnection, *, limit: int) -> list[WindowRow]: ...


@query
async def windows(conn: AsyncConnection, *, schedule_ids: list[int], group_keys: list[str]) -> list[WindowRow]: ...


@dataclass(frozen=True, slots=True)
class WebhookRow:
    name: str
    kind: str
    secret: str
    event: str
    tolerance_seconds: float
    headers: dict[str, Any] | None
    changed_by: str
    changed_at: datetime


@query
async def webhooks(conn: AsyncConnection) -> list[WebhookRow]: ...


@query
async def find_webhook(conn: AsyncConnection, *, name: str) -> WebhookRow | None: ...
