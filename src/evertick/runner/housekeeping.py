"""Deletes unpacked bundles that no attempt on this machine has used for a week. They are fetched again when needed."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Protocol

from evertick.bundles.cache import LOOK_SECONDS, UNUSED_SECONDS, remove_unused
from evertick.config import Settings
from evertick.db.queries import runs
from evertick.domain.errors import StorageUnavailable
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop
from evertick.storage.object_store import ObjectStore, open_store
from evertick.storage.result_files import ResultFiles
from evertick.storage.results import FOLDER


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

    never, pulse = asyncio.Event(), LoopHealth("code_cleaning", is_essential=False)
    await run_loop(tick, wake=never, stop=never, name="code_cleaning", log=log, pulse=pulse)


CLEAN_SECONDS = 3600.0


RUNS_PER_QUESTION = 1000


def result_files(settings: Settings) -> ResultFiles:
    """The directory for results that are too large for the database."""
    return ResultFiles(
        folder=str(settings.result_place.absolute()),
        spill_bytes=settings.result_spill_bytes,
        max_bytes=settings.result_max_bytes,
    )


async def keep_results(settings: Settings, *, link: ReconnectingConnection, log: Log, is_own: bool = False) -> None:
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
        return CLEAN_SECONDS

    never, pulse = asyncio.Event(), LoopHealth("result_cleaning", is_essential=False)
    await run_loop(tick, wake=never, stop=never, name="result_cleaning", log=log, pulse=pulse)


async def remove_orphans(settings: Settings, link: ReconnectingConnection) -> int:
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


async def remove_stored_orphans(store: ObjectStore, link: ReconnectingConnection) -> int:
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
