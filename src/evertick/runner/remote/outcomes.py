"""Records how an agent's attempt ended, as a runner would: judged by its DAG version, retried by its policy.

Used by the API, which receives the report from the agent, and by a runner that found the outcome an agent left behind.
"""

from __future__ import annotations

import psycopg
from psycopg import AsyncConnection

from evertick.db.connection import Opened
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.dags.graph import judge
from evertick.domain.retry import RetryPolicy
from evertick.engine.finish_and_claim import Exchange, encode_report
from evertick.engine.remote_attempts import finish_attempt
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runner.exchange import MAY_WAIT
from evertick.runner.launch import VersionCache


async def record_outcome(
    link: Opened, versions: VersionCache, outcome: Outcome, *, session: int, infra_retries: int, log: Log
) -> Exchange:
    """Record an outcome; repeating it is harmless. Attempts in `refused` no longer belonged to that session."""
    conn = await link.get()
    policy, attempt = RetryPolicy(), 1
    row = await runners.held(conn, outcome.key, epoch=outcome.epoch, session=session)
    if row is not None:
        spec = (await versions.get(link, row.version_id)).spec
        policy, attempt = spec.tasks[outcome.key.idx].retry, row.attempt
        outcome = judge(spec, outcome)
    text = encode_report(outcome, policy=policy, attempt=attempt)
    done = await _send(conn, outcome, text, session=session, infra_retries=infra_retries, log=log)
    facts = {"run": outcome.key.run_id, "task": outcome.key.idx, "epoch": outcome.epoch}
    if done.refused:
        metrics.STALE_WRITES_REFUSED.inc()
        log.warning("lease_lost", **facts)
    elif row is not None:
        metrics.ATTEMPTS_FINISHED.labels(outcome=outcome.kind.value).inc()
        log.info("task_finished", **facts, outcome=outcome.kind.value)
    return done


def channels_to_notify(done: Exchange, outcome: Outcome) -> set[Channel]:
    """The channels of the processes that can act on this outcome."""
    channels = {Channel.TASKS} if done.has_more else set()
    if done.has_arrivals or outcome.kind in MAY_WAIT:
        channels.add(Channel.SCHEDULE)
    return channels


async def _send(
    conn: AsyncConnection, outcome: Outcome, text: str, *, session: int, infra_retries: int, log: Log
) -> Exchange:
    try:
        return await finish_attempt(conn, session=session, report=text, infra_retries=infra_retries)
    except psycopg.Error as error:
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        # The database would refuse the same report every time.
        log.error("report_refused", run=outcome.key.run_id, task=outcome.key.idx, epoch=outcome.epoch, error=error)
        reason = f"the outcome could not be stored: {error}".splitlines()[0]
    plain = Outcome(key=outcome.key, epoch=outcome.epoch, kind=OutcomeKind.FAILED, reason=reason)
    text = encode_report(plain, policy=RetryPolicy(), attempt=1)
    return await finish_attempt(conn, session=session, report=text, infra_retries=infra_retries)
