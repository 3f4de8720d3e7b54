"""The native API, one module per noun."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.native import (
    approvals,
    assets,
    audit,
    backfills,
    dags,
    events,
    fleet,
    gates,
    live,
    notifications,
    runs,
    schedule_records,
    schedules,
    tasks,
    troubles,
    users,
    values,
    versions,
)
from evertick.domain.stored_values import ValueKind


def native_routers() -> list[APIRouter]:
    # What is polled comes first: a request is compared with one route after the other.
    before, after = (
        (runs, tasks, dags, versions, schedules, schedule_records, approvals, events, assets),
        (live, backfills, notifications, troubles, gates, fleet, users, audit),
    )
    return [
        *(module.router for module in (*before, *after)),
        *(values.values_router(kind) for kind in ValueKind),
    ]
