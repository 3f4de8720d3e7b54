"""Stores how attempts ended, in one round trip with the claim of new ones. Never lets one report hold up the others (V11).

What the database refuses as it stands is stored as a failure with the reason; what it refuses even so is tried again later.
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

# Sends these reports, and claims as much as that is free.
Send = Callable[[list[Outcome], int], Awaitable[Stepped]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the database answered, and which outcomes it would not take."""

    stepped: Stepped
    unstored: list[Outcome]


async def tell(send: Send, ended: list[Outcome], free: int, *, log: Log) -> Told:
    """One round trip; if the database refuses it, halve until what it refuses stands alone.

    Raises when the trouble is not in the reports. Sending them again is harmless then.
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
    reason = f"its outcome could not be stored: {error}".splitlines()[0]
    plain = Outcome(key=outcome.key, epoch=outcome.epoch, kind=OutcomeKind.FAILED, reason=reason)
    try:
        return Told(stepped=await send([plain], free), unstored=[])
    except psycopg.Error as again:
        if isinstance(again, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", run=outcome.key.run_id, task=outcome.key.idx, epoch=outcome.epoch, error=again)
    # If the trouble is not this report, then this fails as well and nothing was decided.
    return replace(await tell(send, [], free, log=log), unstored=[outcome])


def show_finished(finished: list[Finished], *, log: Log) -> None:
    """A line for each attempt that ended, or one for all when they are many."""
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
    """Reports of attempts that were taken away from us, and that changed nothing."""
    metrics.STALE_WRITES_REFUSED.inc(len(refused))
    metrics.CLAIMS_LOST.inc(len(refused))
    for key, epoch in refused:
        log.warning("lease_lost", run=key.run_id, task=key.idx, epoch=epoch)
