"""Records how attempts ended, in the same round trip that claims new ones. Never lets one report delay the others
(V11).

A report that the database refuses is recorded as a failure with the reason; if that is refused, too, it is retried
later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import psycopg

from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.engine.extend import Held
from evertick.engine.step import Stepped
from evertick.services import metrics
from evertick.services.events import Log
from evertick.services.holding import Finished

MOST_LINES = 8

# Sends these reports, and claims up to the number of free slots.
Send = Callable[[list[Outcome], int], Awaitable[Stepped]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The database's answer, and the outcomes that it refused."""

    stepped: Stepped
    unstored: list[Outcome]


async def tell(send: Send, ended: list[Outcome], free: int, *, log: Log) -> Told:
    """One round trip; if the database refuses it, halve the batch until the refused report is isolated.

    Raises when the reports are not the cause. Sending them again is then harmless.
    """
    try:
        return Told(stepped=await send(ended, free), unstored=[])
    except psycopg.Error as error:
        if not ended or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", reports=len(ended), error=error)
        if len(ended) == 1:
            return await _tell_plainly(send, ended[0], free, str(error), log=log)
    middle = len(ended) // 2
    first, second = await tell(send, ended[:middle], 0, log=log), await tell(send, ended[middle:], free, log=log)
    return Told(
        stepped=Stepped(
            claims=second.stepped.claims,
            refused=first.stepped.refused + second.stepped.refused,
            has_more=first.stepped.has_more or second.stepped.has_more,
            is_walking=second.stepped.is_walking,
            has_arrivals=first.stepped.has_arrivals or second.stepped.has_arrivals,
        ),
        unstored=first.unstored + second.unstored,
    )


async def _tell_plainly(send: Send, outcome: Outcome, free: int, error: str, *, log: Log) -> Told:
    reason = f"the outcome could not be stored: {error}".splitlines()[0]
    plain = Outcome(key=outcome.key, epoch=outcome.epoch, kind=OutcomeKind.FAILED, reason=reason)
    try:
        return Told(stepped=await send([plain], free), unstored=[])
    except psycopg.Error as again:
        if isinstance(again, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", run=outcome.key.run_id, task=outcome.key.idx, epoch=outcome.epoch, error=again)
    # If this report is not the cause, this fails as well, and nothing was decided.
    return replace(await tell(send, [], free, log=log), unstored=[outcome])


def show_finished(finished: list[Finished], *, log: Log) -> None:
    """Log a line for each ended attempt, or one for all when they are many."""
    timed_out = sum(each.outcome.kind is OutcomeKind.TIMED_OUT for each in finished)
    if timed_out:
        metrics.TIMEOUTS.labels(kind="execution").inc(timed_out)
    if len(finished) > MOST_LINES:
        log.info("finish", attempts=len(finished))
        return
    for each in finished:
        done = each.outcome
        facts = {"run": done.key.run_id, "epoch": done.epoch, "outcome": done.kind.value}
        log.info("finish", task=each.label, **facts, seconds=round(each.seconds, 3))


def show_refused(refused: list[Held], *, log: Log) -> None:
    """Log reports of attempts that were taken away; they changed nothing."""
    metrics.STALE_WRITES_REFUSED.inc(len(refused))
    metrics.CLAIMS_LOST.inc(len(refused))
    for key, epoch in refused:
        log.warning("lease_lost", run=key.run_id, task=key.idx, epoch=epoch)
