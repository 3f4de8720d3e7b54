"""The next action for a submitted attempt, and how remote attempts end: what is left at the executor is deleted, the
outcome left behind is recorded, and an attempt without any trace is recorded as lost. Each action may be repeated.

The decision does no I/O. An attempt that is missing in a listing is looked up by name first; one that is provably gone
is marked dead; one that is merely not visible is left to the heartbeat timeout (V5).
"""

from __future__ import annotations

from enum import StrEnum

from evertick.db.queries.runners import DispatchRow
from evertick.domain.agent_protocol import parse, parse_refusal
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable
from evertick.engine.remote_attempts import DispatchResult, delete_dispatches
from evertick.engine.runners import mark_runner_dead
from evertick.executors.base import Observed, Phase
from evertick.observability import metrics
from evertick.runner.remote.outcomes import record_outcome
from evertick.runner.remote.submit import RemoteContext, in_time, name_of, never_began

# A running agent calls the API at once: one that has not started for this long cannot reach it.
UNREACHABLE_API_SECONDS = 30.0


class Action(StrEnum):
    """`submit`: give it to the executor. `clean_up`: the attempt is over, delete what is left of it. `confirm_end`: its
    agent has reported the outcome and is exiting. `stop`: a stop was requested before it started. `record_early_end`:
    it ended at the executor before it started. `mark_lost`: it was not seen for too long. `record_end`: it ran and
    ended at the executor, or its agent is silent and has left an outcome. `kill`: it did not stop in time."""

    SUBMIT = "submit"
    CLEAN_UP = "clean_up"
    CONFIRM_END = "confirm_end"
    STOP = "stop"
    RECORD_EARLY_END = "record_early_end"
    MARK_LOST = "mark_lost"
    RECORD_END = "record_end"
    KILL = "kill"


def action_for(
    row: DispatchRow, seen: Observed | None, *, lost_after_seconds: float, asked_seconds: float, grace_seconds: float
) -> Action | None:
    """`asked_seconds`: for how long the stop or the end of the attempt has been known."""
    has_ended = seen is not None and seen.phase is Phase.ENDED
    if row.state is None:
        if not row.has_finished or has_ended or asked_seconds > grace_seconds:
            return Action.CLEAN_UP
        # An object deleted before it has ended counts as killed, and is not kept for inspection.
        return Action.CONFIRM_END if seen is None else None
    if row.state == "running":
        if has_ended or (row.is_silent and seen is not None and seen.outcome is not None):
            return Action.RECORD_END
        return Action.KILL if row.request is not None and asked_seconds > grace_seconds else None
    if row.request is not None:
        return Action.STOP
    if has_ended:
        return Action.RECORD_EARLY_END
    if not row.is_submitted:
        is_due = row.retry_seconds is None or row.retry_seconds <= 0
        return Action.SUBMIT if is_due else None
    is_late = row.tried_seconds is not None and row.tried_seconds > lost_after_seconds
    return Action.MARK_LOST if seen is None and is_late else None


def problem_of(row: DispatchRow, seen: Observed | None, *, running_seconds: float, api_url: str) -> str | None:
    """Why a submitted attempt has not started, for people. `running_seconds`: for how long the executor has reported it
    as running."""
    if row.state != "queued" or not row.is_submitted or seen is None:
        return None
    if seen.phase is Phase.WAITING:
        return seen.reason
    if seen.phase is not Phase.RUNNING or running_seconds < UNREACHABLE_API_SECONDS:
        return None
    return (
        f"it is running at the executor but does not reach the API at {api_url}. Check that this address is reachable from there"
        " (EVERTICK_AGENT_API_URL of the runner), and see its own output. Once that is fixed, clear the task to start it again"
    )


class Endings:
    """The endings of one session."""

    def __init__(self, context: RemoteContext) -> None:
        self._context = context

    async def carry_out(self, action: Action, row: DispatchRow, seen: Observed | None) -> None:
        try:
            match action:
                case Action.CLEAN_UP:
                    await self._clean_up(row)
                case Action.CONFIRM_END:
                    await self._confirm_end(row)
                case Action.STOP:
                    await self._stop(row)
                case Action.RECORD_EARLY_END:
                    await self._record_early_end(row, seen)
                case Action.MARK_LOST:
                    await self._mark_lost(row)
                case Action.RECORD_END:
                    await self._record_end(row, seen)
                case Action.KILL:
                    await self._kill(row)
                case Action.SUBMIT:
                    raise AssertionError("submitting is not an ending")
        except (ExecutorBusy, ExecutorUnavailable) as error:
            # It is repeated after the next listing.
            metrics.DISPATCH_FAILED.labels(reason="end").inc()
            self._context.log.warning("executor_unavailable", attempt=name_of(row), doing=action.value, error=error)

    async def _clean_up(self, row: DispatchRow) -> None:
        """The attempt is over: delete everything that is left of it, and stop watching it."""
        if await self._delete(row):
            await delete_dispatches(await self._context.link.get(), [row.session])

    async def _confirm_end(self, row: DispatchRow) -> None:
        """No listing has shown it: ask for it by name, whether it has ended."""
        left = await in_time(self._context.executor.find(name_of(row)))
        if left is None or left.phase is Phase.ENDED:
            await self._clean_up(row)

    async def _stop(self, row: DispatchRow) -> None:
        if await self._delete(row):
            await self._context.record_early_end(never_began(row, DispatchResult.STOPPED, "stopped before it started"))

    async def _record_early_end(self, row: DispatchRow, seen: Observed | None) -> None:
        """An attempt that could not start for long counts as ended, but may start after all: if it has since the
        listing, it is left alone. If it starts while it is being deleted, its loss is recorded at once: this runner has
        just ended it."""
        now = await in_time(self._context.executor.find(name_of(row)))
        if now is not None and now.phase is not Phase.ENDED:
            return
        if await self._delete(row):
            left = now or seen
            if not await self._record_lost(row, f"dispatch_lost: it ended before it started{_described(left)}"):
                await self._record_left(
                    row, left, "agent_lost: it was deleted because it could not start, and had just started"
                )

    async def _mark_lost(self, row: DispatchRow) -> None:
        if await in_time(self._context.executor.find(name_of(row))) is None:
            after = round(row.tried_seconds or 0)
            await self._record_lost(
                row, f"dispatch_lost: its executor does not know it, {after} s after it was submitted"
            )

    async def _record_lost(self, row: DispatchRow, reason: str) -> bool:
        """Returns whether it had yet to start."""
        is_lost = await self._context.record_early_end(never_began(row, DispatchResult.LOST, reason))
        if is_lost:
            metrics.DISPATCH_LOST.inc()
            self._context.log.warning("dispatch_lost", attempt=name_of(row), reason=reason)
        return is_lost

    async def _record_end(self, row: DispatchRow, seen: Observed | None) -> None:
        """An outcome that its agent left behind takes precedence, also while the agent lives and does not reach the
        API. And a listing may be older than the start: an attempt that could not start for long counts as ended, and
        may start after all."""
        now = await in_time(self._context.executor.find(name_of(row)))
        if now is not None:
            seen = now
        if seen is None:
            return
        if seen.phase is not Phase.ENDED:
            # What a live agent leaves may be half written, or a note that its large result is still on its way.
            outcome = _left_in(row, seen)
            if outcome is not None and outcome.kind is not OutcomeKind.LOST:
                await self._finish(row, outcome)
            return
        await self._record_left(
            row, seen, f"agent_lost: its agent ended without reporting an outcome{_described(seen)}"
        )

    async def _record_left(self, row: DispatchRow, seen: Observed | None, reason: str) -> None:
        """Record the outcome that its agent left behind, or this reason."""
        outcome = None if seen is None else _left_in(row, seen)
        if outcome is None:
            await self._mark_dead(row, reason)
        else:
            await self._finish(row, outcome)

    async def _kill(self, row: DispatchRow) -> None:
        if await self._delete(row):
            await self._mark_dead(row, "agent_lost: it did not stop when asked to, and was killed by its executor")

    async def _delete(self, row: DispatchRow) -> bool:
        """Returns whether no part of it is running. Whether ended ones are kept for inspection is up to the executor."""
        executor, name = self._context.executor, name_of(row)
        await in_time(executor.cancel(name, self._context.settings.stop_grace_seconds))
        left = await in_time(executor.find(name))
        return left is None or left.phase is Phase.ENDED

    async def _mark_dead(self, row: DispatchRow, reason: str) -> None:
        conn = await self._context.link.get()
        infra_retries = self._context.settings.infra_retries
        held = await mark_runner_dead(conn, session=row.session, reason=reason, infra_retries=infra_retries)
        if held:
            metrics.AGENT_LOST.inc(held)
            self._context.log.warning("runner_declared_dead", attempt=name_of(row), reason=reason)
            self._context.notify()

    async def _finish(self, row: DispatchRow, outcome: Outcome) -> None:
        context, infra_retries = self._context, self._context.settings.infra_retries
        context.log.info("outcome_recovered", attempt=name_of(row), outcome=outcome.kind.value)
        await record_outcome(
            context.link, context.versions, outcome, session=row.session, infra_retries=infra_retries, log=context.log
        )
        context.notify()


def _left_in(row: DispatchRow, seen: Observed) -> Outcome | None:
    left = seen.outcome
    return None if left is None else parse(left, key=row.key, epoch=row.epoch, session=row.session)


def _described(seen: Observed | None) -> str:
    """The executor's own description, for people."""
    if seen is None:
        return ""
    said = [seen.reason] if seen.reason else []
    if seen.exit_code is not None and seen.reason != f"exit code {seen.exit_code}":
        said.append(f"exit status {seen.exit_code}")
    if refusal := parse_refusal(seen.outcome):
        said.append(f"its agent: {refusal}")
    return f" ({', '.join(said)})" if said else ""
