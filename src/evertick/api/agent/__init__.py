"""The agent API, under /api/agent/v1. Each agent runs one attempt and authenticates with that attempt's token."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.agent import attempts, files, logs

PREFIX = "/api/agent/v1"


def agent_routers() -> list[APIRouter]:
    return [module.router for module in (attempts, logs, files)]
