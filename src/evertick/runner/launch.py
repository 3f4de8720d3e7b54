"""From claims to running attempts: each claimed task is looked up in its DAG version, and launched.

While there are outcomes to report, launching waits until the exchange is sent: it then runs while the database works,
and neither waits for the other.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psycopg

from evertick.bundles.bundle import unpack
from evertick.bundles.cache import keep
from evertick.db.connection import Opened
from evertick.db.queries import dags
from evertick.db.queries.dags import VersionRow
from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import AttemptOrder, AttemptRef, Isolation, OutcomeKind, TaskKey
from evertick.domain.dags.spec import DagSpec, DatabaseOutagePolicy, TaskKind, from_json
from evertick.domain.errors import ApiUnreachable, Conflict, EvertickError, NotFound, PostgresUnavailable
from evertick.executors.local.executor import LocalExecutor
from evertick.observability import metrics
from evertick.processes.system import boot_seconds
from evertick.runner.access import EngineAccess
from evertick.runner.events import LaunchFailed
from evertick.runner.state import RunnerState
from evertick.secrets.backends import SecretProvider, needs_grants

MOST_VERSIONS = 256
ReadVersion = Callable[[int], Awaitable[VersionRow | None]]
_FAILURES = (psycopg.Error, EvertickError, IndexError, ValueError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """A DAG version, with what a runner needs to run its tasks."""

    spec: DagSpec
    bundle: str
    file: str
    uses_threads: str | None


class VersionCache:
    """A bounded cache: versions never change, so the least recently used can be dropped at any time."""

    def __init__(self) -> None:
        self._versions: OrderedDict[int, LoadedVersion] = OrderedDict()

    async def get(self, link: Opened, version_id: int) -> LoadedVersion:
        async def read(wanted: int) -> VersionRow | None:
            return await dags.version(await link.get(), wanted)

        return await self.load(read, version_id)

    async def load(self, read: ReadVersion, version_id: int) -> LoadedVersion:
        if (found := self._versions.get(version_id)) is not None:
            self._versions.move_to_end(version_id)
            return found
        row = await read(version_id)
        if row is None:
            raise NotFound(f"DAG version {version_id} is not in the database.")
        spec = await asyncio.to_thread(from_json, json.dumps(row.spec))
        version = LoadedVersion(spec=spec, bundle=row.bundle_hash, file=row.file, uses_threads=row.uses_threads)
        self._versions[version_id] = version
        while len(self._versions) > MOST_VERSIONS:
            self._versions.popitem(last=False)
        return version


def attempt_order(claim: ExchangeRow, version: LoadedVersion, session: int, granted_json: str = "") -> AttemptOrder:
    """The executor's order for one claim."""
    assert claim.fire_at is not None, "a claim has the date of its run"
    task = version.spec.tasks[claim.idx]
    stops = task.on_lost_contact is DatabaseOutagePolicy.STOP
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
        fire_at=claim.fire_at.isoformat(),
        params_json=claim.params,
        inputs_json=claim.inputs or "{}",
        timeout_seconds=task.timeout_seconds,
        # A task that may be killed on its own must not share its process, nor one that changes its environment or has
        # secrets.
        isolation=Isolation.PROCESS if stops or granted_json or task.kind is TaskKind.PROGRAM else task.isolation,
        command=task.command,
        stop_grace_seconds=task.stop_grace_seconds,
        stops_on_lost_contact=stops,
        asks=task.asks,
        granted_json=granted_json,
    )


async def unpacked(access: EngineAccess, bundle_hash: str, folder: Path) -> tuple[Path, bool]:
    """The path of the bundle's code on this machine, fetched by its hash and verified, and whether it uses threads."""
    place = folder / bundle_hash
    is_kept = await asyncio.to_thread(keep, place)
    found = await access.bundle(bundle_hash, is_kept=is_kept)
    if found is None:
        raise NotFound(f"The code {bundle_hash[:12]} of this DAG version is not in the database. Publish it again.")
    if not is_kept:
        assert found.archive is not None, "it was asked for"
        await asyncio.to_thread(unpack, found.archive, bundle_hash, folder)
    return place, found.uses_threads


@dataclass(frozen=True, slots=True)
class Launch:
    """A claim with everything that starting it needs."""

    claim: ExchangeRow
    version: LoadedVersion
    granted_json: str = ""


class Launcher:
    """The launches of one session. A task that cannot be started ends in `state`, with the reason.

    Tasks that need secrets or large inputs are prepared in tasks of `group`, because the backends may take long to
    answer; `put` receives an event if one of them could not be started.
    """

    def __init__(
        self,
        *,
        state: RunnerState,
        executor: LocalExecutor,
        access: EngineAccess,
        grants: SecretProvider,
        put: Callable[[LaunchFailed], None],
        group: asyncio.TaskGroup,
    ) -> None:
        self._state, self._executor, self._access = state, executor, access
        self._grants, self._transfers, self._put, self._group = grants, access.transfers, put, group
        self._versions = VersionCache()
        self._delayed: list[tuple[list[Launch], float | None]] = []
        self._preparing: dict[asyncio.Task[None], ExchangeRow] = {}
        # Claimed in advance: they wait for a slot, each since then.
        self._queued: deque[tuple[AttemptOrder, float]] = deque()
        self._error: Exception | None = None

    async def start(self, claims: list[ExchangeRow], ended_at: float | None) -> None:
        """Start the tasks claimed after an attempt ended at `ended_at`. Raises when the database was unreachable, so
        that the runner pauses."""
        error, self._error = self._error, None
        launches: list[Launch] = []
        for claim in claims:
            try:
                version = await self._versions.load(self._access.version, claim.version_id)
                if needs_grants(version.spec.tasks[claim.idx]) or self._transfers.needs_download(claim.inputs):
                    task = self._group.create_task(self._prepare_and_start(claim, version))
                    self._preparing[task] = claim
                    task.add_done_callback(lambda done: self._preparing.pop(done, None))
                else:
                    launches.append(Launch(claim, version))
            except _FAILURES as failure:
                error = self._end_failed(claim, failure) or error
        if self._state.has_ended and error is None:
            self._delayed.append((launches, ended_at))
            return
        self._start_now(launches, ended_at)
        if error is not None:
            raise error

    def start_delayed(self) -> None:
        """Start the delayed tasks as soon as the caller awaits something."""
        delayed, self._delayed = self._delayed, []
        for launches, ended_at in delayed:
            asyncio.get_running_loop().call_soon(self._start_apart, launches, ended_at)

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def start_queued(self) -> None:
        """Start what was claimed in advance, as far as slots are free."""
        orders: list[AttemptOrder] = []
        while self._queued and len(orders) < self._executor.free_slots:
            orders.append(self._queued.popleft()[0])
        if orders:
            self._start_many(orders)

    def withdraw(self, ref: AttemptRef, reason: str) -> bool:
        """End an attempt that waits for a slot. False: it does not."""
        found = next((each for each in self._queued if (each[0].key, each[0].epoch) == ref), None)
        if found is None:
            return False
        self._queued.remove(found)
        self._state.end_early(*ref, OutcomeKind.KILLED, reason)
        return True

    def return_queued(self, before: float = inf) -> None:
        """Return what has waited for a slot since then: other runners may have one."""
        while self._queued and self._queued[0][1] < before:
            order = self._queued.popleft()[0]
            self._state.end_early(order.key, order.epoch, OutcomeKind.GIVEN_BACK, "claimed in advance, and not needed")

    async def stop(self) -> None:
        """The runner shuts down: return the claims that wait for a slot, their secrets or inputs."""
        self.return_queued()
        preparing = dict(self._preparing)
        for task in preparing:
            task.cancel()
        if preparing:
            await asyncio.wait(preparing)
        for task, claim in preparing.items():
            if task.cancelled():
                reason = "the runner stopped before the attempt started"
                self._state.end_early(_key(claim), claim.epoch, OutcomeKind.GIVEN_BACK, reason)

    async def _prepare_and_start(self, claim: ExchangeRow, version: LoadedVersion) -> None:
        launches: list[Launch] = []
        try:
            if self._transfers.needs_download(claim.inputs):
                await self._transfers.download(AttemptRef(_key(claim), claim.epoch), claim.inputs or "")
            holder = AttemptHolder(key=_key(claim), epoch=claim.epoch, session=self._executor.session)
            granted = await self._grants.of_task(self._access.stored(holder), version.spec.tasks[claim.idx])
            if self._state.holds(_key(claim), claim.epoch):
                launches.append(Launch(claim, version, granted))
        except Exception as failure:
            # Whatever the error: it concerns this task alone (V11). The next start raises it if the database was
            # unreachable, and the runner pauses.
            self._error = self._end_failed(claim, failure) or self._error
        self._start_apart(launches, None)

    def _end_failed(self, claim: ExchangeRow, error: Exception) -> Exception | None:
        """End a claim that cannot be started. If the task is not the cause, it is returned to the queue and the error
        is returned, so that the runner pauses instead of claiming it again at once."""
        is_ours = isinstance(error, psycopg.Error | PostgresUnavailable | ApiUnreachable | OSError)
        self._end(claim, OutcomeKind.GIVEN_BACK if is_ours else OutcomeKind.FAILED, error)
        return error if is_ours else None

    def _start_now(self, launches: list[Launch], ended_at: float | None) -> None:
        orders: list[AttemptOrder] = []
        for each in launches:
            try:
                orders.append(self._order(each))
            except (EvertickError, IndexError, ValueError) as error:
                self._end(each.claim, OutcomeKind.FAILED, error)
        room, now = self._executor.free_slots, boot_seconds()
        self._start_many(orders[:room])
        self._queued.extend((order, now) for order in orders[room:])
        if ended_at is not None:
            metrics.HANDOFF_SECONDS.observe(now - ended_at)

    def _start_many(self, orders: list[AttemptOrder]) -> None:
        try:
            self._executor.start_many(orders)
        except Conflict as error:
            # The executor is already stopping.
            for order in orders:
                self._state.end_early(order.key, order.epoch, OutcomeKind.GIVEN_BACK, str(error))

    def _start_apart(self, launches: list[Launch], ended_at: float | None) -> None:
        """Start them while the session's loop may be waiting."""
        self._start_now(launches, ended_at)
        if self._state.has_ended:
            self._put(LaunchFailed())

    def _order(self, launch: Launch) -> AttemptOrder:
        version = launch.version
        order = attempt_order(launch.claim, version, self._executor.session, launch.granted_json)
        task = version.spec.tasks[launch.claim.idx]
        branches = version.spec if task.choice is not None or task.asks else None
        self._state.describe(order.key, task.retry, f"{version.spec.name}.{task.name}", branches=branches)
        return order

    def _end(self, claim: ExchangeRow, kind: OutcomeKind, error: Exception) -> None:
        self._state.end_early(_key(claim), claim.epoch, kind, f"{type(error).__name__}: {error}")


def _key(claim: ExchangeRow) -> TaskKey:
    return TaskKey(claim.run_id, claim.idx, claim.map_index)
