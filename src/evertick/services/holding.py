"""The attempts that a runner holds, each from its claim until its report is stored. Never more than there are slots
(K8)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.branching import judge
from evertick.domain.dag import DagSpec
from evertick.domain.retry import RetryPolicy
from evertick.engine.extend import Held
from evertick.engine.step import report
from evertick.services import metrics
from evertick.store.tasks import StepRow

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


class Holding:
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

    def hold(self, claims: Iterable[StepRow]) -> None:
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
        return report(outcome, policy=policy, attempt=attempt)

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
