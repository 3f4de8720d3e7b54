"""J4 epochs rise and each has one starter, J5 no write by an old epoch is accepted, J12 the fenced sink."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from tests.chaos.case import Attempt, Case
from tests.chaos.evidence import TaskId, TaskMove
from tests.chaos.record import Answer, Placement
from tests.chaos.verdict import Finding

_CLAIMED = ("queued", "running")


def j4(case: Case, finding: Finding) -> None:
    """Epochs of a task strictly rise, one body starts per epoch, and one session owns a task at a time."""
    highest: dict[TaskId, int] = {}
    for move in case.evidence.task_moves:
        if move.new_state not in _CLAIMED or move.old_state == "running" or move.new_epoch is None:
            continue
        if move.old_state == "queued":
            _start(case, finding, move)
            continue
        finding.looked_at("claims")
        if move.new_epoch <= highest.get(move.task, 0):
            finding.violated(
                "epoch_did_not_rise",
                f"{case.told(move.task)} was claimed with epoch {move.new_epoch} after {highest[move.task]}",
            )
        highest[move.task] = max(move.new_epoch, highest.get(move.task, 0))
    _owners(case, finding)
    _places(finding, case.evidence.nemesis.placements)
    for effect in case.strangers:
        finding.violated(
            "unclaimed_start", f"a body of run {effect.run_id} {effect.dag}.{effect.task}, which no table knows"
        )
    for (task, epoch), lines in case.lines_of.items():
        begins = [line for line in lines if line.what == "begin"]
        finding.looked_at("attempts that began", 1 if begins else 0)
        if len(begins) > 1:
            finding.violated(
                "two_starters", f"{case.told(task, epoch)} began {len(begins)} times", pids=[b.pid for b in begins]
            )
        if begins and (task, epoch) not in case.claims:
            finding.violated("unclaimed_start", f"{case.told(task, epoch)} began without a claim")
    for task, epochs in case.epochs_of.items():
        if len(epochs) > 1:
            _overlaps(case, finding, task, epochs)


def _start(case: Case, finding: Finding, move: TaskMove) -> None:
    """What was claimed for an executor elsewhere is started as that very attempt, and by nobody else."""
    finding.looked_at("starts elsewhere")
    if (move.new_epoch, move.new_session) != (move.old_epoch, move.old_session):
        finding.violated(
            "foreign_start",
            f"{case.told(move.task, move.old_epoch)} of session {move.old_session} was started as epoch {move.new_epoch} of"
            f" session {move.new_session}",
        )


def _places(finding: Finding, placements: tuple[Placement, ...]) -> None:
    """An executor never had something under the same name twice: one pod for one attempt."""
    for name, number in Counter(placement.name for placement in placements).items():
        finding.looked_at("attempts elsewhere")
        if number > 1:
            finding.violated("two_places", f"{name} was made {number} times")


def _owners(case: Case, finding: Finding) -> None:
    """Leases: at most one per task at a time, gained by the very transaction that claims."""
    held: dict[TaskId, tuple[int, int]] = {}
    gained: set[tuple[int, TaskId, int, int]] = set()
    for lease in case.evidence.lease_moves:
        owner = (lease.session, lease.epoch)
        if not lease.is_gained:
            if held.get(lease.task) == owner:
                del held[lease.task]
            continue
        finding.looked_at("leases")
        if lease.task in held:
            finding.violated("two_owners", f"{case.told(lease.task)} is held by {held[lease.task]} and by {owner}")
        held[lease.task] = owner
        gained.add((lease.tx, lease.task, *owner))
    for move in case.evidence.task_moves:
        is_claim = move.new_state == "running" and move.old_state != "running"
        if is_claim and (move.tx, move.task, move.new_session, move.new_epoch) not in gained:
            finding.violated("no_lease", f"{case.told(move.task, move.new_epoch)} was claimed without a lease")


def _overlaps(case: Case, finding: Finding, task: TaskId, epochs: list[int]) -> None:
    """A body of an old epoch may act beside a newer one only if its owner was given up while it could not be asked."""
    slack = case.ns(case.limits.clock_slack_seconds)
    for older, newer in pairwise(epochs):
        lines = case.lines_of[task, older]
        began = next((line.at_ns for line in case.lines_of[task, newer] if line.what == "begin"), None)
        if began is None:
            continue
        late_begin = next((line for line in lines if line.what == "begin" and line.at_ns > began), None)
        claim = case.claims.get((task, older))
        if late_begin is not None and claim is not None:
            if not case.silence(claim.session).meets(claim.at_ns, late_begin.at_ns):
                finding.violated(
                    "late_old_epoch",
                    f"{case.told(task, older)} began {(late_begin.at_ns - began) / 1e9:.2f} s after epoch {newer}",
                )
            continue
        last = max(line.at_ns for line in lines)
        if last > began + slack and not case.is_lost_by_silence((task, older)):
            finding.violated(
                "two_bodies",
                f"{case.told(task, older)} still acted {(last - began) / 1e9:.2f} s after epoch {newer} began",
                ended_as=end.kind if (end := case.ends.get((task, older))) else None,
            )


def j5(case: Case, finding: Finding) -> None:
    """Whatever moves a running task on was said by its very owner under its very epoch."""
    said = {
        (report.tx, report.task, report.epoch, report.session)
        for report in case.evidence.reports
        if not report.is_refused
    }
    last_success: dict[TaskId, int | None] = {}
    for move in case.evidence.task_moves:
        if move.new_state == "success":
            last_success[move.task] = move.new_epoch
        if move.old_state != "running":
            continue
        finding.looked_at("moves of running tasks")
        if move.new_state == "running" or (move.tx, move.task, move.old_epoch, move.old_session) not in said:
            finding.violated(
                "foreign_report",
                f"{case.told(move.task, move.old_epoch)} of session {move.old_session} became {move.new_state}"
                " without a report of that epoch and session",
                tx=move.tx,
            )
    for row in case.evidence.results:
        task = (row.run_id, row.idx, row.map_index)
        finding.looked_at("results")
        if last_success.get(task) != row.epoch:
            finding.violated(
                "stale_result",
                f"{case.told(task)} succeeded in epoch {last_success.get(task)}, its result is of {row.epoch}",
            )
    for past in case.evidence.past_attempts:
        attempt = ((past.run_id, past.idx, past.map_index), past.epoch)
        finding.looked_at("past attempts")
        claim = case.claims.get(attempt) or case.dispatches.get(attempt)
        if claim is None or (past.session is not None and past.session != claim.session):
            finding.violated("stale_attempt", f"{case.told(*attempt)} is recorded for session {past.session}: {claim}")
    _refusals(case, finding)
    _late_bodies(case, finding)


def _refusals(case: Case, finding: Finding) -> None:
    """Writes that were stale on purpose, and those that the database refused by itself."""
    for request in case.evidence.client:
        if request.op.startswith("stale_"):
            finding.looked_at("stale writes tried")
            if request.answer is Answer.OK:
                finding.violated("accepted_stale", f"{request.op} {request.request} was accepted", **request.detail)
    for kind, number in case.evidence.refused.items():
        finding.counts[f"refused: {kind}"] += number


def _late_bodies(case: Case, finding: Finding) -> None:
    """Once its runner has contact again, the body of a replaced attempt is stopped soon."""
    for attempt, lines in case.lines_of.items():
        if not case.is_lost_by_silence(attempt):
            continue
        end = case.ends[attempt]
        contact = _contact_ns(case, attempt, end.at_ns)
        if contact is None:
            continue
        finding.looked_at("replaced bodies")
        last = max(line.at_ns for line in lines)
        if last > case.planning.deadline(contact, case.ns(case.limits.stop_seconds)):
            finding.violated(
                "late_body",
                f"{case.told(*attempt)} was replaced and still acted {(last - contact) / 1e9:.1f} s after contact",
            )


def _contact_ns(case: Case, attempt: Attempt, lost_ns: int) -> int | None:
    """When the owner could report again, after it was given up."""
    session = case.ends[attempt].session
    return next((max(stop, lost_ns) for start, stop in case.silence(session) if start <= lost_ns <= stop), None)


def j12(case: Case, finding: Finding) -> None:
    """Who uses the token has exactly one effect; who does not, at least one and at most one per epoch."""
    succeeded = {
        move.task: move.new_epoch
        for move in case.evidence.task_moves
        if move.new_state == "success" and move.old_state == "running"
    }
    _sink(case, finding, succeeded)
    claimed = Counter(task for task, _ in case.claims)
    begun = Counter(task for (task, _), lines in case.lines_of.items() for line in lines if line.what == "begin")
    writers = {case.task_name(task) for task in begun}
    for task in succeeded:
        name = case.task_name(task)
        if name not in writers:
            continue
        finding.looked_at("tasks with effects")
        if begun[task] == 0:
            finding.violated("no_effect", f"{case.told(task)} succeeded, and no body of it ever began")
    for task, number in begun.items():
        if number > claimed[task]:
            finding.violated(
                "effects_beyond_epochs", f"{case.told(task)} began {number} times with {claimed[task]} epochs"
            )


def _sink(case: Case, finding: Finding, succeeded: dict[TaskId, int | None]) -> None:
    rows: Counter[TaskId | None] = Counter(
        case.task_id(row.run_id, row.task, row.map_index) for row in case.evidence.sink.rows
    )
    highest: dict[tuple[int, str, int], int] = defaultdict(int)
    users: dict[tuple[int, str, int, int], set[int]] = defaultdict(set)
    writers = set()
    for touch in case.evidence.sink.touches:
        finding.looked_at("touches of the sink")
        key = (touch.run_id, touch.task, touch.map_index)
        task = case.task_id(*key)
        writers.add(case.task_name(task) if task is not None else "")
        users[*key, touch.epoch].add(touch.pid)
        if touch.is_accepted and touch.epoch < highest[key]:
            finding.violated("stale_touch", f"the sink took epoch {touch.epoch} of {key} after {highest[key]}")
        highest[key] = max(highest[key], touch.epoch)
    for (run_id, name, map_index, epoch), pids in users.items():
        if len(pids) > 1:
            finding.violated(
                "shared_token", f"run {run_id} {name}[{map_index}] epoch {epoch} was used by pids {sorted(pids)}"
            )
    for task in succeeded:
        if case.task_name(task) in writers:
            finding.looked_at("tasks with a row")
            if rows[task] != 1:
                kind = "no_row" if rows[task] == 0 else "two_rows"
                finding.violated(kind, f"{case.told(task)} has {rows[task]} rows in the sink")
