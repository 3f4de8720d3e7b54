"""Airflow's REST API, version 2, as its official client calls it. The only place with Airflow's words."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.airflow import backfills, dags, instances, monitor, outputs, pools, runs


def airflow_routers() -> list[APIRouter]:
    # Outputs before instances: what follows a task's name there could be taken for a map index.
    return [module.router for module in (dags, runs, outputs, instances, pools, backfills, monitor)]
