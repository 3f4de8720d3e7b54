"""Large results of agents with an object storage: any of several APIs takes and gives them, and an outage is not their end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.config import Settings
from evertick.ui.app import make_app
from tests.api.agents import AGENT, dispatch_all, dispatch_more
from tests.api.conftest import Client
from tests.api.test_agent import finish, large
from tests.engine.world import value
from tests.s3_server import S3Server, s3_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path, server: S3Server) -> Settings:
    return Settings(
        api_rate_limit=0, agent_key=("k" * 43,), home=tmp_path / "one", result_spill_bytes=2048, **server.settings
    )


async def test_a_storage_that_hangs_stops_nothing_else_that_is_done_in_threads(
    app: FastAPI, context: ApiContext, conn: AsyncConnection
) -> None:
    (one,) = await dispatch_all(app, context, conn)
    await one.begin()
    raw, digest, _ = large("x")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.setblocking(False)
        context.settings = replace(context.settings, storage_endpoint=f"http://127.0.0.1:{mute.getsockname()[1]}")
        putting = asyncio.create_task(one.agent.put(f"{AGENT}/results/{digest}", content=raw))
        line, _ = await asyncio.get_running_loop().sock_accept(mute)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "done") == "done"
        line.close()
        assert (await putting).status_code == 502


async def test_a_result_that_one_api_took_is_known_and_read_at_another(
    app: FastAPI, context: ApiContext, conn: AsyncConnection, database: str, server: S3Server, tmp_path: Path
) -> None:
    (up,) = await dispatch_all(app, context, conn, {"up": [], "down": ["up"]}, per_task={"down": {"inputs": ("up",)}})
    raw, digest, reference = large("x")
    await up.begin()
    server.stop()
    assert (
        "cannot be reached" in (await up.agent.refused("PUT", f"{AGENT}/results/{digest}", 502, content=raw))["detail"]
    )
    server.start()
    assert (await up.agent.put(f"{AGENT}/results/{digest}", content=raw)).status_code == 204
    other_desk = ApiContext(replace(context.settings, home=tmp_path / "two"), database, structlog.get_logger())
    other = make_app(other_desk)
    try:
        elsewhere = Client(other, up.agent.token)
        assert "PUT it" in (await finish(elsewhere, 400, result_json=large("y")[2]))["detail"]  # type: ignore[index]
        await finish(elsewhere, result_json=reference)
        session = int(str(await value(conn, "select owner from dispatch limit 1")))
        (down,) = await dispatch_more(other, other_desk, conn, session)
        await down.begin()
        assert (await down.agent.get(f"{AGENT}/results/{digest}")).content == raw
        left = [path for home in ("one", "two") for path in (tmp_path / home).rglob("*") if path.is_file()]
        assert left == [], "what passes through an API stays at none"
    finally:
        for pool in (other_desk.readers, other_desk.writers, other_desk.agents):
            for _, link in pool._idle:
                await link.close()
