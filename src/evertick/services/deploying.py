"""Publishes a folder of DAGs once, from any path: for a pipeline that has no folder to watch.

All files are loaded first, and nothing is published if one of them is broken. Deploying the same code again changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.errors import Conflict, InvalidDag, UserError
from evertick.engine.declared import not_stored
from evertick.engine.pause import delete
from evertick.engine.publish import publish
from evertick.execution.bundle import pack
from evertick.execution.loader import LoadedFile, find_duplicates, load_file
from evertick.services.publisher import DEPLOYED, LOADS_AT_ONCE, find_dag_files
from evertick.services.rules import load_routing
from evertick.store import dags


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """One DAG of the deployment. `bundle` is the hash of its code."""

    dag: str
    file: str
    bundle: str
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    published: tuple[Deployed, ...]
    # DAGs of an earlier deployment with the same name that this one lacks.
    missing: tuple[str, ...]
    # Variables, connections and secrets that its tasks need and that are not stored.
    warnings: tuple[str, ...] = ()


async def load_folder(folder: Path, settings: Settings, environment: Mapping[str, str]) -> list[LoadedFile]:
    """Load every DAG file of the folder. Raises InvalidDag with all problems."""
    files = await asyncio.to_thread(_files_of, folder)
    loaded: list[LoadedFile] = []
    for first in range(0, len(files), LOADS_AT_ONCE):
        batch = files[first : first + LOADS_AT_ONCE]
        limit = settings.load_timeout_seconds
        loads = [load_file(folder, file, timeout_seconds=limit, environment=environment) for file in batch]
        loaded += await asyncio.gather(*loads)
    problems = [str(file.error) for file in loaded if file.error is not None]
    problems += [f"DAG {name} is defined in {' and '.join(owners)}" for name, owners in find_duplicates(loaded).items()]
    if problems:
        raise InvalidDag(f"Nothing was published: {'; '.join(problems)}")
    return loaded


def _files_of(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist.")
    files = find_dag_files(folder)
    if not files:
        raise UserError(f"{folder} contains no DAG file: no .py file in it mentions both `evertick` and `dag`.")
    return files


async def deploy(
    conn: AsyncConnection, loaded: list[LoadedFile], *, folder: Path, name: str, settings: Settings, actor: str
) -> Deployment:
    owners = {row.name: row.file for row in await dags.files(conn)}
    place, routing = f"{DEPLOYED}{name}/", load_routing(settings.routing_file)
    for file in loaded:
        for dag in file.dags:
            if not owners.get(dag.name, place).startswith(place):
                raise Conflict(
                    f"DAG {dag.name!r} is already published from {owners[dag.name]}: rename one, or delete the published one"
                    f" first with `evertick dags delete {dag.name}`. Nothing was published."
                )
    published, warnings = [], []
    for file in loaded:
        bundle = await asyncio.to_thread(pack, folder, file.file, file.closure)
        threads = ", ".join(file.uses_threads) or None
        await dags.put_bundle(
            conn, bundle_hash=bundle.hash, file=file.file, archive=bundle.archive, uses_threads=threads
        )
        for dag in file.dags:
            at = f"{place}{file.file}"
            done = await publish(conn, spec=dag.spec, file=at, bundle_hash=bundle.hash, actor=actor, routing=routing)
            published.append(Deployed(dag=dag.name, file=file.file, bundle=bundle.hash, is_new=done.is_new))
            if settings.secrets_backends == ("store",):
                warnings += await not_stored(conn, dag.spec)
    names = {each.dag for each in published}
    missing = tuple(dag for dag, file in owners.items() if file.startswith(place) and dag not in names)
    return Deployment(published=tuple(published), missing=missing, warnings=tuple(warnings))


async def remove(conn: AsyncConnection, names: tuple[str, ...], *, actor: str) -> None:
    for name in names:
        await delete(conn, dag=name, actor=actor)
