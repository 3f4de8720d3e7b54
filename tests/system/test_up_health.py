"""The health of a whole `evertick up`: what its children say, their deaths, one that hangs, and a crash loop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import run_program
from tests.system.served import SERVICES, environment, served
from tests.waiting import eventually


async def test_the_health_of_up_is_that_of_its_children_and_shows_their_deaths(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(database, tmp_path)
    async with served("up", env, tmp_path) as up:

        async def is_well() -> Any:
            """On a busy machine a child may be late with an answer, and is not well for that moment."""
            found = await up.health()
            return all(found[name]["status"] == "healthy" for name in (*SERVICES, "metadatabase")) and found

        document = await eventually(is_well, 60)
        await eventually(up.is_ready, 60)
        assert await up.metric("evertick_runner_slots", process="runner") > 0
        assert await up.metric("process_open_fds", process="scheduler") > 0

        os.kill(document["runner"]["pid"], signal.SIGKILL)

        async def has_restarted() -> Any:
            runner = (await up.health())["runner"]
            return runner["restarts"] == 1 and runner

        runner = await eventually(has_restarted, 60)
        assert (runner["last_exit"], runner["is_crash_looping"]) == ("killed by SIGKILL", False)
        await eventually(up.is_ready, 60)
        assert await up.metric("evertick_service_restarts_total", process="up", service="runner") == 1
        for name, value in env.items():
            monkeypatch.setenv(name, value)

        async def is_shown() -> bool:
            shown = await run_program("health")
            return (shown.status, "killed by SIGKILL" in shown.out) == (0, True)

        await eventually(is_shown, 60)

        # A frozen child answers nobody, and does not keep the whole from answering.
        frozen = document["publisher"]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        try:

            async def is_seen() -> bool:
                return "publisher: does not answer within 1 s" in await up.reasons()

            await eventually(is_seen, 60)
            assert (await up.get("/metrics")).status == 200
        finally:
            os.kill(frozen, signal.SIGCONT)
        await eventually(up.is_ready, 60)


async def test_a_crash_loop_is_shown(database: str, tmp_path: Path) -> None:
    env = environment(database, tmp_path, EVERTICK_FAILPOINT="try_acquire_shard:before")
    async with served("up", env, tmp_path) as up:

        async def is_seen() -> Any:
            scheduler = (await up.health())["scheduler"]
            return scheduler["is_crash_looping"] and scheduler

        # Three starts of an interpreter, which take seconds each where the machine is busy.
        scheduler = await eventually(is_seen, 150)
        assert scheduler["status"] == "unhealthy"
        assert scheduler["reasons"][0].startswith("crash loop: died ")
        assert any(reason.startswith("scheduler: crash loop") for reason in await up.reasons())
