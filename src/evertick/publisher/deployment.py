"""Publishes a whole folder as a version of a deployment: all of its DAGs, or nothing if one file is refused.

Each file is loaded in its own process, never in this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from psycopg import AsyncConnection

from evertick.bundles.airflow_python import LOADER_MODULES, AirflowPython
from evertick.bundles.bundle import Bundle, pack
from evertick.bundles.dependencies import Lock, find_declaration
from evertick.bundles.environments import NO_DEPENDENCIES, Environments, Prepared
from evertick.bundles.loader import ImportProblem, LoadedFile, find_duplicates, load_file, not_prepared
from evertick.config import Settings
from evertick.db.queries import dags, deployments
from evertick.db.queries.shards import read_clock
from evertick.domain.access import Actor
from evertick.domain.dags.validation import past_hints
from evertick.domain.deployments import DeploymentChange
from evertick.domain.errors import BrokenFiles, EnvironmentFailed, InvalidDag, UserError
from evertick.engine.publish import PublishedDag, not_stored, publish_all, refuse_unpublishable, stored_dags
from evertick.notifications.webhook import unreachable
from evertick.publisher.publisher import LOADS_AT_ONCE, find_dag_files, published_lock, store_bundle
from evertick.publisher.routing_file import load_routing


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """A file's DAGs, or why it cannot be published."""

    file: str
    dags: tuple[str, ...] = ()
    error: ImportProblem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedDag:
    """One DAG of a deployment. `bundle` is the hash of its code. `is_new`: it has a new version."""

    dag: str
    file: str
    bundle: str
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployResult:
    """`version`: the current version of the deployment. `is_new`: this request made it. `retired`: DAGs that it had before and
    that are not in the folder. `warnings`: values that its tasks need and that are not stored, and schedules of new DAGs that
    begin in the past."""

    deployment: str
    version: int
    is_new: bool
    is_dry_run: bool
    files: list[FileVerdict]
    dags: list[DeployedDag]
    retired: list[str]
    warnings: list[str]


async def load_files(
    folder: Path,
    files: Sequence[str],
    settings: Settings,
    environment: Mapping[str, str],
    known: Mapping[str, Lock] = MappingProxyType({}),
) -> list[LoadedFile]:
    """Load these files, a few at a time. `known` are locks of published versions, by file."""
    airflow = AirflowPython(settings, environment, LOADER_MODULES)
    room, environments = asyncio.Semaphore(LOADS_AT_ONCE), Environments(settings, environment)
    timeout = settings.load_timeout_seconds

    async def load(file: str) -> LoadedFile:
        declaration, prepared, zygote = None, NO_DEPENDENCIES, None
        try:
            if (interpreter := await airflow.interpreter(folder / file)) is not None:
                # A single file is imported as fast without.
                prepared, zygote = Prepared(interpreter), airflow.zygote(interpreter) if len(files) > 1 else None
            elif settings.environments and (declaration := find_declaration(folder, file)) is not None:
                prepared = await environments.prepare(declaration, known.get(file))
        except (InvalidDag, EnvironmentFailed) as error:
            return not_prepared(file, declaration, error)
        async with room:
            return await load_file(
                folder, file, timeout_seconds=timeout, environment=environment, prepared=prepared, zygote=zygote
            )

    try:
        return await asyncio.gather(*map(load, files))
    finally:
        airflow.close()


async def deployed_locks(conn: AsyncConnection, name: str) -> dict[str, Lock]:
    """The locks of a deployment, by file: packages stay as they are while their declaration does."""
    files = {row.file for row in await dags.files(conn, name)}
    locks = {file: await published_lock(conn, name, file) for file in files}
    return {file: lock for file, lock in locks.items() if lock is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFolder:
    """The loaded DAG files of a folder, and the bundle of each."""

    files: list[LoadedFile]
    bundles: dict[str, Bundle]


async def load_folder(
    folder: Path, settings: Settings, environment: Mapping[str, str], known: Mapping[str, Lock]
) -> LoadedFolder:
    """Load and pack every DAG file of the folder. Raises BrokenFiles with the problems of all. Refuses a folder without DAGs,
    which would retire all DAGs of the deployment."""
    files = await asyncio.to_thread(_files_of, folder, with_airflow=settings.airflow_python is not None)
    loaded = await load_files(folder, files, settings, environment, known)
    loaded = [replace(each, error=each.error or next(iter(each.refused.values()), None)) for each in loaded]
    for name, owners in find_duplicates(loaded).items():
        message = f"DAG {name!r} is also defined in {owners[0]}. Rename one of them."
        loaded = [_with_problem(each, message) if each.file in owners[1:] else each for each in loaded]
    refuse_broken(loaded)
    if not any(each.dags for each in loaded):
        names = ", ".join(each.file for each in loaded[:10])
        raise UserError(
            f"No DAG is defined: {names} import `dag` but call no function with @dag. Nothing was published. To retire all DAGs,"
            " delete the deployment: evertick deployments delete NAME"
        )
    bundles: dict[str, Bundle] = {}
    for number, file in enumerate(loaded):
        try:
            bundles[file.file] = await asyncio.to_thread(pack, folder, file.file, file.closure, file.lock)
        except InvalidDag as error:
            loaded[number] = _with_problem(file, error.message)
    refuse_broken(loaded)
    return LoadedFolder(files=loaded, bundles=bundles)


def refuse_broken(loaded: Sequence[LoadedFile]) -> None:
    problems = [str(file.error) for file in loaded if file.error is not None]
    if problems:
        lines = ["Nothing was published:", *(" ".join(each.split()) for each in problems)]
        raise BrokenFiles("\n".join(lines), verdicts=[_verdict(each) for each in loaded])


def _files_of(folder: Path, *, with_airflow: bool) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist.")
    files = find_dag_files(folder, with_airflow=with_airflow)
    if not files:
        raise UserError("There is no DAG file: no .py file mentions both `evertick` and `dag`. Nothing was published.")
    return files


def _with_problem(file: LoadedFile, message: str) -> LoadedFile:
    return replace(file, error=file.error or ImportProblem(file=file.file, line=None, message=message))


def _verdict(file: LoadedFile) -> FileVerdict:
    return FileVerdict(file=file.file, dags=tuple(dag.name for dag in file.dags), error=file.error)


async def deploy(
    conn: AsyncConnection,
    loaded: LoadedFolder,
    change: DeploymentChange,
    *,
    settings: Settings,
    actor: Actor,
    is_dry_run: bool = False,
) -> DeployResult:
    """Publish loaded files as the next version of their deployment. A folder that is published already changes nothing."""
    routing, now, files = load_routing(settings.routing_file), await read_clock(conn), loaded.files
    await _refuse_unpublishable(conn, change.name, files)
    before = {row.name for row in await dags.files(conn, change.name)}
    specs = {dag.name: dag.spec for file in files for dag in file.dags}
    retired = sorted(before - specs.keys())
    warnings = [hint for name, spec in specs.items() if name not in before for hint in past_hints(spec, now)]
    if settings.secrets_backends == ("store",):
        warnings = [text for spec in specs.values() for text in await not_stored(conn, spec)] + warnings
    warnings += [
        text for spec in specs.values() for text in unreachable(spec, allowed=settings.webhook_allowed_networks)
    ]
    given = [
        PublishedDag(spec=dag.spec, file=file.file, bundle_hash=loaded.bundles[file.file].hash)
        for file in files
        for dag in file.dags
    ]
    if is_dry_run:
        new, version, is_new = await _preview(conn, change, files, given, is_shorter=bool(retired))
    else:
        for each in files:
            await store_bundle(conn, each, loaded.bundles[each.file])
        done = await publish_all(conn, change, given, retired=retired, actor=actor, routing=routing)
        new, version, is_new = {each.dag for each in stored_dags(done) if each.is_new}, done.version, done.is_new
        broken = [each.file for each in await dags.import_errors(conn) if each.deployment == change.name]
        if broken:
            await dags.drop_import_errors(conn, change.name, files=broken)
    return DeployResult(
        deployment=change.name,
        version=version,
        is_new=is_new,
        is_dry_run=is_dry_run,
        files=[_verdict(each) for each in files],
        dags=[
            DeployedDag(dag=each.spec.name, file=each.file, bundle=each.bundle_hash, is_new=each.spec.name in new)
            for each in given
        ],
        retired=retired,
        warnings=warnings,
    )


async def _refuse_unpublishable(conn: AsyncConnection, deployment: str, loaded: Sequence[LoadedFile]) -> None:
    """Raises BrokenFiles if a DAG of a file cannot be published now."""
    checked = []
    for file in loaded:
        try:
            await refuse_unpublishable(conn, deployment, [dag.spec for dag in file.dags])
            checked.append(file)
        except InvalidDag as error:
            checked.append(_with_problem(file, error.message))
    refuse_broken(checked)
    # DAGs of different files can start each other, too.
    await refuse_unpublishable(conn, deployment, [dag.spec for file in loaded for dag in file.dags])


async def _preview(
    conn: AsyncConnection,
    change: DeploymentChange,
    loaded: Sequence[LoadedFile],
    given: Sequence[PublishedDag],
    *,
    is_shorter: bool,
) -> tuple[set[str], int, bool]:
    """Which DAGs would have a new version, the deployment's current version, and whether it would have a new one."""
    hashes = {dag.name: dag.hash for file in loaded for dag in file.dags}
    rows = await dags.owners(conn, names=list(hashes))
    current = {(row.name, row.hash, row.bundle_hash) for row in rows}
    new = {
        each.spec.name for each in given if (each.spec.name, hashes[each.spec.name], each.bundle_hash) not in current
    }
    found = await deployments.find(conn, change.name)
    version = found.version if found else 0
    return new, version, bool(new) or is_shorter or version == 0
