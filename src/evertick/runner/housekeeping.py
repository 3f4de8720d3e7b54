"""Deletes files that are no longer needed: unpacked bundles, and large results whose runs are gone.

Bundles are fetched again when they are needed. The retention of results is decided in the database only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from evertick.bundles import cache
from evertick.bundles.environments import Environments
from evertick.config import Settings
from evertick.db.queries import runs
from evertick.domain.errors import StorageUnavailable
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop
from evertick.storage.object_store import ObjectStore, open_store
from evertick.storage.results import FOLDER

RESULT_CHECK_SECONDS = 3600.0
RUNS_PER_QUERY = 1000


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


async def clean_results(settings: Settings, *, link: ReconnectingConnection, log: Log, is_own: bool = False) -> None:
    """Delete the results of runs that are gone, until canceled. Runs in every process that keeps such files. `is_own`:
    this is the link's only user, and closes it between uses."""
    store = open_store(settings)

    async def tick() -> float:
        try:
            return await clean()
        finally:
            if is_own:
                await link.close()

    async def clean() -> float:
        count = await remove_orphaned_files(settings, link)
        if store is not None:
            try:
                count += await remove_orphaned_objects(store, link)
            except StorageUnavailable as error:
                log.warning("storage_unavailable", doing="prune", error=error)
        if count:
            log.info("results_pruned", results_of_runs=count)
        return RESULT_CHECK_SECONDS

    await run_loop(tick, name="result_cleaning", log=log, is_essential=False)


async def remove_orphaned_files(settings: Settings, link: ReconnectingConnection) -> int:
    """Remove the files of runs that no longer exist. An attempt writes only while its run exists."""
    folder = settings.result_place
    return await _remove_orphaned(await asyncio.to_thread(stored_runs, folder), link, partial(remove_runs, folder))


async def remove_orphaned_objects(store: ObjectStore, link: ReconnectingConnection) -> int:
    """The same in object storage, which every runner of this database shares."""

    def remove(run_ids: list[int]) -> None:
        for run_id in run_ids:
            store.remove_all(f"{FOLDER}/{run_id}/")

    return await _remove_orphaned(await asyncio.to_thread(lambda: _run_ids(store.folders(f"{FOLDER}/"))), link, remove)


async def _remove_orphaned(stored: list[int], link: ReconnectingConnection, remove: Callable[[list[int]], None]) -> int:
    count = 0
    for first in range(0, len(stored), RUNS_PER_QUERY):
        batch = stored[first : first + RUNS_PER_QUERY]
        existing = await runs.existing(await link.get(), batch)
        gone = [run_id for run_id in batch if run_id not in existing]
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
