"""The API of agents, under /api/agent/v1: one attempt each, with a door of its own."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.agent import attempts, files, logs

PREFIX = "/api/agent/v1"


def agent_routers() -> list[APIRouter]:
    return [module.router for module in (attempts, logs, files)]
