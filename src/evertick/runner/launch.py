"""Caches the facts about a DAG version that a runner needs to run its tasks. Unpacks its code when needed."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import AsyncConnection

from evertick.bundles.bundle import unpack
from evertick.bundles.cache import keep
from evertick.db.connection import Opened
from evertick.db.queries import dags
from evertick.db.queries.secrets import Holder
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import AttemptOrder, Isolation, OutcomeKind, TaskKey
from evertick.domain.dags.spec import DagSpec, OnLostContact, TaskKind, from_json
from evertick.domain.errors import Conflict, EvertickError, NotFound, PostgresUnavailable
from evertick.executors.local.executor import LocalExecutor
from evertick.observability import metrics
from evertick.runner.state import RunningAttempts
from evertick.runtime.connections import ReconnectingConnection
from evertick.secrets.backends import SecretProvider, needs_grants
from evertick.storage.results import ResultTransfers

MOST_VERSIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    spec: DagSpec
    bundle: str
    file: str
    uses_threads: str | None


class VersionCache:
    """A bounded cache: versions never change, so the least recently used can be dropped at any time."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Version] = OrderedDict()

    def known(self, version_id: int) -> Version | None:
        if version_id in self._known:
            self._known.move_to_end(version_id)
        return self._known.get(version_id)

    async def fetch(self, link: Opened, version_id: int) -> Version:
        found = self.known(version_id)
        if found is not None:
            return found
        row = await dags.version(await link.get(), version_id)
        if row is None:
            raise NotFound(f"DAG version {version_id} is not in the database.")
        spec = await asyncio.to_thread(from_json, json.dumps(row.spec))
        version = Version(spec=spec, bundle=row.bundle_hash, file=row.file, uses_threads=row.uses_threads)
        self._known[version_id] = version
        while len(self._known) > MOST_VERSIONS:
            self._known.popitem(last=False)
        return version


def order(claim: ExchangeRow, version: Version, session: int, granted_json: str = "") -> AttemptOrder:
    """The executor's order for one claim."""
    task = version.spec.tasks[claim.idx]
    stops = task.on_lost_contact is OnLostContact.STOP
    return AttemptOrder(
        key=TaskKey(claim.run_id, claim.idx, claim.map_index),
        epoch=claim.epoch,
        session=session,
        attempt=claim.attempt,
        dag=version.spec.name,
        task=task.name,
        version_id=claim.version_id,
        bundle=version.bundle,
        file=version.file,
        fire_at=claim.fire_at.isoformat() if claim.fire_at else None,
        params_json=claim.params,
        inputs_json=claim.inputs or "{}",
        timeout_seconds=task.timeout_seconds,
        # A task that may be killed on its own must not share its process, nor one that changes its environment or has
        # secrets.
        isolation=Isolation.PROCESS if stops or granted_json or task.kind is TaskKind.PROGRAM else task.isolation,
        command=task.command,
        stops_on_lost_contact=stops,
        granted_json=granted_json,
    )


async def unpacked(conn: AsyncConnection, bundle_hash: str, folder: Path) -> tuple[Path, bool]:
    """The path of the bundle's code on this machine, fetched by its hash and verified, and whether it uses threads."""
    place = folder / bundle_hash
    row = await dags.bundle(conn, bundle_hash)
    if row is None:
        raise NotFound(f"The code {bundle_hash[:12]} of this DAG version is not in the database. Publish it again.")
    if not await asyncio.to_thread(keep, place):
        await asyncio.to_thread(unpack, row.archive, bundle_hash, folder)
    return place, row.uses_threads is not None


Known = tuple[ExchangeRow, Version, str]


_FAILURES = (psycopg.Error, EvertickError, IndexError, ValueError, OSError)


class Launcher:
    """The launcher of one session. `on_started` is called after each start."""

    def __init__(
        self,
        *,
        holding: RunningAttempts,
        executor: LocalExecutor,
        link: ReconnectingConnection,
        session: int,
        grants: SecretProvider,
        storing: ResultTransfers,
        on_started: Callable[[], None],
    ) -> None:
        self._holding, self._executor, self._link = holding, executor, link
        self._session, self._on_started, self._grants = session, on_started, grants
        self._storing = storing
        self._versions = VersionCache()
        self._put_off: list[tuple[list[Known], float | None]] = []
        self._granting: set[asyncio.Task[None]] = set()
        self._trouble: Exception | None = None

    async def start(self, claims: list[ExchangeRow], since: float | None) -> None:
        """Start the tasks claimed after an attempt ended at `since`. A task that cannot be started has ended in
        `holding`, with the reason. Raises when the database was unreachable, so that the runner pauses."""
        trouble, self._trouble = self._trouble, None
        known: list[Known] = []
        granting: list[tuple[ExchangeRow, Version]] = []
        for claim in claims:
            try:
                version = await self._versions.fetch(self._link, claim.version_id)
                if needs_grants(version.spec.tasks[claim.idx]) or self._storing.needs(claim.inputs):
                    granting.append((claim, version))
                else:
                    known.append((claim, version, ""))
            except _FAILURES as error:
                trouble = self._give_up(claim, error) or trouble
        for claim, version in granting:
            task = asyncio.create_task(self._start_granted(claim, version))
            self._granting.add(task)
            task.add_done_callback(self._granting.discard)
        if self._holding.has_ended and trouble is None:
            self._put_off.append((known, since))
            return
        self._start_known(known, since)
        if trouble is not None:
            raise trouble

    async def _start_granted(self, claim: ExchangeRow, version: Version) -> None:
        """Start a task that needs secrets or large inputs: concurrently, because their backends may take long to
        answer."""
        known: list[Known] = []
        try:
            if self._storing.needs(claim.inputs):
                await self._storing.fetch(claim.run_id, claim.inputs or "")
            holder = Holder(key=_key(claim), epoch=claim.epoch, session=self._session)
            granted = await self._grants.of_task(self._link, version.spec.tasks[claim.idx], holder)
            if self._holding.holds(_key(claim), claim.epoch):
                known.append((claim, version, granted))
        except _FAILURES as error:
            # The next start raises it, and the runner pauses.
            self._trouble = self._give_up(claim, error) or self._trouble
        self._start_known(known, None)

    def _give_up(self, claim: ExchangeRow, error: Exception) -> Exception | None:
        """End a claim that cannot be started. If the task is not the cause, it is returned to the queue and the error
        is returned, so that the runner pauses instead of claiming it again at once."""
        is_ours = isinstance(error, psycopg.Error | PostgresUnavailable | OSError)
        self._end(claim, OutcomeKind.GIVEN_BACK if is_ours else OutcomeKind.FAILED, error)
        return error if is_ours else None

    def start_soon(self) -> None:
        """Start the postponed tasks as soon as the caller awaits something."""
        put_off, self._put_off = self._put_off, []
        for claims, since in put_off:
            asyncio.get_running_loop().call_soon(self._start_known, claims, since)

    def _start_known(self, claims: list[Known], since: float | None) -> None:
        orders: list[AttemptOrder] = []
        for claim, version, granted in claims:
            try:
                orders.append(self._order(claim, version, granted))
            except (EvertickError, IndexError, ValueError) as error:
                self._end(claim, OutcomeKind.FAILED, error)
        try:
            self._executor.start_many(orders)
        except Conflict as error:
            # The executor is already stopping.
            for each in orders:
                self._holding.end_early(each.key, each.epoch, OutcomeKind.GIVEN_BACK, str(error))
        if since is not None:
            metrics.HOP_SECONDS.observe(time.monotonic() - since)
        self._on_started()

    def _order(self, claim: ExchangeRow, version: Version, granted: str) -> AttemptOrder:
        made = order(claim, version, self._session, granted)
        task = version.spec.tasks[claim.idx]
        self._holding.describe(made.key, task.retry, f"{version.spec.name}.{task.name}")
        if task.choice is not None:
            self._holding.judge_by(made.key, version.spec)
        return made

    def _end(self, claim: ExchangeRow, kind: OutcomeKind, error: Exception) -> None:
        self._holding.end_early(_key(claim), claim.epoch, kind, f"{type(error).__name__}: {error}")


def _key(claim: ExchangeRow) -> TaskKey:
    return TaskKey(claim.run_id, claim.idx, claim.map_index)
