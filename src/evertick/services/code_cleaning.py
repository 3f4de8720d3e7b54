"""Deletes unpacked bundles that no attempt on this machine has used for a week. They are fetched again when needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from evertick.execution.bundle_folders import LOOK_SECONDS, UNUSED_SECONDS, remove_unused
from evertick.services.events import Log
from evertick.services.loop import run_loop
from evertick.services.pulse import Pulse


class Executor(Protocol):
    @property
    def bundles(self) -> set[str]: ...


async def keep_clean(folder: Path, executor: Executor, *, log: Log) -> None:
    """Run until canceled. Bundles that the executor may start attempts of at any moment are kept, whenever they were
    last used."""

    async def tick() -> float:
        gone = await asyncio.to_thread(remove_unused, folder, in_use=executor.bundles, unused_seconds=UNUSED_SECONDS)
        if gone:
            log.info("prune", folders=len(gone))
        return LOOK_SECONDS

    never, pulse = asyncio.Event(), Pulse("code_cleaning", is_essential=False)
    await run_loop(tick, wake=never, stop=never, name="code_cleaning", log=log, pulse=pulse)
