"""The native API, one module per noun."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.native import audit, backfills, dags, fleet, gates, live, runs, schedules, tasks, users


def native_routers() -> list[APIRouter]:
    return [module.router for module in (dags, schedules, runs, tasks, live, backfills, gates, fleet, users, audit)]
