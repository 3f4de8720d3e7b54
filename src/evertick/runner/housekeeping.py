"""Deletes files that are no longer needed: unpacked bundles, and large results whose runs are gone.

Bundles are fetched again when they are needed. The retention of results is decided in the database only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

from evertick.bundles import cache
from evertick.bundles.environments import Environments
from evertick.config import Settings
from evertick.domain.errors import StorageUnavailable
from evertick.observability.logging import Log
from evertick.runtime.loop import run_loop
from evertick.storage.object_store import ObjectStore, open_store
from evertick.storage.results import FOLDER

RESULT_CHECK_SECONDS = 3600.0
RUNS_PER_QUERY = 1000
# Those of these runs that exist.
ExistingRuns = Callable[[list[int]], Awaitable[set[int]]]


async def clean_bundles(folder: Path, in_use: Callable[[], set[str]], *, log: Log) -> None:
    """Delete bundles that were not used for a week, until canceled. Those `in_use` are kept, whenever they were last
    used."""

    async def tick() -> float:
        gone = await asyncio.to_thread(
            cache.remove_unused, folder, in_use=in_use(), unused_seconds=cache.UNUSED_SECONDS
        )
        if gone:
            log.info("bundles_pruned", folders=len(gone))
        return cache.LOOK_SECONDS

    await run_loop(tick, name="code_cleaning", log=log, is_essential=False)


async def clean_environments(environments: Environments, in_use: Callable[[], set[str]], *, log: Log) -> None:
    """Delete the least recently used environments above the disk limit, until canceled. Those `in_use` are kept."""

    async def tick() -> float:
        if gone := await asyncio.to_thread(environments.prune, in_use()):
            log.info("environments_pruned", environments=len(gone))
        return cache.LOOK_SECONDS

    await run_loop(tick, name="environment_cleaning", log=log, is_essential=False)


async def clean_results(settings: Settings, *, existing: ExistingRuns, log: Log) -> None:
    """Delete the results of runs that are gone, until canceled. Runs in every process that keeps such files."""
    store = open_store(settings)

    async def clean() -> float:
        count = await remove_orphaned_files(settings, existing)
        if store is not None:
            try:
                count += await remove_orphaned_objects(store, existing)
            except StorageUnavailable as error:
                log.warning("storage_unavailable", doing="prune", error=error)
        if count:
            log.info("results_pruned", results_of_runs=count)
        return RESULT_CHECK_SECONDS

    await run_loop(clean, name="result_cleaning", log=log, is_essential=False)


async def remove_orphaned_files(settings: Settings, existing: ExistingRuns) -> int:
    """Remove the files of runs that no longer exist. An attempt writes only while its run exists."""
    folder = settings.result_place
    return await _remove_orphaned(await asyncio.to_thread(stored_runs, folder), existing, partial(remove_runs, folder))


async def remove_orphaned_objects(store: ObjectStore, existing: ExistingRuns) -> int:
    """The same in object storage, which every runner of this database shares."""

    def remove(run_ids: list[int]) -> None:
        for run_id in run_ids:
            store.remove_all(f"{FOLDER}/{run_id}/")

    return await _remove_orphaned(
        await asyncio.to_thread(lambda: _run_ids(store.folders(f"{FOLDER}/"))), existing, remove
    )


async def _remove_orphaned(stored: list[int], existing: ExistingRuns, remove: Callable[[list[int]], None]) -> int:
    count = 0
    for first in range(0, len(stored), RUNS_PER_QUERY):
        batch = stored[first : first + RUNS_PER_QUERY]
        kept = await existing(batch)
        gone = [run_id for run_id in batch if run_id not in kept]
        await asyncio.to_thread(remove, gone)
        count += len(gone)
    return count


def stored_runs(folder: Path) -> list[int]:
    """The runs that have files here."""
    try:
        return _run_ids(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _run_ids(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def remove_runs(folder: Path, run_ids: list[int]) -> None:
    """Delete their files. Another runner may do so at the same time."""
    for run_id in run_ids:
        shutil.rmtree(folder / str(run_id), ignore_errors=True)
