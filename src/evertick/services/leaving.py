"""Ends a runner's attempts when it shuts down. Never leaves one running."""

from __future__ import annotations

import asyncio
from enum import StrEnum

from evertick.execution.local import LocalExecutor


class Ending(StrEnum):
    """Why a session ended."""

    STOPPED = "stopped"
    DISMISSED = "dismissed"
    BURIED = "buried"


async def stop_within(executor: LocalExecutor, grace_seconds: float, hurry: asyncio.Event) -> None:
    """Let attempts finish for the grace period, unless `hurry` is set; return the rest to the queue."""
    async with asyncio.TaskGroup() as group:
        in_peace = group.create_task(executor.stop(grace_seconds))
        hurried = group.create_task(hurry.wait())
        await asyncio.wait((in_peace, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not in_peace.done():
            await executor.stop(0.0)
        await in_peace
        hurried.cancel()
