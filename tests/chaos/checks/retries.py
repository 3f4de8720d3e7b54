"""J11 no more attempts than the budget, and no retry sooner than its back-off."""

from __future__ import annotations

from collections import Counter

from tests.chaos import expected
from tests.chaos.case import LOST, REOPENED, TERMINAL, Case
from tests.chaos.effects import Effect
from tests.chaos.evidence import AttemptReport, TaskId, TaskMove, TaskPlan
from tests.chaos.record import Fault
from tests.chaos.verdict import Finding
from tests.chaos.windows import Windows

# These come from the user's own retries; what was lost or given back does not.
_FAILED = frozenset({"failed", "timed_out", "killed"})
# Lost before it began, which comes from the same budget as attempts that were lost.
_DISPATCH_LOST = "dispatch_lost"


def j11(case: Case, finding: Finding) -> None:
    clock_set = Windows(
        (fault.start_ns, fault.stop_ns)
        for fault in case.evidence.nemesis.faults
        if fault.kind is Fault.CLOCK and not fault.target.startswith(("runner", "scheduler"))
    )
    for task, moves in case.moves_of.items():
        run = case.runs.get(task[0])
        plan = case.evidence.plans.get((run.version_id, task[1])) if run is not None else None
        if plan is not None:
            _judge(case, finding, task, moves, plan, clock_set)


def _judge(
    case: Case, finding: Finding, task: TaskId, moves: list[TaskMove], plan: TaskPlan, clock_set: Windows
) -> None:
    ended: Counter[str] = Counter()
    failure: AttemptReport | None = None
    for move in moves:
        if move.old_state in TERMINAL and move.new_state in REOPENED:
            ended, failure = Counter(), None
        if move.old_state == "running" and move.old_epoch is not None:
            end = case.ends.get((task, move.old_epoch))
            if end is not None:
                is_failure = end.kind in _FAILED
                ended["failed" if is_failure else end.kind] += 1
                failure = end if is_failure else None
        if move.old_state == "queued" and (move.reason or "").startswith(_DISPATCH_LOST):
            ended[LOST] += 1
        if move.new_state == "running" and move.old_state != "running":
            finding.looked_at("attempts")
            if ended["failed"] >= plan.max_attempts:
                finding.violated(
                    "too_many_attempts",
                    f"{case.told(task, move.new_epoch)}: {ended['failed']} attempts had failed, {plan.max_attempts} are allowed",
                )
            if ended[LOST] > case.limits.infra_retries:
                finding.violated(
                    "too_many_losses", f"{case.told(task, move.new_epoch)}: claimed again after {ended[LOST]} losses"
                )
            if failure is not None:
                _judge_gap(case, finding, task, failure, move, (plan, ended["failed"], clock_set))


def _judge_gap(
    case: Case,
    finding: Finding,
    task: TaskId,
    failure: AttemptReport,
    claim: TaskMove,
    budget: tuple[TaskPlan, int, Windows],
) -> None:
    """By the bodies' own clock: from the failed body's last line to the next body's first. Where one of them wrote nothing, by
    the audit; but a report that waited for a lock is committed later than it counts from, so then faults excuse."""
    plan, failures, clock_set = budget
    if clock_set.meets(failure.at_ns, claim.at_ns):
        finding.counts["gaps over a set clock"] += 1
        return
    ended, began = _last(case, task, failure.epoch), _first(case, task, claim.new_epoch)
    if ended is not None and began is not None:
        finding.looked_at("gaps")
        gap = began.at_ns - ended.at_ns
    elif not case.running.meets(failure.at_ns, claim.at_ns):
        finding.looked_at("gaps by the audit")
        gap = claim.at_ns - failure.at_ns
    else:
        return
    shortest = case.ns(max(expected.shortest_delay(plan.retry, failures) - case.limits.clock_slack_seconds, 0.0))
    if gap < shortest:
        finding.violated(
            "too_soon",
            f"{case.told(task, claim.new_epoch)} began {gap / 1e9:.2f} s after failure {failures}, its back-off is at"
            f" least {shortest / 1e9:.2f} s",
        )


def _last(case: Case, task: TaskId, epoch: int) -> Effect | None:
    lines = case.lines_of.get((task, epoch), [])
    return lines[-1] if lines and lines[-1].what != "begin" else None


def _first(case: Case, task: TaskId, epoch: int | None) -> Effect | None:
    lines = case.lines_of.get((task, epoch), []) if epoch is not None else []
    return next((line for line in lines if line.what == "begin"), None)
