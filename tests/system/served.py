"""Services as users start them, and their health ports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from evertick.observability.health_endpoint import Got, get
from evertick.processes.tree import kill_tree

SERVICES = ("scheduler", "runner", "publisher")


class Served:
    """One process of ours and its port."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url

    async def get(self, path: str) -> Got:
        return await get(f"{self.url}{path}", seconds=30)

    async def health(self) -> dict[str, Any]:
        return (await self.get("/monitor/health")).document()

    async def reasons(self) -> list[str]:
        """Why it is not ready; the status of the answer says the same."""
        got = await self.get("/readyz")
        document: dict[str, Any] = got.document()
        assert (got.status == 200) is document["ready"] is (document["reasons"] == [])
        reasons: list[str] = document["reasons"]
        return reasons

    async def is_ready(self) -> bool:
        return await self.reasons() == []

    async def has_database(self) -> bool:
        """Whether every connection of it is back; it may be ready before the last one is."""
        return (await self.health())["metadatabase"]["status"] == "healthy"

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.get("/metrics")).body.decode()
        for line in text.splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if (
                found
                and found[1] == name
                and labels.items() <= dict(re.findall(r'(\w+)="(.*?)"', found[2] or "")).items()
            ):
                return float(found[3])
        return 0.0


def environment(url: str, folder: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERTICK_")}
    ours = {
        "EVERTICK_DATABASE_URL": url,
        "EVERTICK_HOME": str(folder / "home"),
        "EVERTICK_DAGS_FOLDER": str(folder / "dags"),
        "EVERTICK_HEALTH_PORT": "0",
        "EVERTICK_HEARTBEAT_SECONDS": "0.3",
        "EVERTICK_LOG": "json",
    }
    return {**kept, **ours, **changes}


@asynccontextmanager
async def served(command: str, env: dict[str, str], folder: Path) -> AsyncIterator[Served]:
    (folder / "dags").mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evertick.cli.main", command, env=env, cwd=folder, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(90):
            while line := await process.stdout.readline():
                event = json.loads(line)
                if event["event"] == "health_listening" and event["service"] in (command, "evertick"):
                    break
            else:
                _, errors = await process.communicate()
                raise AssertionError(errors.decode())
        # Read on: a pipe that nobody reads drops lines.
        reading = asyncio.create_task(process.stdout.read())
        yield Served(process, event["url"])
    finally:
        if process.returncode is None:
            kill_tree(process.pid)
        await process.wait()
        await asyncio.gather(reading, return_exceptions=True)
