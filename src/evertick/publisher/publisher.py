"""Watches a folder and publishes the DAGs in it; `evertick deploy` publishes a folder once.

Each file is loaded in its own process, never in this one. A file that cannot be loaded is an import error that users
see, while its last valid version keeps running. Only a scan that finds a file missing removes its DAGs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import watchfiles
from psycopg import AsyncConnection

from evertick.bundles.bundle import Bundle, pack
from evertick.bundles.loader import ImportProblem, LoadedFile, find_duplicates, load_file
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.domain.errors import Conflict, CyclicDependency, InvalidDag, MissingPool, UserError
from evertick.domain.routing import Routing
from evertick.engine.dags import delete
from evertick.engine.publish import not_stored, publish
from evertick.observability.health import STALLED_SECONDS, LoopHealth
from evertick.observability.logging import Log
from evertick.publisher.routing_file import Rules, load_routing
from evertick.runtime.connections import Notifier, ReconnectingConnection
from evertick.runtime.loop import run_loop
from evertick.runtime.server_watch import SELDOM_SECONDS

RESCAN_SECONDS = 5.0


# Only the publisher changes these rows, so they are compared when files come or go, and periodically.
COMPARE_SECONDS = 60.0


LOADS_AT_ONCE = 2


# The location of a deployed DAG starts with this; a watched folder leaves such DAGs alone.
DEPLOYED = "deploy:"


_ACTOR = "publisher"


Fingerprint = frozenset[tuple[str, int, int]]


class Publisher:
    """Keeps the database in step with one folder."""

    def __init__(self, settings: Settings, *, url: str, environment: Mapping[str, str], log: Log) -> None:
        """`environment` is the environment that DAG files see while they are loaded."""
        self._settings, self._environment, self._log = settings, environment, log
        self._folder = settings.dags_folder.resolve()
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._waker = Notifier(url, is_enabled=settings.listen_notify, log=log, look_seconds=SELDOM_SECONDS)
        self._seen: dict[str, Fingerprint] = {}
        self._closures: dict[str, tuple[str, ...]] = {}
        self._owners: dict[str, str] = {}
        self._compared, self._compared_at = list[str](), -inf
        self._rules = Rules(settings.routing_file, log=log)
        self._told: dict[str, str] = {}
        self._pulse = LoopHealth("publisher", longest_tick_seconds=settings.load_timeout_seconds + STALLED_SECONDS)
        self.wake, self.stop = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(self._waker.run()), group.create_task(self._watch())]
            await run_loop(
                self.tick, wake=self.wake, stop=self.stop, name="publisher", log=self._log, pulse=self._pulse
            )
            for task in background:
                task.cancel()
        await self._waker.close()
        await self._link.close()

    async def tick(self) -> float:
        """Load new and changed files, publish their DAGs, and remove those of missing files."""
        if not self._folder.is_dir():
            self._log.warning("dags_folder_missing", folder=str(self._folder))
            self._pulse.blocked = f"{self._folder} is not a folder: there is nothing to publish"
            return RESCAN_SECONDS
        is_changed = self._rules.look()
        self._pulse.blocked = self._rules.problem
        if self._rules.current is None:
            return RESCAN_SECONDS
        if is_changed:
            # Publish everything again: the same code under other rules is the same version, rerouted.
            self._seen.clear()
        files = find_dag_files(self._folder)
        conn = await self._link.get()
        if files != self._compared or time.monotonic() - self._compared_at > COMPARE_SECONDS:
            await self._remove_gone(conn, set(files))
            self._compared, self._compared_at = files, time.monotonic()
        changed = [file for file in files if self._seen.get(file) != self._fingerprint(file)]
        async for before, loaded in self._load(changed):
            if await self._take(conn, loaded, before, self._rules.current):
                self._seen[loaded.file] = before
        return RESCAN_SECONDS

    async def _watch(self) -> None:
        """A change event only makes the scan early; the periodic scan decides."""
        while True:
            with suppress(FileNotFoundError, OSError, RuntimeError):
                async for _ in watchfiles.awatch(self._folder, debounce=100, step=50):
                    self.wake.set()
            await asyncio.sleep(RESCAN_SECONDS)

    async def _load(self, files: list[str]) -> AsyncIterator[tuple[Fingerprint, LoadedFile]]:
        """Load a few at a time. The fingerprint is taken before loading: the next scan finds a change meanwhile."""
        timeout = self._settings.load_timeout_seconds
        for first in range(0, len(files), LOADS_AT_ONCE):
            # Each batch may take as long as loading one file may.
            self._pulse.begin()
            batch = files[first : first + LOADS_AT_ONCE]
            prints = [self._fingerprint(file) for file in batch]
            loads = [
                load_file(self._folder, file, timeout_seconds=timeout, environment=self._environment) for file in batch
            ]
            for file, before, loaded in zip(batch, prints, await asyncio.gather(*loads), strict=True):
                if set(loaded.closure) - set(self._closures.get(file, ())):
                    self._closures[file] = loaded.closure
                    before = self._fingerprint(file)
                yield before, loaded

    async def _take(self, conn: AsyncConnection, loaded: LoadedFile, before: Fingerprint, routing: Routing) -> bool:
        """Publish one file's DAGs, or record its error. False: retry at the next scan."""
        problem, is_final = loaded.error or self._duplicate_in(loaded), True
        if problem is None:
            try:
                bundle = await asyncio.to_thread(pack, self._folder, loaded.file, loaded.closure)
                if self._fingerprint(loaded.file) != before:
                    # The file changed while it was read: the spec and the code would be of different versions.
                    self.wake.set()
                    return False
                await self._publish(conn, loaded, bundle, routing)
            except InvalidDag as error:
                problem = ImportProblem(file=loaded.file, line=None, message=str(error))
                # At the next scan the pool may exist or the cycle may be broken, without any change of the file.
                is_final = not isinstance(error, MissingPool | CyclicDependency)
            except OSError as error:
                self._log.warning("dag_file_removed", file=loaded.file, error=error)
                return False
        if problem is not None:
            if self._told.get(loaded.file) != problem.message:
                self._log.error("dag_import_failed", file=problem.file, line=problem.line, message=problem.message)
            self._told[loaded.file] = problem.message if not is_final else ""
            await dags.put_import_error(
                conn, file=loaded.file, line=problem.line, message=problem.message, detail=problem.traceback
            )
        else:
            await dags.drop_import_error(conn, loaded.file)
            self._told.pop(loaded.file, None)
        return is_final

    async def _publish(self, conn: AsyncConnection, loaded: LoadedFile, bundle: Bundle, routing: Routing) -> None:
        threads = ", ".join(loaded.uses_threads) or None
        await dags.put_bundle(
            conn, bundle_hash=bundle.hash, file=loaded.file, archive=bundle.archive, uses_threads=threads
        )
        for dag in loaded.dags:
            done = await publish(
                conn, spec=dag.spec, file=loaded.file, bundle_hash=bundle.hash, actor=_ACTOR, routing=routing
            )
            self._owners[dag.name] = loaded.file
            if done.is_new:
                self._log.info("dag_published", dag=dag.name, file=loaded.file, tasks=len(dag.spec.tasks))
                for each in await not_stored(conn, dag.spec) if self._settings.secrets_backends == ("store",) else ():
                    self._log.warning("secrets_missing", dag=dag.name, message=each)
            if done.rerouted:
                self._log.info("task_rerouted", dag=dag.name, tasks=done.rerouted)
        names = {dag.name for dag in loaded.dags}
        for row in await dags.files(conn):
            if row.file == loaded.file and row.name not in names:
                await self._delete(conn, row.name, f"no longer in {loaded.file}")
        self._waker.wake(Channel.SCHEDULE)

    def _duplicate_in(self, loaded: LoadedFile) -> ImportProblem | None:
        for dag in loaded.dags:
            owner = self._owners.get(dag.name, loaded.file)
            if owner != loaded.file and (self._folder / owner).exists():
                message = f"DAG {dag.name!r} is already defined in {owner}. Rename one of them."
                return ImportProblem(file=loaded.file, line=None, message=message)
        return None

    async def _remove_gone(self, conn: AsyncConnection, files: set[str]) -> None:
        for row in await dags.files(conn):
            if row.file not in files and not row.file.startswith(DEPLOYED) and not (self._folder / row.file).exists():
                await self._delete(conn, row.name, f"{row.file} was removed")
        for file in [file for file in self._seen if file not in files]:
            del self._seen[file]
            await dags.drop_import_error(conn, file)
        for error in await dags.import_errors(conn):
            if error.file not in files:
                await dags.drop_import_error(conn, error.file)

    async def _delete(self, conn: AsyncConnection, dag: str, why: str) -> None:
        with suppress(UserError):
            await delete(conn, dag=dag, actor=_ACTOR)
        self._owners.pop(dag, None)
        self._log.info("dag_deleted", dag=dag, reason=why)

    def _fingerprint(self, file: str) -> Fingerprint:
        """The facts that the file's version depends on, without reading it."""
        python = set(self._closures.get(file, ())) | {file}
        paths = [self._folder / name for name in python]
        paths += [path for path in _visible(self._folder) if path.suffix != ".py"]
        marks = set()
        for path in paths:
            with suppress(OSError):
                stat = path.stat()
                marks.add((str(path), stat.st_mtime_ns, stat.st_size))
        return frozenset(marks)


def find_dag_files(folder: Path) -> list[str]:
    """Python files that may define a DAG: they mention both words. A broken file counts, so that its error is shown."""
    found = []
    for path in _visible(folder):
        if path.suffix != ".py":
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if b"dag" in text and b"evertick" in text:
            found.append(str(path.relative_to(folder)))
    return sorted(found)


def _visible(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    ]


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
