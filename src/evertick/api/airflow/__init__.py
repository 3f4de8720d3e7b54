"""Airflow's REST API, version 2, compatible with its official client. Airflow's API terms are used only in this package."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.airflow import (
    asset_events,
    assets,
    backfills,
    connections,
    dag_records,
    dags,
    event_logs,
    instance_changes,
    instances,
    monitor,
    nothing,
    outputs,
    pools,
    questions,
    run_changes,
    runs,
    variables,
)

# Outputs before instances: a path segment after the task's name could be parsed as a map index.
_PARTS = (
    dags,
    dag_records,
    runs,
    run_changes,
    outputs,
    nothing,
    questions,
    instances,
    instance_changes,
    asset_events,
    assets,
    event_logs,
    pools,
    backfills,
    variables,
    connections,
    monitor,
)


def airflow_routers() -> list[APIRouter]:
    return [module.router for module in _PARTS]
