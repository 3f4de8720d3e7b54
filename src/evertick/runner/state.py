"""What one session of a runner knows and decides: its attempts, the answers of the database, and requests to drain.

No I/O and no clock: methods take `now`, in seconds since boot, and return decisions. Never holds more attempts than
there are slots and claims in advance. Used by one event loop; only `held` may be called from another thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from evertick.domain.attempt import AttemptRef, HeartbeatReply, Outcome, OutcomeKind, RunnerRequest, TaskKey
from evertick.domain.dags.graph import judge
from evertick.domain.dags.spec import DagSpec
from evertick.domain.failover import Server
from evertick.domain.retry import RetryPolicy

# The largest number of outcomes in one exchange.
MOST_REPORTS = 500
# Attempts that must not outlive their lease are stopped after 5/6 of the silence that declares a runner dead.
STOP_AFTER = 5 / 6
# Other processes may soon declare this runner dead: do not start new work.
CLAIM_WITHIN = 1 / 2
# The server's lock timeout is five seconds; hardly anything else makes an exchange take long.
LONGEST_EXCHANGE_SECONDS = 6.0


class Ending(StrEnum):
    """Why a session ended."""

    STOPPED = "stopped"
    DRAINED = "drained"
    DECLARED_DEAD = "declared_dead"
    REFUSED = "refused"


class Claim(Protocol):
    """A claimed task, as the database returns it."""

    @property
    def run_id(self) -> int: ...
    @property
    def idx(self) -> int: ...
    @property
    def map_index(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def attempt(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """An attempt from its claim until its report is stored. `branches`: its result decides which tasks are skipped."""

    epoch: int
    attempt: int
    claimed_at: float
    label: str
    policy: RetryPolicy
    branches: DagSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAttempt:
    """An attempt whose report is stored, for the log."""

    label: str
    outcome: Outcome
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextExchange:
    """The outcomes to report and the number of tasks to claim, in one round trip. `ended_at`: when the first of these
    attempts ended."""

    ended: list[Outcome]
    free: int
    ended_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatActions:
    """What follows from an answered heartbeat. `stop_at`: the new deadline of attempts that must not outlive their
    lease. `given_back`: the number of unknown claims that are returned. `is_exchange_due`: reporting or claiming may
    succeed now."""

    is_declared_dead: bool
    is_new_request: bool
    is_connection_suspect: bool
    stop_at: float
    kill: list[AttemptRef]
    stop: list[AttemptRef]
    given_back: int
    ask_again: bool
    is_exchange_due: bool


class RunnerState:
    """Claims are refused while stopping or draining; while the database has not answered for long; while a claim's
    reply is missing; and after a failover until the new server has listed the attempts that it has this session hold.
    """

    def __init__(
        self, *, slots: int, lost_after_seconds: float, now: float, request: RunnerRequest | None = None
    ) -> None:
        """`request` is a drain request of the previous session that still applies."""
        self._slots, self._lost_after_seconds = slots, lost_after_seconds
        self._attempts: dict[TaskKey, RunningAttempt] = {}
        self._ended: list[Outcome] = []
        self._ended_at: float | None = None
        # Attempts that have been claimed and have not ended; and how many more than there are slots may be claimed, for
        # slots that will be free when the answer arrives.
        self.active = self.ahead = 0
        self.is_stopping = False
        # `asked` is an operator's request; a runner that leaves by itself follows no other any more.
        self.request = self.asked = request
        self._is_leaving = self._is_drain_reported = False
        self._answered_at = self._worked_at = now
        self._unsure_since: float | None = None
        self._exchanging_since: float | None = None
        # The server of the last exchange, and whether its list of this session's attempts is known to be complete.
        self._server: Server | None = None
        self._has_exchanged = self._is_server_known = False
        self._lost_in_failover: list[AttemptRef] = []
        # Attempts that were reported since the latest answered heartbeat was sent: its answer may still list them.
        self._reported: dict[AttemptRef, float] = {}

    # Attempts

    @property
    def has_ended(self) -> bool:
        """Whether outcomes wait to be reported."""
        return bool(self._ended)

    @property
    def unreported(self) -> int:
        return len(self._ended)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, nothing waits to be reported, and it is certain what was claimed."""
        return not self.active and not self._ended and self._unsure_since is None and self._exchanging_since is None

    @property
    def free(self) -> int:
        """Slots without an attempt."""
        return max(0, self._slots - self.active)

    def held(self) -> list[AttemptRef]:
        """Safe to call from any thread."""
        return [AttemptRef(key, attempt.epoch) for key, attempt in list(self._attempts.items())]

    def holds(self, key: TaskKey, epoch: int) -> bool:
        attempt = self._attempts.get(key)
        return attempt is not None and attempt.epoch == epoch

    def describe(self, key: TaskKey, policy: RetryPolicy, label: str, *, branches: DagSpec | None = None) -> None:
        """Add details to a claim: its retry policy, its name, and the DAG if its result chooses branches."""
        attempt = self._attempts[key]
        attempt.policy, attempt.label, attempt.branches = policy, label, branches

    def end_early(self, key: TaskKey, epoch: int, kind: OutcomeKind, reason: str) -> None:
        """The attempt was claimed but never started. Ignored if it is not held."""
        if not self.holds(key, epoch):
            return
        self.active -= 1
        self._ended.append(Outcome(key=key, epoch=epoch, kind=kind, reason=reason))

    def end_attempts(self, outcomes: Iterable[Outcome], now: float) -> None:
        """These attempts ran and ended. Outcomes of attempts that are not held are ignored."""
        for outcome in outcomes:
            if self.holds(outcome.key, outcome.epoch):
                self.active -= 1
                self._worked_at = now
                spec = self._attempts[outcome.key].branches
                self._ended.append(outcome if spec is None else judge(spec, outcome))
                self._ended_at = self._ended_at or now

    def retry_terms(self, outcome: Outcome) -> tuple[RetryPolicy, int]:
        """The retry policy of an ended attempt, and its number."""
        held = self._attempts.get(outcome.key)
        return (held.policy, held.attempt) if held else (RetryPolicy(), 1)

    # Exchanges

    def next_exchange(self, now: float) -> NextExchange | None:
        """What to send now, if anything. Then call `add_claims`, or `exchange_failed`."""
        may_claim = not self.is_stopping and self.request is None and self.may_claim(now)
        free = self._slots + self.ahead - self.active if may_claim else 0
        ended_at, self._ended_at = self._ended_at, None
        ended, self._ended = self._ended[:MOST_REPORTS], self._ended[MOST_REPORTS:]
        if not ended and free <= 0:
            return None
        self._exchanging_since = now
        return NextExchange(ended=ended, free=free, ended_at=ended_at)

    def exchange_failed(self, exchange: NextExchange, now: float) -> bool:
        """The result of the commit is unknown; sending the same reports again is harmless. But claiming again could
        hold more attempts than there are slots (K8): returns whether a heartbeat has to find out what was claimed."""
        self._exchanging_since = None
        self.put_back(exchange.ended)
        if exchange.free > 0:
            self._unsure_since = now
        return exchange.free > 0

    def add_claims(self, claims: Iterable[Claim], now: float) -> None:
        """The exchange was answered with these claims. Call it before anything else runs: a heartbeat must not mistake
        them for claims whose reply was lost."""
        self._exchanging_since = None
        for claim in claims:
            self._worked_at = now
            self._attempts[TaskKey(claim.run_id, claim.idx, claim.map_index)] = RunningAttempt(
                epoch=claim.epoch,
                attempt=claim.attempt,
                claimed_at=now,
                label=f"task {claim.idx}",
                policy=RetryPolicy(),
            )
            self.active += 1

    def put_back(self, outcomes: list[Outcome]) -> None:
        """They could not be reported, or not yet."""
        self._ended = outcomes + self._ended

    def reported(self, outcomes: Iterable[Outcome], now: float) -> list[FinishedAttempt]:
        """Their reports are stored: the attempts are no longer held."""
        finished = []
        for outcome in outcomes:
            if self.holds(outcome.key, outcome.epoch):
                held = self._attempts.pop(outcome.key)
                self._reported[AttemptRef(outcome.key, outcome.epoch)] = now
                finished.append(FinishedAttempt(label=held.label, outcome=outcome, seconds=now - held.claimed_at))
        return finished

    # Failover: a claim that was lost with the old server can be made again on the new one, with the same epoch and by
    # the same session. The two attempts would be indistinguishable, so the first must be gone before.

    def may_claim_from(self, server: Server | None) -> bool:
        """Whether the attempts that this server has the session hold are known, and all others are gone.
        If not, a heartbeat has to be answered by it."""
        if not self._has_exchanged:
            # The first server has no earlier claims of this session.
            self._has_exchanged, self._is_server_known, self._server = True, True, server
        self._lost_in_failover = [ref for ref in self._lost_in_failover if self.holds(*ref)]
        return self._is_server_known and server == self._server and not self._lost_in_failover

    def note_server(self, server: Server | None) -> None:
        """That server answered an exchange. A claim that it made while the latest heartbeat came from another server
        must be looked up on both."""
        if server != self._server:
            self._is_server_known = False

    def _on_server(self, server: Server | None, lost: Iterable[AttemptRef]) -> None:
        if not self._has_exchanged or (self._is_server_known and server == self._server):
            return
        self._is_server_known, self._server = True, server
        self._lost_in_failover = [ref for ref in lost if self.holds(*ref)]

    # Answers of the database. Times count from the moment an answered request was sent.

    @property
    def stop_at(self) -> float:
        """When to stop attempts that must not run at the same time as a successor: they cannot be taken away before."""
        return self._answered_at + STOP_AFTER * self._lost_after_seconds

    def may_claim(self, now: float) -> bool:
        """Not while it is unknown what was claimed, or whether other processes see this runner alive."""
        return self._unsure_since is None and now - self._answered_at <= CLAIM_WITHIN * self._lost_after_seconds

    def on_answer(self, sent_at: float) -> bool:
        """The database answered a request sent at that time. Returns whether that is the latest answer so far."""
        is_latest = sent_at >= self._answered_at
        self._answered_at = max(self._answered_at, sent_at)
        return is_latest

    def on_heartbeat(
        self, reply: HeartbeatReply, *, sent_at: float, is_spare: bool, server: Server | None
    ) -> HeartbeatActions:
        """`is_spare`: it was answered on a new connection, because the usual one did not answer in time."""
        could_claim = self.may_claim(sent_at)
        is_latest = not reply.is_gone and self.on_answer(sent_at)
        is_new_request = is_latest and self.follow(reply.request)
        # A new connection answers while the old one does not: requests sent on the old one may be lost.
        is_suspect = is_spare and self._is_exchange_late(sent_at)
        self._on_server(server, reply.lost)
        self._reported = {ref: at for ref, at in self._reported.items() if at >= sent_at}
        given_back, ask_again = self._return_unknown([ref for ref in reply.unknown if ref not in self._reported])
        is_sure_again = self._exchanging_since is None and self._resolve_doubt(sent_at)
        return HeartbeatActions(
            is_declared_dead=reply.is_gone,
            is_new_request=is_new_request,
            is_connection_suspect=is_suspect,
            stop_at=self.stop_at,
            kill=[ref for ref in reply.lost if self.holds(*ref)],
            stop=[ref for ref in reply.stop if self.holds(*ref)],
            given_back=given_back,
            ask_again=ask_again,
            is_exchange_due=not could_claim or is_new_request or given_back > 0 or is_sure_again,
        )

    def _is_exchange_late(self, sent_at: float) -> bool:
        """Whether an exchange has waited for its reply since long before a later request was answered."""
        return self._exchanging_since is not None and sent_at - self._exchanging_since > LONGEST_EXCHANGE_SECONDS

    def _return_unknown(self, unknown: list[AttemptRef]) -> tuple[int, bool]:
        """Return claims that this session does not know, each once, however often a heartbeat lists it. While an
        exchange waits, its reply may carry them: ask again afterwards."""
        missing = [ref for ref in unknown if not self.holds(*ref)]
        if self._exchanging_since is not None:
            return 0, bool(missing)
        waiting = {(outcome.key, outcome.epoch) for outcome in self._ended}
        back = [ref for ref in missing if ref not in waiting]
        for key, epoch in back:
            self._ended.append(Outcome(key=key, epoch=epoch, kind=OutcomeKind.GIVEN_BACK, reason="claim_reply_lost"))
        return len(back), False

    def _resolve_doubt(self, sent_at: float) -> bool:
        """A heartbeat listed the attempts that this session holds. Returns whether that resolved a doubt."""
        if self._unsure_since is None or sent_at <= self._unsure_since:
            return False
        self._unsure_since = None
        return True

    # Drain requests

    def follow(self, request: RunnerRequest | None) -> bool:
        """Returns whether an operator's request to drain, or no longer to drain, is new."""
        if request == self.asked:
            return False
        self.asked = request
        if not self._is_leaving:
            self.request, self._is_drain_reported = request, False
        return not self._is_leaving

    def idle_seconds(self, now: float) -> float:
        """Since when it has had nothing to do."""
        return now - self._worked_at if self.is_idle else 0.0

    def begin_idling(self, now: float) -> None:
        """It can be given work from now on."""
        self._worked_at = now

    def leave(self) -> None:
        """By itself: it takes no new work, and ends when its attempts have ended."""
        self._is_leaving, self.request = True, RunnerRequest.LEAVE

    def report_drained(self) -> bool:
        """The runner is idle. Returns whether that ends a drain which was not reported yet."""
        is_new = self.request is not None and not self._is_drain_reported
        self._is_drain_reported = self._is_drain_reported or is_new
        return is_new
