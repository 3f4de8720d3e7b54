"""Attempts that were dispatched, and their agents as callers of the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.db.queries.runners import QueuedRow
from evertick.domain.attempt import TaskKey
from evertick.engine.remote_attempts import claim_for_dispatch
from tests.api.conftest import Client
from tests.engine.world import Runner, make_dag, put, start

AGENT = "/api/agent/v1"
PLACE = {"host": "pod", "boot_id": "b", "pid_namespace": "n", "uid": 0, "pid": 1, "pid_started": 1.0}
NONCE = "a" * 32


@dataclass(slots=True)
class Dispatched:
    """One attempt, and callers with its tokens."""

    app: FastAPI
    context: ApiContext
    row: QueuedRow

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.row.run_id, self.row.idx, self.row.map_index)

    @property
    def starter(self) -> Client:
        return Client(self.app, self.context.agent_tokens.make_start_token(**self._whose))

    @property
    def agent(self) -> Client:
        return Client(self.app, self.context.agent_tokens.make_attempt_token(**self._whose))

    async def begin(self, nonce: str = NONCE, status: int = 200) -> Any:
        body = {"nonce": nonce, "version": "1", "place": PLACE}
        return await self.starter.ok("POST", f"{AGENT}/start", json=body, status=status)

    @property
    def _whose(self) -> Any:
        return {"key": self.key, "epoch": self.row.epoch, "session": self.row.session}


async def dispatch_all(
    app: FastAPI,
    context: ApiContext,
    conn: AsyncConnection,
    shape: dict[str, list[str]] | None = None,
    **options: object,
) -> list[Dispatched]:
    """A run of such a DAG, all of whose first tasks were dispatched."""
    await put(conn, make_dag("d", shape or {"t": []}, **options))
    runner = await Runner.join(conn, executor="far", slots=100)
    await start(conn, "d")
    return await dispatch_more(app, context, conn, runner.session)


async def dispatch_more(app: FastAPI, context: ApiContext, conn: AsyncConnection, session: int) -> list[Dispatched]:
    rows = await claim_for_dispatch(conn, session=session, queues=["default"], free=100)
    return [Dispatched(app, context, row) for row in rows]
