"""The triggers of one session: leases them, runs them in the trigger processes of the executor, and reports their events.

Without triggers it does nothing: the heartbeat's reply says when some wait. One exchange at a time reports, learns and
leases; whatever its reply lost, the next one repeats. Never runs a trigger in the runner's own process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import psycopg

from evertick.attempts.protocol import TRIGGER_STOPPED
from evertick.config import Settings
from evertick.domain.attempt import AttemptOrder, AttemptRef, Isolation, Outcome, OutcomeKind
from evertick.domain.errors import ApiUnreachable, EvertickError, PostgresUnavailable
from evertick.engine.triggers import TriggerRow, encode_end
from evertick.executors.local.executor import LocalExecutor
from evertick.logs.shipper import last_lines, ship
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runner.access import EngineAccess
from evertick.runner.launch import VersionCache
from evertick.runner.state import RunnerState
from evertick.runtime.loop import run_loop

MOST_REPORTS = 500
# With `on_kill` of a trigger, which ends work elsewhere.
STOP_GRACE_SECONDS = 30.0
# A trigger that is leased elsewhere should not run here as well.
LOST_GRACE_SECONDS = 5.0
# Trigger processes that die are replaced at once; if they die again and again, after a growing pause.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, CALM_SECONDS = 0.5, 30.0, 60.0
_SELDOM_SECONDS = 3600.0
_STOP_CHECK_SECONDS = 0.02


class Triggers:
    """`held`: the session holds their leases. `ended`: their ends wait to be reported."""

    def __init__(
        self,
        settings: Settings,
        *,
        state: RunnerState,
        executor: LocalExecutor,
        access: EngineAccess,
        on_available: Callable[[], None],
        on_idle: Callable[[], None],
        log: Log,
    ) -> None:
        self._capacity, self._heartbeat_seconds = settings.runner_triggers, settings.heartbeat_seconds
        self._state, self._executor, self._access = state, executor, access
        self._on_available, self._on_idle, self._log = on_available, on_idle, log
        self._versions = VersionCache()
        self._held: set[AttemptRef] = set()
        self._dropped: set[AttemptRef] = set()
        self._ended: list[Outcome] = []
        self._late: list[Outcome] = []
        self._wake = asyncio.Event()
        self._is_exchange_due, self._sync_at = False, 0.0
        self._pause_seconds, self._died_at, self._paused_until = 0.0, 0.0, 0.0

    @property
    def count(self) -> int:
        return len(self._held)

    @property
    def is_idle(self) -> bool:
        return not self._held and not self._ended

    def lease_soon(self) -> None:
        """Triggers wait for a session that runs them."""
        if self._capacity > 0:
            self._is_exchange_due = True
            self._wake.set()

    def take(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that are not of triggers."""
        if not self._held and not self._dropped:
            return outcomes
        others: list[Outcome] = []
        for outcome in outcomes:
            ref = AttemptRef(outcome.key, outcome.epoch)
            if ref in self._held:
                self._ended.append(outcome)
            elif ref in self._dropped:
                self._dropped.discard(ref)
                self._late.append(outcome)
            else:
                others.append(outcome)
        if self._ended or self._late:
            self._wake.set()
        return others

    async def run(self) -> None:
        """Until canceled."""
        await run_loop(self._tick, wake=self._wake, name="triggers", log=self._log, is_essential=False)

    async def stop(self) -> None:
        """The runner stops, and its triggers are being ended: other runners lease them."""
        while not self.is_idle:
            self._wake.set()
            await asyncio.sleep(_STOP_CHECK_SECONDS)

    async def _tick(self) -> float:
        if self._ended:
            await self._report()
        now = boot_seconds()
        is_leaving = self._state.is_stopping or self._state.request is not None
        if is_leaving:
            self._kill(self._held, "the runner leases no triggers any more", LOST_GRACE_SECONDS)
        if self._late:
            await self._ship_late()
        if not (self._held or self._is_exchange_due):
            return _SELDOM_SECONDS
        may_lease = not is_leaving and self._state.may_claim(now) and now >= self._paused_until
        free = self._capacity - len(self._held) if may_lease else 0
        if not self._held and free <= 0:
            return max(self._paused_until - now, 0.1) if not is_leaving else _SELDOM_SECONDS
        if self._is_exchange_due or is_leaving or now >= self._sync_at:
            self._is_exchange_due, self._sync_at = False, now + self._heartbeat_seconds
            await self._exchange(free=max(free, 0))
        return 0.0 if self._ended or self._is_exchange_due else max(self._sync_at - boot_seconds(), 0.0)

    async def _report(self) -> None:
        """Events first, and without the list of what is held: they must not take longer with more triggers."""
        most, back = MOST_REPORTS, list[Outcome]()
        while reported := self._ended[:most]:
            try:
                answer = await self._access.exchange_triggers([encode_end(outcome) for outcome in reported], None, 0)
            except psycopg.DataError as error:
                if reported[0].result_json is None and most == 1:
                    raise
                # One event that cannot be stored fails its own task, and delays no other.
                if most == 1:
                    reason = f"the event could not be stored: {error}".splitlines()[0]
                    self._ended[0] = replace(reported[0], kind=OutcomeKind.FAILED, reason=reason, result_json=None)
                most = 1
                continue
            # Together, before anything else runs: the next exchange must not list what this one has ended.
            self._ended = self._ended[len(reported) :]
            self._held -= {AttemptRef(outcome.key, outcome.epoch) for outcome in reported}
            metrics.STALE_WRITES_REFUSED.inc(len(answer.refused))
            metrics.TRIGGERS.set(len(self._held))
            self._executor.settle([(outcome.key, outcome.epoch) for outcome in reported])
            self._on_available()
            for key, epoch in answer.refused:
                self._log.warning("trigger_refused", run=key.run_id, task=key.idx, epoch=epoch)
            back += [each for each in reported if each.kind not in (OutcomeKind.SUCCESS, OutcomeKind.FAILED)]
        if back:
            self._note_death(back)
        self._on_idle()

    async def _ship_late(self) -> None:
        """The last lines of triggers that were taken away, such as those of `on_kill`."""
        late, self._late = self._late, []
        chunks = [last_lines(outcome) for outcome in late if outcome.log]
        store = self._access.open_logs()
        with suppress(psycopg.Error, EvertickError, OSError):
            await ship(store, session=self._executor.session, chunks=chunks)
        await store.close()
        self._executor.settle([(outcome.key, outcome.epoch) for outcome in late])

    async def _exchange(self, *, free: int) -> None:
        answer = await self._access.exchange_triggers([], list(self._held), free)
        self._drop(answer.lost, "the trigger is leased elsewhere, or its wait is over", LOST_GRACE_SECONDS)
        self._drop(answer.stopped, TRIGGER_STOPPED, STOP_GRACE_SECONDS)
        await self._start(answer.started)
        metrics.TRIGGERS.set(len(self._held))
        self._on_idle()

    def _note_death(self, back: list[Outcome]) -> None:
        """The process of these triggers died. Their reports may need several exchanges, but it is one death."""
        if self._state.is_stopping or self._state.request is not None:
            return
        now = boot_seconds()
        is_calm = now - self._died_at > CALM_SECONDS
        self._pause_seconds = (
            0.0 if is_calm else min(LONGEST_PAUSE_SECONDS, self._pause_seconds * 2 or FIRST_PAUSE_SECONDS)
        )
        self._died_at, self._paused_until, self._is_exchange_due = now, now + self._pause_seconds, True
        self._log.warning("triggers_returned", triggers=len(back), reason=back[0].reason, retry_in=self._pause_seconds)

    def _drop(self, refs: Iterable[AttemptRef], reason: str, grace_seconds: float) -> None:
        """The database does not know them to be here any more: nothing of them is reported."""
        refs = set(refs)
        running = set(self._executor.held()) if refs else set()
        for ref in refs:
            self._held.discard(ref)
            self._ended = [each for each in self._ended if (each.key, each.epoch) != ref]
            if ref in running:
                self._dropped.add(ref)
        self._kill(self._dropped & refs, reason, grace_seconds)

    def _kill(self, refs: Iterable[AttemptRef], reason: str, grace_seconds: float) -> None:
        for key, epoch in refs:
            self._executor.kill(key, epoch, reason, grace_seconds=grace_seconds)

    async def _start(self, rows: list[TriggerRow]) -> None:
        self._held |= {row.ref for row in rows}
        orders = []
        for row in rows:
            try:
                orders.append(await self._order(row))
            except (psycopg.Error, PostgresUnavailable, ApiUnreachable, OSError) as error:
                self._give_back(row, OutcomeKind.GIVEN_BACK, error)
            except (EvertickError, IndexError, ValueError) as error:
                self._give_back(row, OutcomeKind.FAILED, error)
        try:
            self._executor.start_many(orders)
        except EvertickError as error:
            self._ended += [
                Outcome(key=order.key, epoch=order.epoch, kind=OutcomeKind.GIVEN_BACK, reason=str(error))
                for order in orders
            ]

    def _give_back(self, row: TriggerRow, kind: OutcomeKind, error: Exception) -> None:
        key, epoch = row.ref
        self._ended.append(Outcome(key=key, epoch=epoch, kind=kind, reason=f"{type(error).__name__}: {error}"))

    async def _order(self, row: TriggerRow) -> AttemptOrder:
        version = await self._versions.load(self._access.version, row.version_id)
        task = version.spec.tasks[row.idx]
        assert row.fire_at is not None, "a trigger has the date of its run"
        return AttemptOrder(
            key=row.ref.key,
            epoch=row.epoch,
            session=self._executor.session,
            attempt=row.attempt,
            dag=version.spec.name,
            task=task.name,
            version_id=row.version_id,
            bundle=version.bundle,
            file=version.file,
            fire_at=row.fire_at.isoformat(),
            params_json="{}",
            inputs_json=json.dumps({"classpath": row.classpath, "kwargs": row.kwargs, "run": row.run}),
            timeout_seconds=None,
            isolation=Isolation.WARM,
            asks=True,
            is_trigger=True,
        )
