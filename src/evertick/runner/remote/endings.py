"""Decides the next action for a submitted attempt, from its row in the work list and its status at the executor. No
I/O.

Never decides from an old listing: an attempt that is missing there is looked up by name first.
"""

from __future__ import annotations

from enum import StrEnum

from evertick.db.queries import runners
from evertick.db.queries.runners import DispatchRow
from evertick.domain.agent_protocol import parse, parse_refusal
from evertick.domain.attempt import Outcome
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable
from evertick.engine.remote_attempts import DispatchResult
from evertick.engine.runners import mark_runner_dead
from evertick.executors.base import Observed, Phase
from evertick.observability import metrics
from evertick.runner.remote.outcomes import record_outcome
from evertick.runner.remote.submit import RemoteContext, in_time, name_of, not_started

# A running agent calls the API at once: one that has not started for this long cannot reach it.
SPEECHLESS_SECONDS = 30.0


class Action(StrEnum):
    """`submit`: give it to the executor. `clean`: the attempt is over, delete what is left of it. `see_off`: its agent
    has reported the outcome and is exiting. `stop`: a stop was requested before it started. `end`: it ended at the
    executor before it started. `lose`: it was not seen for too long. `report`: it ran and ended at the executor.
    `force`: it did not stop in time."""

    SUBMIT = "submit"
    CLEAN = "clean"
    SEE_OFF = "see_off"
    STOP = "stop"
    END = "end"
    LOSE = "lose"
    REPORT = "report"
    FORCE = "force"


def action_for(
    row: DispatchRow, seen: Observed | None, *, lost_after_seconds: float, asked_seconds: float, grace_seconds: float
) -> Action | None:
    """`asked_seconds`: for how long the stop or the end of the attempt has been known."""
    has_ended = seen is not None and seen.phase is Phase.ENDED
    if row.state is None:
        if not row.has_finished or has_ended or asked_seconds > grace_seconds:
            return Action.CLEAN
        # An object deleted before it has ended counts as killed, and is not kept for inspection.
        return Action.SEE_OFF if seen is None else None
    if row.state == "running":
        if has_ended:
            return Action.REPORT
        return Action.FORCE if row.request is not None and asked_seconds > grace_seconds else None
    if row.request is not None:
        return Action.STOP
    if has_ended:
        return Action.END
    if not row.is_submitted:
        is_due = row.retry_seconds is None or row.retry_seconds <= 0
        return Action.SUBMIT if is_due else None
    is_late = row.tried_seconds is not None and row.tried_seconds > lost_after_seconds
    return Action.LOSE if seen is None and is_late else None


def trouble_of(row: DispatchRow, seen: Observed | None, *, running_seconds: float, api_url: str) -> str | None:
    """Why a submitted attempt has not started, for people. `running_seconds`: for how long the executor has reported it
    as running."""
    if row.state != "queued" or not row.is_submitted or seen is None:
        return None
    if seen.phase is Phase.WAITING:
        return seen.reason
    if seen.phase is not Phase.RUNNING or running_seconds < SPEECHLESS_SECONDS:
        return None
    return (
        f"it is running at the executor but does not reach the API at {api_url}. Check that this address is reachable from there"
        " (EVERTICK_AGENT_API_URL of the runner), and see its own output. Once that is fixed, clear the task to start it again"
    )


class Endings:
    """The endings of one session."""

    def __init__(self, desk: RemoteContext) -> None:
        self._desk = desk

    async def carry_out(self, chore: Action, row: DispatchRow, seen: Observed | None) -> None:
        try:
            await self._carry_out(chore, row, seen)
        except (ExecutorBusy, ExecutorUnavailable) as error:
            # It is repeated after the next listing.
            metrics.DISPATCH_FAILED.labels(reason="end").inc()
            self._desk.log.warning("executor_unavailable", attempt=name_of(row), doing=chore.value, error=error)

    async def _carry_out(self, chore: Action, row: DispatchRow, seen: Observed | None) -> None:
        match chore:
            case Action.CLEAN:
                await self._clean(row)
            case Action.SEE_OFF:
                await self._see_off(row)
            case Action.STOP:
                await self._stop(row)
            case Action.END:
                await self._end_early(row, seen)
            case Action.LOSE:
                await self._lose(row)
            case Action.REPORT:
                await self._report(row, seen)
            case Action.FORCE:
                await self._force(row)
            case Action.SUBMIT:
                raise AssertionError("submitting is not an ending")

    async def _clean(self, row: DispatchRow) -> None:
        """The attempt is over: delete everything that is left of it, and stop watching it."""
        if await self._take_away(row):
            await runners.forget(await self._desk.link.get(), [row.session])

    async def _see_off(self, row: DispatchRow) -> None:
        """No listing has shown it: ask for it by name, whether it has ended."""
        left = await in_time(self._desk.executor.find(name_of(row)))
        if left is None or left.phase is Phase.ENDED:
            await self._clean(row)

    async def _stop(self, row: DispatchRow) -> None:
        if await self._take_away(row):
            await self._desk.end(not_started(row, DispatchResult.STOPPED, "stopped before it started"))

    async def _end_early(self, row: DispatchRow, seen: Observed | None) -> None:
        """An attempt that could not start for long counts as ended, but may start after all: if it has since the
        listing, it is left alone. If it starts while it is being deleted, its loss is recorded at once: this runner has
        just ended it."""
        now = await in_time(self._desk.executor.find(name_of(row)))
        if now is not None and now.phase is not Phase.ENDED:
            return
        if await self._take_away(row):
            left = now or seen
            if not await self._lost(row, f"dispatch_lost: it ended before it started{_told(left)}"):
                await self._conclude(
                    row, left, "agent_lost: it was deleted because it could not start, and had just started"
                )

    async def _lose(self, row: DispatchRow) -> None:
        if await in_time(self._desk.executor.find(name_of(row))) is None:
            after = round(row.tried_seconds or 0)
            await self._lost(row, f"dispatch_lost: its executor does not know it, {after} s after it was submitted")

    async def _lost(self, row: DispatchRow, reason: str) -> bool:
        """Returns whether it had yet to start."""
        is_lost = await self._desk.end(not_started(row, DispatchResult.LOST, reason))
        if is_lost:
            metrics.DISPATCH_LOST.inc()
            self._desk.log.warning("dispatch_lost", attempt=name_of(row), reason=reason)
        return is_lost

    async def _report(self, row: DispatchRow, seen: Observed | None) -> None:
        """An outcome that its agent left behind takes precedence. And a listing may be older than the start: an attempt
        that could not start for long counts as ended, and may start after all."""
        now = await in_time(self._desk.executor.find(name_of(row)))
        if now is not None:
            seen = now
        if seen is None or seen.phase is not Phase.ENDED:
            return
        await self._conclude(row, seen, f"agent_lost: its agent ended without reporting an outcome{_told(seen)}")

    async def _conclude(self, row: DispatchRow, seen: Observed | None, reason: str) -> None:
        """Record the outcome that its agent left behind, or this reason."""
        left = None if seen is None else seen.outcome
        outcome = None if left is None else parse(left, key=row.key, epoch=row.epoch, session=row.session)
        if outcome is None:
            await self._bury(row, reason)
        else:
            await self._finish(row, outcome)

    async def _force(self, row: DispatchRow) -> None:
        if await self._take_away(row):
            await self._bury(row, "agent_lost: it did not stop when asked to, and was killed by its executor")

    async def _take_away(self, row: DispatchRow) -> bool:
        """Returns whether no part of it is running. Whether ended ones are kept for inspection is up to the executor."""
        executor, name = self._desk.executor, name_of(row)
        await in_time(executor.cancel(name, self._desk.settings.stop_grace_seconds))
        left = await in_time(executor.find(name))
        return left is None or left.phase is Phase.ENDED

    async def _bury(self, row: DispatchRow, reason: str) -> None:
        conn = await self._desk.link.get()
        infra_retries = self._desk.settings.infra_retries
        held = await mark_runner_dead(conn, session=row.session, reason=reason, infra_retries=infra_retries)
        if held:
            metrics.AGENT_LOST.inc(held)
            self._desk.log.warning("bury", attempt=name_of(row), reason=reason)
            self._desk.wake()

    async def _finish(self, row: DispatchRow, outcome: Outcome) -> None:
        desk, infra_retries = self._desk, self._desk.settings.infra_retries
        desk.log.info("outcome_found", attempt=name_of(row), outcome=outcome.kind.value)
        await record_outcome(
            desk.link, desk.versions, outcome, session=row.session, infra_retries=infra_retries, log=desk.log
        )
        desk.wake()


def _told(seen: Observed | None) -> str:
    """The executor's own description, for people."""
    if seen is None:
        return ""
    said = [seen.reason] if seen.reason else []
    if seen.exit_code is not None and seen.reason != f"exit code {seen.exit_code}":
        said.append(f"exit status {seen.exit_code}")
    if refusal := parse_refusal(seen.outcome):
        said.append(f"its agent: {refusal}")
    return f" ({', '.join(said)})" if said else ""
