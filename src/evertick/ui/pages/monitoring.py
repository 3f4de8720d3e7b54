"""Lists of schedules, alerts, notifications, events and dead letters of all DAGs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from evertick.api.context import Who
from evertick.domain.access import Permission
from evertick.operations import notifications, proofs, requests, schedules, waits
from evertick.operations.monitoring import checkins, forecasts
from evertick.operations.notifications import DeliveryState
from evertick.operations.paging import LARGEST, Cursor
from evertick.ui.layout import done, page, page_router, schedule_words

router = page_router()

_SHOWN = 100
Text = Annotated[str, Query(max_length=250)]


@router.get("/schedules", Permission.READ_SCHEDULES)
async def list_schedules(request: Request, caller: Who, cursor: Cursor = None) -> Response:
    found = await schedules.list_all_schedules(caller, limit=_SHOWN, cursor=cursor)
    rows = [(each, schedule_words(each.spec)) for each in found.items]
    return page(request, "schedules.html", here="schedules", rows=rows, next_cursor=found.next_cursor)


@router.get("/alerts", Permission.READ_SCHEDULES)
async def list_alerts(request: Request, caller: Who, ended: bool = False, cursor: Cursor = None) -> Response:
    found = await notifications.list_alerts(caller, with_ended=ended, limit=_SHOWN, cursor=cursor)
    expected = await checkins.list_checkins(caller, limit=_SHOWN)
    rows, following = found.items, found.next_cursor
    late = expected.items
    return page(request, "alerts.html", here="alerts", rows=rows, ended=ended, next_cursor=following, checkins=late)


@router.get("/guarantees", Permission.READ_METRICS)
async def show_guarantees(request: Request, caller: Who, ended: bool = False) -> Response:
    found = await proofs.show_proof(caller, with_ended=ended, limit=_SHOWN)
    return page(request, "guarantees.html", here="guarantees", proof=found, ended=ended)


@router.get("/forecast", Permission.READ_RUNS)
async def show_forecast(
    request: Request,
    caller: Who,
    change: Annotated[str, Query(max_length=2000)] = "",
    hours: Annotated[int, Query(ge=1, le=forecasts.MOST_HOURS)] = 24,
) -> Response:
    changes = [each.strip() for each in change.split(",") if each.strip()]
    found = await forecasts.show_forecast(caller, hours=hours, change=changes, limit=_SHOWN)
    return page(request, "forecast.html", here="forecast", found=found, change=change, hours=hours)


@router.get("/notifications", Permission.READ_NOTIFICATIONS)
async def list_notifications(request: Request, caller: Who, state: Text = "", cursor: Cursor = None) -> Response:
    wanted = DeliveryState(state) if state in set(DeliveryState) else None
    found = await notifications.list_notifications(caller, state=wanted, limit=_SHOWN, cursor=cursor)
    return page(
        request,
        "notifications.html",
        here="notifications",
        rows=found.items,
        state=state,
        states=list(DeliveryState),
        next_cursor=found.next_cursor,
    )


@router.post("/notifications/{number}/retry", Permission.RESEND_NOTIFICATIONS)
async def retry_notification(number: Annotated[int, Path(ge=1, le=LARGEST)], caller: Who) -> Response:
    await notifications.retry_notification(caller, notification_id=number)
    return done(f"Notification {number} is sent again.")


@router.get("/events", Permission.READ_EVENTS)
async def list_events(request: Request, caller: Who, name: Text = "", cursor: Cursor = None) -> Response:
    found = await waits.list_sent_events(caller, name=name or None, limit=_SHOWN, cursor=cursor)
    return page(request, "events.html", here="events", rows=found.items, name=name, next_cursor=found.next_cursor)


@router.get("/dead-letters", Permission.READ_EVENTS)
async def list_dead_letters(request: Request, caller: Who, replayed: bool = False, cursor: Cursor = None) -> Response:
    found = await requests.list_dead_letters(caller, with_replayed=replayed, limit=_SHOWN, cursor=cursor)
    return page(
        request,
        "dead_letters.html",
        here="dead-letters",
        rows=found.items,
        replayed=replayed,
        next_cursor=found.next_cursor,
    )


@router.post("/dead-letters/{number}/replay", Permission.REPLAY)
async def replay_dead_letter(number: Annotated[int, Path(ge=1, le=LARGEST)], caller: Who) -> Response:
    await requests.replay_dead_letter(caller, letter_id=number)
    return done(f"Dead letter {number} is in the inbox again.")
