"""The attempts that a runner holds, each from its claim until its report is stored. Never more than there are slots
(K8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.graph import judge
from evertick.domain.dags.spec import DagSpec
from evertick.domain.failover import Server
from evertick.domain.retry import RetryPolicy
from evertick.engine.finish_and_claim import encode_report
from evertick.engine.runners import Held, RunnerRequest
from evertick.observability import metrics
from evertick.observability.logging import Log

_FINISHED = {kind: metrics.ATTEMPTS_FINISHED.labels(outcome=kind.value) for kind in OutcomeKind}


@dataclass(slots=True)
class HeldAttempt:
    epoch: int
    attempt: int
    policy: RetryPolicy
    label: str
    started: float
    judge: DagSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An attempt whose report is stored, for the log."""

    label: str
    outcome: Outcome
    seconds: float


class RunningAttempts:
    """Running attempts (`active`), and outcomes that wait to be reported."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._attempts: dict[TaskKey, HeldAttempt] = {}
        self._ended: list[Outcome] = []
        self._waiting_since: float | None = None
        self.active = 0

    @property
    def free(self) -> int:
        return self._slots - self.active

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    @property
    def unreported(self) -> int:
        return len(self._ended)

    def held(self) -> list[Held]:
        """May be called from another thread."""
        return [(key, held.epoch) for key, held in list(self._attempts.items())]

    def holds(self, key: TaskKey, epoch: int) -> bool:
        held = self._attempts.get(key)
        return held is not None and held.epoch == epoch

    def hold(self, claims: Iterable[ExchangeRow]) -> None:
        now = time.monotonic()
        for claim in claims:
            held = HeldAttempt(claim.epoch, claim.attempt, RetryPolicy(), f"task {claim.idx}", now)
            self._attempts[TaskKey(claim.run_id, claim.idx, claim.map_index)] = held
            self.active += 1

    def describe(self, key: TaskKey, policy: RetryPolicy, label: str) -> None:
        """Add details to a claim: its retry policy and its name."""
        self._attempts[key].policy, self._attempts[key].label = policy, label

    def judge_by(self, key: TaskKey, spec: DagSpec) -> None:
        """Its result decides which tasks are skipped."""
        self._attempts[key].judge = spec

    def end_early(self, key: TaskKey, epoch: int, kind: OutcomeKind, reason: str) -> None:
        """The attempt was claimed but never started."""
        self.active -= 1
        self._ended.append(Outcome(key=key, epoch=epoch, kind=kind, reason=reason))

    def end(self, outcomes: Iterable[Outcome]) -> None:
        """These attempts ran and ended. Outcomes of attempts that are not held are ignored."""
        for outcome in outcomes:
            if self.holds(outcome.key, outcome.epoch):
                self.active -= 1
                spec = self._attempts[outcome.key].judge
                self._ended.append(outcome if spec is None else judge(spec, outcome))
                self._waiting_since = self._waiting_since or time.monotonic()

    def give_back(self, unknown: Iterable[Held], reason: str) -> int:
        """Claims that this session does not know. Each is returned once, however often a heartbeat lists it."""
        waiting = {(outcome.key, outcome.epoch) for outcome in self._ended}
        back = [held for held in unknown if held not in waiting and not self.holds(*held)]
        for key, epoch in back:
            self._ended.append(Outcome(key=key, epoch=epoch, kind=OutcomeKind.GIVEN_BACK, reason=reason))
        return len(back)

    def take_ended(self, most: int) -> tuple[list[Outcome], float | None]:
        """The oldest outcomes that wait to be reported, and since when the first one that ran has waited."""
        since, self._waiting_since = self._waiting_since, None
        taken, self._ended = self._ended[:most], self._ended[most:]
        return taken, since

    def put_back(self, outcomes: list[Outcome]) -> None:
        """They could not be reported, or not yet."""
        self._ended = outcomes + self._ended

    def as_report(self, outcome: Outcome) -> str:
        held = self._attempts.get(outcome.key)
        policy, attempt = (held.policy, held.attempt) if held else (RetryPolicy(), 1)
        return encode_report(outcome, policy=policy, attempt=attempt)

    def forget(self, outcomes: Iterable[Outcome]) -> list[Finished]:
        """Their reports are stored."""
        now, finished = time.monotonic(), []
        for outcome in outcomes:
            held = self._attempts.get(outcome.key)
            if held is None or held.epoch != outcome.epoch:
                continue
            del self._attempts[outcome.key]
            _FINISHED[outcome.kind].inc()
            finished.append(Finished(label=held.label, outcome=outcome, seconds=now - held.started))
        return finished


class DrainState:
    """Active until a drain is requested. Each change is reported once."""

    def __init__(self, request: RunnerRequest | None, *, log: Log) -> None:
        self.request = request
        self._log = log
        self._was_told = False

    @property
    def is_free(self) -> bool:
        """Whether it may claim new work."""
        return self.request is None

    def hear(self, request: RunnerRequest | None) -> bool:
        """Returns whether the request is new."""
        if request == self.request:
            return False
        self.request, self._was_told = request, False
        if request is None:
            self._log.info("undrain")
        else:
            self._log.info("drain", is_leaving=request is RunnerRequest.LEAVE)
        return True

    def note_idle(self) -> bool:
        """The runner is idle. Returns whether it should exit now."""
        if self.request is not None and not self._was_told:
            self._was_told = True
            self._log.info("drained")
        return self.request is RunnerRequest.LEAVE


# Attempts that must not outlive their lease are stopped after 5/6 of the silence that declares a runner dead.
STOP_AFTER = 5 / 6


# Other processes may soon declare this runner dead: do not start new work.
CLAIM_WITHIN = 1 / 2


# The server's lock timeout is five seconds; hardly anything else makes an exchange take long.
LONGEST_STEP_SECONDS = 6.0


class DatabaseLiveness:
    def __init__(self, lost_after_seconds: float, *, now: float) -> None:
        self._lost_after_seconds = lost_after_seconds
        self._heard_at = now
        self._unsure_since: float | None = None
        self.stepping_since: float | None = None

    def may_claim(self, now: float) -> bool:
        """Not while it is unknown what was claimed, or whether other processes see this runner alive."""
        return self._unsure_since is None and now - self._heard_at <= CLAIM_WITHIN * self._lost_after_seconds

    @property
    def is_certain(self) -> bool:
        """Whether it is known what was claimed."""
        return self._unsure_since is None and self.stepping_since is None

    @property
    def stop_at(self) -> float:
        """When to stop attempts that must not run at the same time as a successor: they cannot be taken away before."""
        return self._heard_at + STOP_AFTER * self._lost_after_seconds

    def note_heard(self, sent_at: float) -> bool:
        """Returns whether this is the latest answer so far."""
        is_latest = sent_at >= self._heard_at
        self._heard_at = max(self._heard_at, sent_at)
        return is_latest

    def doubt(self, now: float) -> None:
        """A claim's reply was lost: claiming again could hold more attempts than there are slots (K8)."""
        self._unsure_since = now

    def settle_doubt(self, sent_at: float) -> bool:
        """A heartbeat listed the attempts that this session holds. Returns whether that resolved a doubt."""
        if self._unsure_since is None or sent_at <= self._unsure_since:
            return False
        self._unsure_since = None
        return True

    def is_step_suspect(self, sent_at: float) -> bool:
        """Whether an exchange has waited for its reply since long before a later request was answered."""
        return self.stepping_since is not None and sent_at - self.stepping_since > LONGEST_STEP_SECONDS


class FailoverGuard:
    """`holds`: whether the runner still has that attempt, running or not yet reported. `ask`: request a heartbeat now."""

    def __init__(self, holds: Callable[[TaskKey, int], bool], *, ask: Callable[[], None]) -> None:
        self._holds, self._ask = holds, ask
        self._has_begun = self._is_sure = False
        self._server: Server | None = None
        self._lost: list[Held] = []

    def allow(self, free: int, server: Server | None) -> int:
        """The number of tasks that may be claimed from that server now: all free slots, or none."""
        if not self._has_begun:
            # The first server has no earlier claims of this session.
            self._has_begun, self._is_sure, self._server = True, True, server
        self._lost = [held for held in self._lost if self._holds(*held)]
        if self._is_sure and server == self._server and not self._lost:
            return free
        self._ask()
        return 0

    def note_step(self, server: Server | None) -> None:
        """A claim that one server made while the latest heartbeat came from another must be looked up on both."""
        if server != self._server:
            self._is_sure = False

    def hear(self, server: Server | None, lost: Iterable[Held]) -> None:
        """That server answered a heartbeat, so it is known which attempts this session holds there. `lost` are attempts
        of this session that the server does not know."""
        if not self._has_begun or (self._is_sure and server == self._server):
            return
        self._is_sure, self._server = True, server
        self._lost = [held for held in lost if self._holds(*held)]
