"""Services as processes: they start, say so, stop when asked, and ask to be restarted when they ended by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from evertick.db.queries import dags, runners, shards
from evertick.domain.access import Actor
from evertick.engine.runners import drain, mark_runner_dead
from tests.waiting import eventually

QUICK = {"EVERTICK_HEARTBEAT_SECONDS": "0.1", "EVERTICK_LOG": "json"}


@asynccontextmanager
async def service(database: str, folder: Path, *arguments: str, **environment: str) -> AsyncIterator[Process]:
    env = {
        **os.environ,
        **QUICK,
        "EVERTICK_DATABASE_URL": database,
        "EVERTICK_HOME": str(folder / "home"),
        **environment,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evertick.cli.main", *arguments, env=env, cwd=folder, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def event(process: Process, name: str) -> dict[str, Any]:
    """The next event of that name. The service speaks JSON, a line at a time."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while line := await process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            if found["event"] == name:
                return found
    raise AssertionError(f"no event {name}")


async def ended(process: Process, number: signal.Signals) -> int:
    process.send_signal(number)
    async with asyncio.timeout(60):
        return await process.wait()


async def test_a_scheduler_leads_under_its_host_and_pid_and_hands_over_when_asked_to_stop(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    async with service(database, tmp_path, "scheduler") as process:
        assert (await event(process, "leadership_acquired"))["service"] == "scheduler"
        leader = await shards.leader(conn, shard=0)
        assert leader is not None
        assert leader.owner == f"{socket.gethostname()}-{process.pid}"
        assert await ended(process, signal.SIGTERM) == 0
    leader = await shards.leader(conn, shard=0)
    assert leader is not None
    assert not leader.is_live


async def test_a_runner_serves_what_it_was_told_and_says_goodbye(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    async with service(
        database, tmp_path, "runner", "--queues", "gpu, default", "--slots", "3", "--id", "big"
    ) as process:
        await event(process, "runner_started")
        (runner,) = await runners.live(conn)
        assert (runner.runner_id, runner.queues, runner.slots) == ("big", ["gpu", "default"], 3)
        assert await ended(process, signal.SIGINT) == 0
    assert await runners.live(conn) == []


async def test_a_runner_declared_dead_continues_under_a_new_session(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    async with service(database, tmp_path, "runner") as process:
        old = (await event(process, "runner_started"))["session"]
        await mark_runner_dead(conn, session=int(old, 16), reason="agent_lost: test", infra_retries=3)
        assert (await event(process, "session_declared_dead"))["session"] == old
        assert (await event(process, "runner_started"))["session"] != old
        assert await ended(process, signal.SIGTERM) == 0


async def test_a_dismissed_runner_ends_with_a_status_that_asks_for_no_restart(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    async with service(database, tmp_path, "runner") as process:
        session = (await event(process, "runner_started"))["session"]
        await drain(conn, sessions=[int(session, 16)], actor=Actor("test"), then_leave=True)
        await event(process, "runner_exited")
        assert await process.wait() == 0


async def test_a_publisher_publishes_the_folder_it_was_told(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "one.py").write_text(
        "from evertick import dag, shell\n\n@dag\ndef one():\n    shell('a', 'true')\n"
    )
    async with service(database, tmp_path, "publisher", "--dags", "here") as process:
        assert (await event(process, "dag_published"))["dag"] == "one"
        assert await eventually(lambda: dags.names(conn)) == ["one"]
        assert await ended(process, signal.SIGTERM) == 0


async def test_a_service_waits_for_a_database_that_is_not_up_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    async with service("postgresql://127.0.0.1:1/shop", tmp_path, "scheduler") as process:
        assert "127.0.0.1:1" in (await event(process, "database_unreachable"))["error"]
        assert await ended(process, signal.SIGTERM) == 0


async def test_a_service_refuses_a_database_without_schema(empty_database: str, tmp_path: Path) -> None:
    async with service(empty_database, tmp_path, "runner", EVERTICK_LOG="text") as process:
        _, errors = await process.communicate()
        assert process.returncode == 4
        assert b"Run `evertick db migrate`" in errors


async def test_impossible_options_are_refused(database: str, tmp_path: Path) -> None:
    async with service(database, tmp_path, "runner", "--slots", "0") as process:
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert b"EVERTICK_RUNNER_SLOTS=0 is too small" in errors
