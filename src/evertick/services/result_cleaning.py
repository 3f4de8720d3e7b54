"""Deletes the files of large results whose runs are gone from the database: retention is decided there only."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from evertick.config import Settings
from evertick.domain.errors import StorageUnavailable
from evertick.execution.result_files import ResultFiles
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.loop import run_loop
from evertick.services.object_store import ObjectStore, open_store
from evertick.services.pulse import Pulse
from evertick.services.storing import FOLDER
from evertick.store import runs

LOOK_SECONDS = 3600.0
RUNS_PER_QUESTION = 1000


def result_files(settings: Settings) -> ResultFiles:
    """The directory for results that are too large for the database."""
    return ResultFiles(
        folder=str(settings.result_place.absolute()),
        spill_bytes=settings.result_spill_bytes,
        max_bytes=settings.result_max_bytes,
    )


async def keep_results(settings: Settings, *, link: Link, log: Log, is_own: bool = False) -> None:
    """Run until canceled, in every process that keeps such files. `is_own`: this is the link's only user, and closes it
    between uses."""
    store = open_store(settings)

    async def tick() -> float:
        try:
            return await clean()
        finally:
            if is_own:
                await link.close()

    async def clean() -> float:
        count = await remove_orphans(settings, link)
        if store is not None:
            try:
                count += await remove_stored_orphans(store, link)
            except StorageUnavailable as error:
                log.warning("storage_unavailable", doing="prune", error=error)
        if count:
            log.info("prune", results_of_runs=count)
        return LOOK_SECONDS

    never, pulse = asyncio.Event(), Pulse("result_cleaning", is_essential=False)
    await run_loop(tick, wake=never, stop=never, name="result_cleaning", log=log, pulse=pulse)


async def remove_orphans(settings: Settings, link: Link) -> int:
    """Remove the files of runs that no longer exist. An attempt writes only while its run exists."""
    folder, count = settings.result_place, 0
    stored = await asyncio.to_thread(stored_runs, folder)
    for first in range(0, len(stored), RUNS_PER_QUESTION):
        batch = stored[first : first + RUNS_PER_QUESTION]
        living = await runs.existing(await link.get(), batch)
        gone = [run_id for run_id in batch if run_id not in living]
        await asyncio.to_thread(remove_runs, folder, gone)
        count += len(gone)
    return count


async def remove_stored_orphans(store: ObjectStore, link: Link) -> int:
    """The same in the storage, which every runner of this database shares."""
    names = await asyncio.to_thread(lambda: list(store.folders(f"{FOLDER}/")))
    stored, count = sorted(int(name) for name in names if name.isascii() and name.isdigit()), 0
    for first in range(0, len(stored), RUNS_PER_QUESTION):
        batch = stored[first : first + RUNS_PER_QUESTION]
        living = await runs.existing(await link.get(), batch)
        for run_id in batch:
            if run_id not in living:
                await asyncio.to_thread(store.remove_all, f"{FOLDER}/{run_id}/")
                count += 1
    return count


def stored_runs(folder: Path) -> list[int]:
    """The runs that have files here."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def remove_runs(folder: Path, run_ids: list[int]) -> None:
    """Delete their files. Another runner may do so at the same time."""
    for run_id in run_ids:
        shutil.rmtree(folder / str(run_id), ignore_errors=True)
