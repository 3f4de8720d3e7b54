"""One fleet: as many runners on its engine as its queues need. One launcher at a time leads it, by its epoch.

All state is in the database and at the engine: a row precedes each submission, names are keys, and secrets are derived
from names, so that the next launcher continues anywhere. The tick uses only the database; calls to the engine run apart.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel, notify
from evertick.db.queries import runner_tokens
from evertick.domain.agent_protocol import is_launched_name, launched_name, parse_name
from evertick.domain.engine_options import ENGINE_OPTIONS
from evertick.domain.errors import EvertickError, ExecutorBusy, ExecutorUnavailable, NotLeader, SubmissionRefused
from evertick.domain.executor_options import POD_OPTIONS
from evertick.domain.fleets import Fleet, Pilot, PilotState, Scaler
from evertick.engine.runner_tokens import (
    PREFIX,
    PilotRow,
    SeenPilot,
    add_pilots,
    end_pilot,
    leave_fleet,
    note_fleet,
    pilots_of,
    renew_fleet_lease,
    withdraw_pilot,
)
from evertick.executors.base import Observed, Phase, RunnerOrder
from evertick.executors.registry import api_url_for_agents, open_executor
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.processes.tree import kill_orphans
from evertick.runner.remote.submit import as_trouble, in_time
from evertick.runner.remote.worker_pool import SubmissionBackoff, WorkerPool
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import back_off, in_background, run_loop
from evertick.secrets.agent_tokens import load_agent_keys

# A notification for each new task must not make it read the queues more often.
SHORTEST_TICK_SECONDS = 0.2
LIST_TICKS, LONGEST_LIST_SECONDS = 5, 5.0
# A runner that runs at the engine and does not join, or not again, is of no use.
LONGEST_JOIN_SECONDS = 300.0
# A job may wait for long before it starts, and then works for its lifetime.
TOKEN_SPARE_SECONDS = 7 * 86_400.0
KILL_ORPHANS_SECONDS = 2.0
# Before the limit of a Slurm job: what runs then is returned in time.
_LAST_SIGNAL = "--signal=B:TERM@60"


def engine_settings(settings: Settings, fleet: Fleet) -> Settings:
    """Those of the fleet's executor. The operator wrote the options: none is forbidden. Each fleet is an owner of its
    own, so that neither another fleet nor a runner with an executor takes its objects for orphans."""
    return replace(
        settings,
        home=settings.home.absolute() / "fleets" / fleet.name,
        executor=fleet.engine,
        executor_owner=f"{settings.executor_owner}.{fleet.name}",
        executor_options=ENGINE_OPTIONS.get(fleet.engine, ()),
        pod_options=POD_OPTIONS,
    )


def place_of(fleet: Fleet) -> dict[str, object]:
    options = dict(fleet.options)
    if fleet.engine == "slurm" and "time" in options:
        given: Any = options.get("arguments", [])
        options["arguments"] = [*given, _LAST_SIGNAL]
    return {fleet.engine: options}


def variables_of(fleet: Fleet, settings: Settings) -> dict[str, str]:
    """The settings of its runners. One that its launcher has forgotten leaves by itself, unless it is to stay."""
    return {
        "EVERTICK_RUNNER_QUEUES": ",".join(fleet.queues),
        "EVERTICK_RUNNER_SLOTS": str(fleet.slots),
        "EVERTICK_RUNNER_NAME": fleet.name,
        "EVERTICK_RUNNER_IDLE_SECONDS": "0" if fleet.least else str(2 * fleet.idle_seconds),
        "EVERTICK_RUNNER_UNTIL_SECONDS": str(fleet.lifetime_seconds),
        "EVERTICK_HEARTBEAT_SECONDS": str(settings.heartbeat_seconds),
        "EVERTICK_LOST_AFTER_SECONDS": str(settings.lost_after_seconds),
        "EVERTICK_STOP_GRACE_SECONDS": str(settings.stop_grace_seconds),
        "EVERTICK_HEALTH": "off",
        "EVERTICK_LOG": "json",
    }


class FleetLeader:
    """Raises InvalidSettings for an engine that cannot be used, at startup."""

    def __init__(self, settings: Settings, fleet: Fleet, *, url: str, owner: str, log: Log, is_first: bool) -> None:
        """The loop of the first fleet is the service's main loop, and all are essential."""
        self.fleet, self.wake = fleet, asyncio.Event()
        self._loop = "launcher" if is_first else f"fleet {fleet.name}"
        self._settings, self._owner = engine_settings(settings, fleet), owner
        self._log = log.bind(fleet=fleet.name)
        self._api_url, self._keys = api_url_for_agents(self._settings), load_agent_keys(settings)
        self._executor = open_executor(self._settings)
        self._link, self._side = (ReconnectingConnection(url, Purpose.SCHEDULER) for _ in range(2))
        self._pool = WorkerPool(
            name="launch", workers=settings.dispatch_workers, queue=10 * fleet.most, wake=self.wake, log=self._log
        )
        self._backoff = SubmissionBackoff()
        self._epoch: int | None = None
        self._renew_at = self._ticked_at = 0.0
        self._scaler = Scaler(fleet, boot_seconds())
        self._desired = 0
        # Why the last runner could not be started; why the engine cannot be asked; which runners have joined.
        self._trouble: str | None = None
        self._outage: str | None = None
        self._joined: set[str] = set()
        # Accepted by the engine; a row that was read at that moment does not say so yet.
        self._submitted: set[str] = set()
        self._noted: tuple[int, str | None] | None = None
        # The latest listing, and how many there were; the listing after which each runner's last action was chosen.
        self._look = asyncio.Event()
        self._listing: Mapping[str, Observed] | None = None
        self._listings = 0
        self._acted_on: dict[str, int] = {}
        self._unjoined_since: dict[str, float] = {}
        self._orphans: set[str] = set()

    async def run(self, stop: asyncio.Event) -> None:
        seconds = min(LIST_TICKS * self._settings.tick_seconds, LONGEST_LIST_SECONDS)

        async def look() -> float:
            await self._list()
            return seconds

        looking = run_loop(look, wake=self._look, name="observe", log=self._log, is_essential=False)
        async with self._executor, in_background(self._pool.run(), looking, self._listen()):
            await run_loop(self._tick, wake=self.wake, stop=stop, name=self._loop, log=self._log)
            with suppress(psycopg.Error, EvertickError, OSError):
                if self._epoch is not None:
                    await leave_fleet(await self._link.get(), self.fleet.name, epoch=self._epoch)
        for link in (self._link, self._side):
            await link.close()

    # The decision

    async def _tick(self) -> float:
        await asyncio.sleep(max(0.0, self._ticked_at + SHORTEST_TICK_SECONDS - boot_seconds()))
        self.wake.clear()
        self._ticked_at = now = boot_seconds()
        conn = await self._link.get()
        if not await self._renew_lease(conn, now):
            return self._settings.tick_seconds
        try:
            return await self._decide(conn, now)
        except NotLeader:
            self._lose()
            return self._settings.tick_seconds

    async def _renew_lease(self, conn: psycopg.AsyncConnection, now: float) -> bool:
        if self._epoch is not None and now < self._renew_at:
            return True
        # The lease is renewed once per tick.
        fleet, seconds = self.fleet, max(self._settings.fleet_lease_seconds, 3 * self._settings.tick_seconds)
        spec: dict[str, object] = {"engine": fleet.engine, "queues": list(fleet.queues)}
        spec |= {"least": fleet.least, "most": fleet.most, "slots": fleet.slots}
        had = self._epoch
        epoch = await renew_fleet_lease(conn, fleet.name, leader=self._owner, epoch=had, seconds=seconds, spec=spec)
        if epoch is None:
            self._lose()
            return False
        self._epoch, self._renew_at = epoch, now + seconds / 3
        if epoch != had:
            # What an earlier leader of this process observed is too old to decide by.
            self._scaler, self._listing, self._noted = Scaler(fleet, now), None, None
            self._look.set()
            self._log.info("fleet_leadership_acquired", epoch=epoch, engine=fleet.engine)
        return True

    def _lose(self) -> None:
        if self._epoch is not None:
            self._log.warning("fleet_leadership_lost", epoch=self._epoch)
        self._epoch, self._listing = None, None

    async def _decide(self, conn: psycopg.AsyncConnection, now: float) -> float:
        fleet, epoch = self.fleet, self._epoch
        assert epoch is not None
        listing, listings = self._listing, self._listings
        rows = {row.name: row for row in await pilots_of(conn, fleet.name)}
        self._note_joined(rows)
        load = await runner_tokens.fleet_load(conn, queues=list(fleet.queues), cap=fleet.most * fleet.slots)
        for row in rows.values():
            self._act(row, listing, listings, now)
        self._act_on_orphans(rows, listing, listings)
        pilots = [self._judged(row) for row in rows.values()]
        running = sum(each.busy for each in pilots if each.state is PilotState.RUNNING)
        plan = self._scaler.plan(pilots, queued=load.queued + load.triggers, running=running, now=now)
        self._desired = plan.desired
        await self._note(conn, rows, listing, epoch)
        for name in plan.drain:
            done = await withdraw_pilot(conn, fleet.name, epoch=epoch, name=name)
            self._log.info("launched_runner_released", name=name, state=done)
        if plan.drain:
            await notify(conn, Channel.STOP)
        if not plan.start or not self._backoff.is_over:
            return self._settings.tick_seconds
        return await self._add(conn, epoch, plan.start)

    async def _add(self, conn: psycopg.AsyncConnection, epoch: int, count: int) -> float:
        fleet = self.fleet
        names = [launched_name(fleet.name, secrets.randbits(64)) for _ in range(count)]
        added = await add_pilots(
            conn,
            fleet.name,
            epoch=epoch,
            token_seconds=fleet.lifetime_seconds + TOKEN_SPARE_SECONDS,
            secrets={name: self._secret(name) for name in names},
        )
        self._log.info("runners_requested", count=len(added), desired=self._desired)
        for row in (_new_row(name) for name in added if self._listing is not None):
            # The next tick would submit them, too; a task waits for it.
            self._pool.enqueue(_key(row.name), partial(self._submit, row))
        return self._settings.tick_seconds

    def _judged(self, row: PilotRow) -> Pilot:
        is_leaving = row.is_withdrawn or row.is_expired or row.request is not None
        if row.session is None:
            # One that has joined before is about to end, or to join again.
            is_leaving, state = is_leaving or row.has_joined, PilotState.STARTING
        else:
            is_leaving = is_leaving or (row.joined_seconds or 0.0) >= self.fleet.lifetime_seconds
            state = PilotState.RUNNING
        return Pilot(name=row.name, state=PilotState.DRAINING if is_leaving else state, busy=row.busy)

    def _act(self, row: PilotRow, listing: Mapping[str, Observed] | None, listings: int, now: float) -> None:
        """Schedule the next call to the engine for this runner; one for each listing."""
        key = _key(row.name)
        if self._pool.has(key) or listing is None:
            return
        seen = listing.get(row.name)
        is_waiting_to_join = seen is not None and seen.phase is Phase.RUNNING and row.session is None
        since = self._unjoined_since.setdefault(row.name, now) if is_waiting_to_join else now
        if not is_waiting_to_join:
            self._unjoined_since.pop(row.name, None)
        if not (row.is_submitted or row.is_withdrawn or row.name in self._submitted):
            if self._backoff.is_over:
                self._pool.enqueue(key, partial(self._submit, row))
            return
        is_over = row.is_withdrawn or seen is None or seen.phase is Phase.ENDED
        is_useless = now - since >= LONGEST_JOIN_SECONDS
        if (is_over or is_useless) and self._acted_on.get(row.name) != listings:
            self._acted_on[row.name] = listings
            self._pool.enqueue(key, partial(self._remove, row, is_useless=is_useless))

    def _act_on_orphans(
        self, rows: Mapping[str, PilotRow], listing: Mapping[str, Observed] | None, listings: int
    ) -> None:
        """Rows are read after the listing: an object without one was left behind by a launcher that was replaced, and
        cannot join. Twice in a row, because one that was just ended stays visible for a moment."""
        if listing is None or self._acted_on.get("") == listings:
            return
        self._acted_on[""] = listings
        here = {
            name
            for name, each in listing.items()
            if self._is_mine(name) and not (each.phase is Phase.ENDED and each.is_being_deleted)
        }
        found = here - rows.keys()
        for name in found & self._orphans:
            self._pool.enqueue(_key(name), partial(self._remove_orphan, name))
        self._orphans = found

    def _note_joined(self, rows: Mapping[str, PilotRow]) -> None:
        """Also forgets what has ended."""
        joined = {name for name, row in rows.items() if row.session is not None}
        if joined - self._joined:
            self._trouble = None
            self._backoff.note_success()
        self._joined = joined
        self._submitted &= rows.keys()
        self._acted_on = {name: count for name, count in self._acted_on.items() if name in rows or not name}
        self._unjoined_since = {name: at for name, at in self._unjoined_since.items() if name in rows}

    async def _note(
        self,
        conn: psycopg.AsyncConnection,
        rows: Mapping[str, PilotRow],
        listing: Mapping[str, Observed] | None,
        epoch: int,
    ) -> None:
        changed = []
        for name, row in rows.items():
            seen = (listing or {}).get(name)
            if seen is None or seen.phase is Phase.ENDED:
                continue
            reason = None if seen.reason is None else as_trouble(seen.reason)
            if (row.phase, row.reason, row.is_submitted) != (seen.phase.value, reason, True):
                changed.append(SeenPilot(name=name, phase=seen.phase.value, reason=reason, is_submitted=True))
        now = (self._desired, self._outage or self._trouble)
        if changed or now != self._noted:
            await self._write(conn, epoch, changed)
            self._noted = now

    async def _write(self, conn: psycopg.AsyncConnection, epoch: int, seen: Sequence[SeenPilot]) -> None:
        trouble = self._outage or self._trouble
        await note_fleet(conn, self.fleet.name, epoch=epoch, desired=self._desired, trouble=trouble, seen=seen)

    # Calls to the engine, in the worker pool

    async def _submit(self, row: PilotRow) -> None:
        fleet = self.fleet
        order = RunnerOrder(
            name=row.name,
            session=_key(row.name),
            fleet=fleet.name,
            queue=fleet.queues[0],
            token=self._secret(row.name),
            api_url=self._api_url,
            place=place_of(fleet),
            given=variables_of(fleet, self._settings),
        )
        try:
            await in_time(self._executor.submit(order))
        except SubmissionRefused as error:
            self._fail(row.name, error, None)
            await self._end(row, str(error))
            return
        except ExecutorBusy as error:
            return self._fail(row.name, error, error.retry_after_seconds)
        except EvertickError as error:
            return self._fail(row.name, error, None)
        self._submitted.add(row.name)
        self._log.info("runner_launched", name=row.name, queues=",".join(fleet.queues))
        seen = SeenPilot(name=row.name, phase="waiting", reason=None, is_submitted=True)
        if (epoch := self._epoch) is not None:
            await self._write(await self._side.get(), epoch, [seen])
            self._look.set()

    async def _remove(self, row: PilotRow, *, is_useless: bool) -> None:
        """It has ended, or it is to be removed; the engine, asked by name, decides."""
        try:
            found = await in_time(self._executor.find(row.name))
            if found is not None and found.phase is not Phase.ENDED:
                if row.is_withdrawn or is_useless:
                    await in_time(self._executor.cancel(row.name, self._settings.stop_grace_seconds))
                    self._look.set()
                return
            if found is None and self._sends_heartbeats(row):
                # The engine has forgotten a runner that lives: it leaves by itself, or its heartbeats end.
                return
        except (ExecutorBusy, ExecutorUnavailable) as error:
            self._log.warning("executor_unavailable", name=row.name, error=error)
            return
        reason = "it is gone" if found is None else found.reason or f"exit code {found.exit_code}"
        if not row.has_joined and not row.is_withdrawn:
            # Its image, its options or its way to the API are wrong: the next will fare no better.
            self._fail(row.name, EvertickError(f"the last one ended before it joined: {reason}"), None)
        await self._end(row, reason)
        # Also where the engine knows nothing of it: Slurm's folder of the job is still there.
        await self._remove_orphan(row.name)

    def _sends_heartbeats(self, row: PilotRow) -> bool:
        silent_seconds = row.silent_seconds
        return silent_seconds is not None and silent_seconds < self._settings.lost_after_seconds / 2

    async def _end(self, row: PilotRow, reason: str) -> None:
        if (epoch := self._epoch) is None:
            return
        if self.fleet.engine == "process" and row.session is not None:
            # In a container, a job or a pod nothing outlives its first process.
            await asyncio.to_thread(kill_orphans, row.session, within_seconds=KILL_ORPHANS_SECONDS)
        taken = await end_pilot(
            await self._side.get(),
            self.fleet.name,
            epoch=epoch,
            name=row.name,
            reason=as_trouble(f"agent_lost: runner {row.name} ended: {reason}"),
            infra_retries=self._settings.infra_retries,
        )
        if taken is None:
            return
        if taken:
            self._log.warning("runner_lost", name=row.name, attempts=taken, reason=reason)
            await notify(await self._side.get(), Channel.TASKS)
        else:
            self._log.info("launched_runner_ended", name=row.name, reason=reason)

    async def _remove_orphan(self, name: str) -> None:
        try:
            await in_time(self._executor.cancel(name, self._settings.stop_grace_seconds))
        except (ExecutorBusy, ExecutorUnavailable) as error:
            self._log.warning("executor_unavailable", name=name, error=error)

    def _fail(self, name: str, error: EvertickError, at_least_seconds: float | None) -> None:
        self._trouble = as_trouble(str(error))
        seconds = self._backoff.note_failure(at_least_seconds)
        self._log.warning("runner_launch_failed", name=name, error=error, retry_in=seconds)

    # Observing

    async def _list(self) -> None:
        self._look.clear()
        if self._epoch is None:
            return
        try:
            found = await in_time(self._executor.observe())
        except (ExecutorBusy, ExecutorUnavailable) as error:
            self._outage = as_trouble(str(error))
            self._log.warning("executor_unavailable", error=error)
            return
        self._outage = None
        self._listing, self._listings = found, self._listings + 1
        self.wake.set()

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                async for _ in self._executor.hints():
                    failures = 0
                    self._look.set()
            except (EvertickError, OSError) as error:
                self._log.warning("listen_failed", error=error)
            failures += 1
            await asyncio.sleep(back_off(failures))

    def _is_mine(self, name: str) -> bool:
        return is_launched_name(name) and name.rpartition("-")[0] == f"er-{self.fleet.name}"

    def _secret(self, name: str) -> str:
        return PREFIX + self._keys.derive(name)


def _key(name: str) -> int:
    attempt = parse_name(name)
    assert attempt is not None
    return attempt.session


def _new_row(name: str) -> PilotRow:
    """Of a runner that was just added."""
    return PilotRow(
        name=name,
        phase="waiting",
        reason=None,
        is_submitted=False,
        is_withdrawn=False,
        has_joined=False,
        is_expired=False,
        session=None,
        request=None,
        busy=0,
        slots=None,
        joined_seconds=None,
        silent_seconds=None,
    )
