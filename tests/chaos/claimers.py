"""Runners without bodies: they claim straight from the database, pretend to work, and report. For claiming by many."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass, field

import psycopg

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.spec import DagSpec
from evertick.domain.retry import RetryPolicy
from evertick.engine.finish_and_claim import encode_report, finish_and_claim
from evertick.engine.runners import extend
from tests.chaos.cluster import Cluster
from tests.chaos.record import boot_ns
from tests.waiting import elapse

BATCH = 5
BEAT_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Claimer:
    """One session. `errors` holds what the database said that no claimer should ever hear."""

    cluster: Cluster
    name: str
    queue: str
    spec: DagSpec
    claimed: list[tuple[int, int, int, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    session: int = field(default_factory=lambda: secrets.randbits(62) + 1)

    async def work(self, until_idle_rounds: int = 10) -> None:
        """Claim and report until there has been nothing for a while."""
        async with await connect(self.cluster.server.url, purpose=Purpose.RUNNER) as conn:
            await runners.register(conn, self._registration())
            reports: list[str] = []
            idle, beaten = 0, 0.0
            while idle < until_idle_rounds:
                try:
                    done = await finish_and_claim(
                        conn, session=self.session, reports=reports, queues=[self.queue], free=BATCH, infra_retries=3
                    )
                except psycopg.Error as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    return
                self.errors += [f"refused its own report of {key}" for key, _ in done.refused]
                reports = [self._do(claim) for claim in done.claims]
                idle = 0 if done.claims else idle + 1
                now = asyncio.get_running_loop().time()
                if now - beaten > BEAT_SECONDS:
                    beaten = now
                    held = [(TaskKey(c.run_id, c.idx, c.map_index), c.epoch) for c in done.claims]
                    await extend(conn, session=self.session, held=held)
                await elapse(0.001 if done.claims else 0.02)
            await runners.leave(conn, self.session)

    def _do(self, claim: ExchangeRow) -> str:
        key = TaskKey(claim.run_id, claim.idx, claim.map_index)
        self.claimed.append((*key, claim.epoch))
        self._note(claim, "begin")
        self._note(claim, "end")
        outcome = Outcome(key=key, epoch=claim.epoch, kind=OutcomeKind.SUCCESS)
        return encode_report(outcome, policy=RetryPolicy(), attempt=claim.attempt)

    def _note(self, claim: ExchangeRow, what: str) -> None:
        """As a body would, so that the same evidence is there."""
        fields = (
            claim.run_id,
            self.spec.tasks[claim.idx].name,
            claim.map_index,
            claim.epoch,
            claim.attempt,
            os.getpid(),
            boot_ns(),
        )
        line = ",".join(map(str, (*fields, what, "", self.spec.name, "", self.name)))
        file = os.open(self.cluster.effects_file, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line.encode() + b"\n")
        finally:
            os.close(file)

    def _registration(self) -> NewRunner:
        return NewRunner(
            session=self.session,
            runner_id=self.name,
            host="harness",
            boot_id="harness",
            pid_namespace="harness",
            pid=os.getpid(),
            pid_started=0.0,
            queues=[self.queue],
            slots=BATCH,
        )
