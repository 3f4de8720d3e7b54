"""Commands without a server call operations in their own process."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest
from psycopg import AsyncConnection

from evertick.client.connect import open_client
from evertick.client.local import user_name
from evertick.operations.runs import CancelRequest, cancel_run, show_run
from tests.engine.world import make_dag, put, start, value

HEAVY = {"fastapi", "starlette", "pydantic", "httpx2", "uvicorn"}


@pytest.fixture
def settings(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", database)


async def test_a_local_command_loads_no_http() -> None:
    program = "import sys, evertick.cli.commands.runs, evertick.client.local; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE)
    loaded = (await process.communicate())[0].decode().split()
    assert "evertick.operations.runs" in loaded
    assert not HEAVY & {name.split(".")[0] for name in loaded}


async def test_a_change_carries_the_user_and_the_host(settings: None, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}))
    run = await start(conn, "etl")

    def cancel() -> str:
        with open_client() as client:
            client.call(cancel_run, run_id=run, body=CancelRequest(reason="enough"))
            return client.call(show_run, run_id=run).state

    assert await asyncio.to_thread(cancel) == "canceled"
    actor, origin = await value(conn, "select array[actor, origin] from audit_log where action = 'cancel'")
    assert actor == f"cli:{user_name()}" and origin
