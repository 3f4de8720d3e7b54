"""How attempts come to their end in a remote place: what is left there is taken away, what it left behind is recorded, and what
nothing is left of is given up. Each step is harmless if it is done twice.

What is provably gone is buried; what is merely not there is left to silence (V5).
"""

from __future__ import annotations

from evertick.domain.agent_outcome import parse, parse_refusal
from evertick.domain.attempt import Outcome
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable
from evertick.engine.dispatch import QueuedEnd
from evertick.engine.reap import bury
from evertick.execution.remote import Observed, Phase
from evertick.services import metrics
from evertick.services.agent_reports import record_outcome
from evertick.services.dispatch_chores import Chore
from evertick.services.submitting import Desk, in_time, name_of, never_began
from evertick.store import dispatch
from evertick.store.dispatch import DispatchRow


class RemoteEnds:
    """One session's."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def carry_out(self, chore: Chore, row: DispatchRow, seen: Observed | None) -> None:
        try:
            await self._carry_out(chore, row, seen)
        except (ExecutorBusy, ExecutorUnavailable) as error:
            # It is done again after the next look.
            metrics.DISPATCH_FAILED.labels(reason="end").inc()
            self._desk.log.warning("executor_unavailable", attempt=name_of(row), doing=chore.value, error=error)

    async def _carry_out(self, chore: Chore, row: DispatchRow, seen: Observed | None) -> None:
        match chore:
            case Chore.CLEAN:
                await self._clean(row)
            case Chore.SEE_OFF:
                await self._see_off(row)
            case Chore.STOP:
                await self._stop(row)
            case Chore.END:
                await self._end_early(row, seen)
            case Chore.LOSE:
                await self._lose(row)
            case Chore.REPORT:
                await self._report(row, seen)
            case Chore.FORCE:
                await self._force(row)
            case Chore.SUBMIT:
                raise AssertionError("handing over is not an end")

    async def _clean(self, row: DispatchRow) -> None:
        """The attempt is over: nothing of it shall be left, and nobody looks after it any more."""
        if await self._take_away(row):
            await dispatch.forget(await self._desk.link.get(), [row.session])

    async def _see_off(self, row: DispatchRow) -> None:
        """No look has seen it: it is asked for by name whether it has ended."""
        left = await in_time(self._desk.executor.find(name_of(row)))
        if left is None or left.phase is Phase.ENDED:
            await self._clean(row)

    async def _stop(self, row: DispatchRow) -> None:
        if await self._take_away(row):
            await self._desk.end(never_began(row, QueuedEnd.STOPPED, "stopped before it began"))

    async def _end_early(self, row: DispatchRow, seen: Observed | None) -> None:
        """What could not start for long counts as ended, and may start after all: if it did since the look, it is let be. If it
        does while it is being taken away, it is not left to silence: we have just ended it ourselves.
        """
        now = await in_time(self._desk.executor.find(name_of(row)))
        if now is not None and now.phase is not Phase.ENDED:
            return
        if await self._take_away(row):
            left = now or seen
            if not await self._lost(row, f"dispatch_lost: it ended before it began{_told(left)}"):
                await self._conclude(
                    row, left, "agent_lost: it was taken away as one that could not begin, and had just begun"
                )

    async def _lose(self, row: DispatchRow) -> None:
        if await in_time(self._desk.executor.find(name_of(row))) is None:
            after = round(row.tried_seconds or 0)
            await self._lost(
                row, f"dispatch_lost: its executor knows nothing of it, {after} s after it was handed over"
            )

    async def _lost(self, row: DispatchRow, reason: str) -> bool:
        """Whether it was still to begin."""
        is_lost = await self._desk.end(never_began(row, QueuedEnd.LOST, reason))
        if is_lost:
            metrics.DISPATCH_LOST.inc()
            self._desk.log.warning("dispatch_lost", attempt=name_of(row), reason=reason)
        return is_lost

    async def _report(self, row: DispatchRow, seen: Observed | None) -> None:
        """What its agent left behind counts before any guess. And a look may be older than its beginning: one that could not start
        for long counts as ended, and then it starts after all.
        """
        now = await in_time(self._desk.executor.find(name_of(row)))
        if now is not None:
            seen = now
        if seen is None or seen.phase is not Phase.ENDED:
            return
        await self._conclude(row, seen, f"agent_lost: its agent ended without a word{_told(seen)}")

    async def _conclude(self, row: DispatchRow, seen: Observed | None, reason: str) -> None:
        """With what its agent left behind, or with this reason."""
        left = None if seen is None else seen.outcome
        outcome = None if left is None else parse(left, key=row.key, epoch=row.epoch, session=row.session)
        if outcome is None:
            await self._bury(row, reason)
        else:
            await self._finish(row, outcome)

    async def _force(self, row: DispatchRow) -> None:
        if await self._take_away(row):
            await self._bury(row, "agent_lost: it did not stop when it was asked to, and was ended by its executor")

    async def _take_away(self, row: DispatchRow) -> bool:
        """Whether nothing of it goes on. What has ended and is kept there for people is the executor's own business."""
        executor, name = self._desk.executor, name_of(row)
        await in_time(executor.cancel(name, self._desk.settings.stop_grace_seconds))
        left = await in_time(executor.find(name))
        return left is None or left.phase is Phase.ENDED

    async def _bury(self, row: DispatchRow, reason: str) -> None:
        conn = await self._desk.link.get()
        infra_retries = self._desk.settings.infra_retries
        held = await bury(conn, session=row.session, reason=reason, infra_retries=infra_retries)
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
    """What the place itself says, for people."""
    if seen is None:
        return ""
    said = [seen.reason] if seen.reason else []
    if seen.exit_code is not None and seen.reason != f"exit code {seen.exit_code}":
        said.append(f"exit status {seen.exit_code}")
    if refusal := parse_refusal(seen.outcome):
        said.append(f"its agent: {refusal}")
    return f" ({', '.join(said)})" if said else ""
