"""The native API, one module per noun."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.native import (
    approvals,
    audit,
    backfills,
    dags,
    events,
    fleet,
    gates,
    live,
    runs,
    schedules,
    tasks,
    users,
    values,
)
from evertick.domain.stored_values import ValueKind


def native_routers() -> list[APIRouter]:
    # What is polled comes first: a request is compared with one route after the other.
    before, after = (runs, tasks, dags, schedules, approvals, events), (live, backfills, gates, fleet, users, audit)
    return [
        *(module.router for module in (*before, *after)),
        *(values.values_router(kind) for kind in ValueKind),
    ]
