"""Watches a folder and publishes the DAGs in it.

Each file is loaded in its own process, never in this one. A file that cannot be loaded is an import error that users
see, while its last valid version keeps running. Only a scan that finds a file missing removes its DAGs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path

import watchfiles
from psycopg import AsyncConnection

from evertick.bundles.airflow_python import LOADER_MODULES, AirflowPython
from evertick.bundles.archive import visible_files
from evertick.bundles.bundle import Bundle, contents, pack
from evertick.bundles.dependencies import LOCK_FILE, Lock, find_declaration, read_lock
from evertick.bundles.environments import NO_DEPENDENCIES, Environments, Prepared
from evertick.bundles.ignore_files import without_ignored
from evertick.bundles.loader import ImportProblem, LoadedFile, load_file, not_prepared
from evertick.config import Settings, airflow_ignore_syntax
from evertick.db.connect import Purpose
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.dags.dag_files import is_airflow_file, is_dag_file
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.errors import (
    Conflict,
    CyclicDependency,
    EnvironmentFailed,
    InvalidDag,
    MissingPool,
    NotOwned,
    UserError,
)
from evertick.domain.routing import Routing
from evertick.domain.schedules.computed import renew_at
from evertick.engine.publish import PublishedDag, not_stored, publish_all, stored_dags
from evertick.notifications.webhook import unreachable
from evertick.observability.health import STALLED_SECONDS, LoopHealth
from evertick.observability.logging import Log
from evertick.publisher.routing_file import Rules
from evertick.runtime.connections import Notifier, ReconnectingConnection
from evertick.runtime.loop import in_background, run_loop
from evertick.runtime.server_watch import SELDOM_SECONDS

RESCAN_SECONDS = 5.0


# Only the publisher changes these rows, so they are compared when files come or go, and periodically.
COMPARE_SECONDS = 60.0


LOADS_AT_ONCE = 4

# How long it keeps Airflow imported after the last load.
ZYGOTE_SECONDS = 60.0


# How often the folder is scanned while files load, and how long the others wait for one.
_RELOAD_SECONDS = 600.0
LOADING_SCAN_SECONDS, PATIENCE_SECONDS = 1.0, 5.0


_ACTOR = Actor("publisher")


Fingerprint = frozenset[tuple[str, int, int]]


@dataclass(slots=True, kw_only=True)
class _Load:
    """A file that is being loaded, and its fingerprint before. `started_at` is None while it waits for a free process."""

    before: Fingerprint
    task: asyncio.Task[LoadedFile]
    began_ns: int
    started_at: float | None = None


class Publisher:
    """Keeps the database in step with one folder."""

    def __init__(self, settings: Settings, *, url: str, environment: Mapping[str, str], log: Log) -> None:
        """`environment` is the environment that DAG files see while they are loaded."""
        self._settings, self._environment, self._log = settings, environment, log
        self._folder = settings.dags_folder.resolve()
        self._change = DeploymentChange(
            name=settings.deployment, kind=DeploymentKind.FOLDER, source={"folder": str(self._folder)}
        )
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._notifier = Notifier(url, is_enabled=settings.listen_notify, log=log, look_seconds=SELDOM_SECONDS)
        self._environments = Environments(settings, environment)
        # Opened only for DAG files with dependencies of their own.
        self._reader, self._reading = ReconnectingConnection(url, Purpose.SCHEDULER), asyncio.Lock()
        self._airflow = AirflowPython(settings, environment, LOADER_MODULES, idle_seconds=ZYGOTE_SECONDS)
        self._locks: dict[str, Lock | None] = {}
        self._retry_at: dict[str, float] = {}
        # Files with schedules that their code computes.
        self._computes = set[str]()
        self._seen: dict[str, Fingerprint] = {}
        self._closures: dict[str, tuple[str, ...]] = {}
        self._owners: dict[str, str] = {}
        self._loads: dict[str, _Load] = {}
        self._room = asyncio.Semaphore(LOADS_AT_ONCE)
        self._compared, self._compared_at = list[str](), -inf
        self._rules = Rules(settings.routing_file, log=log)
        self._told: dict[str, str] = {}
        self._pulse = LoopHealth("publisher", longest_tick_seconds=settings.load_timeout_seconds + STALLED_SECONDS)
        self.wake, self.stop = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        async with in_background(self._notifier.run(), self._watch()):
            await run_loop(
                self.tick, wake=self.wake, stop=self.stop, name="publisher", log=self._log, pulse=self._pulse
            )
        for file in list(self._loads):
            self._stop_loading(file)
        self._airflow.close()
        await self._notifier.close()
        await self._reader.close()
        await self._link.close()

    async def tick(self) -> float:
        """Load new and changed files, publish their DAGs, and remove those of missing files. Files that change while others load
        are found, too: one that hangs delays no other."""
        taken: dict[str, Fingerprint] = {}
        while not self.stop.is_set():
            # Loading one file may take as long as its time limit.
            self._pulse.begin()
            if (routing := await self._scan(taken)) is None:
                break
            for file in self._finished():
                load = self._loads.pop(file)
                taken[file] = before = self._mark(load, load.task.result())
                if await self._take(await self._link.get(), load.task.result(), before, routing):
                    self._seen[file] = before
            if not self._loads:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(LOADING_SCAN_SECONDS):
                    await self.wake.wait()
            self.wake.clear()
        return RESCAN_SECONDS

    async def _scan(self, taken: Mapping[str, Fingerprint]) -> Routing | None:
        """Begin to load what is new or has changed since it was taken. None: nothing can be published now."""
        if not self._folder.is_dir():
            self._log.warning("dags_folder_missing", folder=str(self._folder))
            self._pulse.blocked = f"{self._folder} is not a folder: there is nothing to publish"
            return None
        is_changed = self._rules.look()
        self._pulse.blocked = self._rules.problem
        if self._rules.current is None:
            return None
        if is_changed:
            # Publish everything again: the same code under other rules is the same version, rerouted.
            self._seen.clear()
        try:
            files = find_dag_files(self._folder, with_airflow=self._settings.airflow_python is not None)
        except UserError as error:
            self._log.warning("dags_scan_failed", folder=str(self._folder), error=str(error))
            self._pulse.blocked = str(error)
            return None
        if files != self._compared or time.monotonic() - self._compared_at > COMPARE_SECONDS:
            await self._remove_gone(await self._link.get(), set(files))
            self._compared, self._compared_at = files, time.monotonic()
        for file in files:
            mark = self._fingerprint(file)
            is_known = mark in (self._seen.get(file), taken.get(file))
            if is_known and not is_changed and time.monotonic() < self._retry_at.get(file, inf):
                continue
            if file in self._loads and self._loads[file].before == mark:
                continue
            self._stop_loading(file)
            self._loads[file] = _Load(before=mark, began_ns=time.time_ns(), task=asyncio.create_task(self._load(file)))
        for file in self._loads.keys() - set(files):
            self._stop_loading(file)
        return self._rules.current

    async def _watch(self) -> None:
        """A change event only makes the scan early; the periodic scan decides."""
        while True:
            with suppress(FileNotFoundError, OSError, RuntimeError):
                async for _ in watchfiles.awatch(self._folder, debounce=100, step=50):
                    self.wake.set()
            await asyncio.sleep(RESCAN_SECONDS)

    async def _load(self, file: str) -> LoadedFile:
        declaration, zygote = None, None
        try:
            prepared = NO_DEPENDENCIES
            if (airflow := await self._airflow.interpreter(self._folder / file)) is not None:
                prepared, zygote = Prepared(airflow), self._airflow.zygote(airflow)
            elif self._settings.environments and (declaration := find_declaration(self._folder, file)) is not None:
                # The others do not wait for a build.
                self._loads[file].started_at = time.monotonic()
                prepared = await self._environments.prepare(declaration, await self._known_lock(file))
                self._locks[file] = prepared.lock
        except (InvalidDag, EnvironmentFailed) as error:
            self.wake.set()
            return not_prepared(file, declaration, error)
        try:
            async with self._room:
                self._loads[file].started_at = time.monotonic()
                timeout = self._settings.load_timeout_seconds
                return await load_file(
                    self._folder,
                    file,
                    timeout_seconds=timeout,
                    environment=self._environment,
                    prepared=prepared,
                    zygote=zygote,
                )
        finally:
            self.wake.set()

    async def _known_lock(self, file: str) -> Lock | None:
        """The lock of the published version: packages stay as they are while their declaration does."""
        if file not in self._locks:
            async with self._reading:
                self._locks[file] = await published_lock(await self._reader.get(), self._change.name, file)
        return self._locks[file]

    def _stop_loading(self, file: str) -> None:
        if (load := self._loads.pop(file, None)) is not None:
            load.task.cancel()

    def _finished(self) -> list[str]:
        """Loaded files in the order of their names, so that the first of two with one DAG owns it. A file that takes long is not
        waited for."""
        found = []
        for file, load in sorted(self._loads.items()):
            if load.task.done():
                found.append(file)
            elif load.started_at is None or time.monotonic() - load.started_at < PATIENCE_SECONDS:
                break
        return found

    def _mark(self, load: _Load, loaded: LoadedFile) -> Fingerprint:
        """The fingerprint from before loading, so that the next scan finds a change meanwhile; a new one if the file needs modules
        that were not known, and nothing changed since it was read: otherwise the plan, the packages and the code would be of
        different versions."""
        if new := set(loaded.closure) - set(self._closures.get(loaded.file, ())):
            self._closures[loaded.file] = loaded.closure
            now = self._fingerprint(loaded.file)
            if load.before <= now and not any(_changed_after(self._folder / name, load.began_ns) for name in new):
                return now
        return load.before

    async def _take(self, conn: AsyncConnection, loaded: LoadedFile, before: Fingerprint, routing: Routing) -> bool:
        """Publish one file's DAGs, or record its error. False: retry at the next scan."""
        problem, is_final = loaded.error or self._duplicate_in(loaded), True
        self._retry_at.pop(loaded.file, None)
        if (seconds := _reload_after(loaded)) is not None:
            self._computes.add(loaded.file)
            self._retry_at[loaded.file] = time.monotonic() + seconds
        elif loaded.error is not None and loaded.file in self._computes:
            # Its schedules run out of instants unless it is loaded.
            self._retry_at[loaded.file] = time.monotonic() + _RELOAD_SECONDS
        if problem is None:
            try:
                bundle = await asyncio.to_thread(pack, self._folder, loaded.file, loaded.closure, loaded.lock)
                if self._fingerprint(loaded.file) != before:
                    # The file changed while it was read: the spec and the code would be of different versions.
                    self.wake.set()
                    return False
                await self._publish(conn, loaded, bundle, routing)
                problem = next(iter(loaded.refused.values()), None)
            except (InvalidDag, Conflict) as error:
                problem = ImportProblem(file=loaded.file, line=None, message=str(error))
                # At the next scan the pool may exist or the cycle may be broken, without any change of the file.
                is_final = not isinstance(error, MissingPool | CyclicDependency | NotOwned | Conflict)
            except OSError as error:
                self._log.warning("dag_file_removed", file=loaded.file, error=error)
                return False
        if problem is not None:
            if self._told.get(loaded.file) != problem.message:
                place = {} if problem.line is None else {"line": problem.line}
                self._log.error("dag_import_failed", file=problem.file, **place, message=problem.message)
            is_repeated = not is_final or loaded.retry_after_seconds is not None
            self._told[loaded.file] = problem.message if is_repeated else ""
            await store_import_error(conn, self._change.name, loaded.file, problem)
        else:
            await dags.drop_import_errors(conn, self._change.name, files=[loaded.file])
            self._told.pop(loaded.file, None)
        return is_final

    async def _publish(self, conn: AsyncConnection, loaded: LoadedFile, bundle: Bundle, routing: Routing) -> None:
        """Publish the DAGs of one file, and retire those that it had before, all or nothing."""
        await store_bundle(conn, loaded, bundle)
        given = [PublishedDag(spec=dag.spec, file=loaded.file, bundle_hash=bundle.hash) for dag in loaded.dags]
        names = {dag.name for dag in loaded.dags} | loaded.refused.keys()
        rows = await dags.files(conn, self._change.name)
        gone = [row.name for row in rows if row.file == loaded.file and row.name not in names]
        done = await publish_all(conn, self._change, given, retired=gone, actor=_ACTOR, routing=routing)
        specs = {dag.name: dag.spec for dag in loaded.dags}
        for stored in stored_dags(done):
            self._owners[stored.dag], spec = loaded.file, specs[stored.dag]
            if stored.is_new:
                for finding in loaded.findings:
                    if finding.dag == stored.dag:
                        self._log.warning("finding_reported", dag=stored.dag, message=str(finding))
                self._log.info("dag_published", dag=stored.dag, file=loaded.file, tasks=len(spec.tasks))
                for each in await not_stored(conn, spec) if self._settings.secrets_backends == ("store",) else ():
                    self._log.warning("secrets_missing", dag=stored.dag, message=each)
                for each in unreachable(spec, allowed=self._settings.webhook_allowed_networks):
                    self._log.warning("sink_unreachable", dag=stored.dag, message=each)
            if stored.rerouted:
                self._log.info("task_rerouted", dag=stored.dag, tasks=stored.rerouted)
        for name in gone:
            self._forget(name, f"no longer in {loaded.file}")
        self._notifier.wake(Channel.SCHEDULE)

    def _duplicate_in(self, loaded: LoadedFile) -> ImportProblem | None:
        for dag in loaded.dags:
            owner = self._owners.get(dag.name, loaded.file)
            if owner != loaded.file and (self._folder / owner).exists():
                message = f"DAG {dag.name!r} is already defined in {owner}. Rename one of them."
                return ImportProblem(file=loaded.file, line=None, message=message)
        return None

    async def _remove_gone(self, conn: AsyncConnection, files: set[str]) -> None:
        for row in await dags.files(conn, self._change.name):
            if row.file not in files and not (self._folder / row.file).exists():
                await publish_all(conn, self._change, [], retired=[row.name], actor=_ACTOR)
                self._forget(row.name, f"{row.file} was removed")
        for file in [file for file in self._seen if file not in files]:
            del self._seen[file]
        known = [each.file for each in await dags.import_errors(conn) if each.deployment == self._change.name]
        if gone := [file for file in known if file not in files]:
            await dags.drop_import_errors(conn, self._change.name, files=gone)

    def _forget(self, dag: str, why: str) -> None:
        self._owners.pop(dag, None)
        self._log.info("dag_deleted", dag=dag, reason=why)

    def _fingerprint(self, file: str) -> Fingerprint:
        """The facts that the file's version depends on, without reading it."""
        python = set(self._closures.get(file, ())) | {file}
        paths = [self._folder / name for name in python]
        paths += [path for path in visible_files(self._folder) if path.suffix != ".py"]
        marks = set()
        for path in paths:
            with suppress(OSError):
                stat = path.stat()
                marks.add((str(path), stat.st_mtime_ns, stat.st_size))
        return frozenset(marks)


def _changed_after(path: Path, moment_ns: int) -> bool:
    """By its change time, which no program can set. The file system's clock is up to 10 ms late: a change that it hides
    came before the process that loads could have read the file."""
    with suppress(OSError):
        return path.stat().st_ctime_ns > moment_ns
    return True


def _reload_after(loaded: LoadedFile) -> float | None:
    """When to load a file again although it has not changed: dependencies may be there then, and schedules need more instants."""
    if loaded.retry_after_seconds is not None:
        return loaded.retry_after_seconds
    now = datetime.now(UTC)
    found = [renew_at(each.spec, now) for dag in loaded.dags for each in dag.spec.schedules]
    return min(((at - now).total_seconds() for at in found if at is not None), default=None)


def find_dag_files(folder: Path, *, with_airflow: bool = False) -> list[str]:
    """Python files that may define a DAG: of Evertick, and with an interpreter for them also those of Airflow that no
    `.airflowignore` excludes. Raises UserError if one cannot be read."""
    found, of_airflow = list[str](), list[str]()
    for path in visible_files(folder):
        with suppress(OSError):
            if path.suffix != ".py":
                continue
            if is_dag_file(text := path.read_bytes()):
                found.append(str(path.relative_to(folder)))
            elif with_airflow and is_airflow_file(text):
                of_airflow.append(str(path.relative_to(folder)))
    return sorted([*found, *without_ignored(folder, of_airflow, airflow_ignore_syntax())])


async def published_lock(conn: AsyncConnection, deployment: str, file: str) -> Lock | None:
    """The lock of the version that is published from this file."""
    found = await dags.published_bundle(conn, deployment, file)
    text = None if found is None else contents(found.archive, found.hash).get(LOCK_FILE)
    return None if text is None else read_lock(text.decode())


async def store_bundle(conn: AsyncConnection, loaded: LoadedFile, bundle: Bundle) -> None:
    threads = ", ".join(loaded.uses_threads) or None
    await dags.put_bundle(conn, bundle_hash=bundle.hash, file=loaded.file, archive=bundle.archive, uses_threads=threads)


async def store_import_error(conn: AsyncConnection, deployment: str, file: str, problem: ImportProblem) -> None:
    await dags.put_import_error(
        conn, deployment=deployment, file=file, line=problem.line, message=problem.message, detail=problem.traceback
    )
