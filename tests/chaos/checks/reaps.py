"""J7 do no harm: whoever was given up was gone, or could not have reported for the whole threshold."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from tests.chaos.case import LOST, TERMINAL, Case
from tests.chaos.evidence import AttemptReport, TaskMove
from tests.chaos.record import Fault, Placement
from tests.chaos.verdict import Finding
from tests.chaos.windows import Windows

_ORPHANED = "orphaned"
_DISPATCH_LOST = "dispatch_lost"
_EXECUTOR = "kubernetes"
_FORK_SERVER = "warm_parent"
# How a runner says that it stopped an attempt itself, because nobody answered it for too long.
_STOPPED_ITSELF = "lost_contact"


def j7(case: Case, finding: Finding) -> None:
    """Ground truth is the harness's own: exits that it saw, freezes and cuts that it made. Never what the program says."""
    beats, reasons = _beats(case), _reasons(case)
    for attempt, end in case.ends.items():
        if end.kind == LOST:
            stopped_itself = reasons.get((end.tx, *attempt[0]), "").startswith(_STOPPED_ITSELF)
            _judge_loss(case, finding, end, {} if stopped_itself else beats)
        _judge_bodies(case, finding, attempt[0], attempt[1], end)
    _judge_dispatches(case, finding)
    _judge_orphans(case, finding)


def _judge_dispatches(case: Case, finding: Finding) -> None:
    """What was handed over is given up only if the executor has nothing of it, and could be asked."""
    placed: dict[str, list[Placement]] = defaultdict(list)
    for placement in case.evidence.nemesis.placements:
        placed[placement.name].append(placement)
    faults = case.evidence.nemesis.faults
    away = Windows(
        (each.start_ns, each.stop_ns) for each in faults if each.kind is Fault.OUTAGE and each.target == _EXECUTOR
    )
    slack = case.ns(case.limits.clock_slack_seconds)
    for move in case.evidence.task_moves:
        if move.old_state != "queued" or not (move.reason or "").startswith(_DISPATCH_LOST):
            continue
        finding.looked_at("dispatches given up")
        if any(each.is_there(move.at_ns, slack) for each in placed[_name(move)]):
            finding.violated("dispatch_lost_there", f"{_name(move)} was given up, and its executor had it")
        elif away.covered(move.at_ns - slack, move.at_ns + slack) == 2 * slack:
            finding.violated("dispatch_lost_unasked", f"{_name(move)} was given up while its executor answered nobody")


def _name(move: TaskMove) -> str:
    """What the attempt is called elsewhere, as the documentation says; not by the program's own function."""
    instance = "x" if move.map_index < 0 else move.map_index
    return (
        f"et-{move.run_id}-{move.idx}-{instance}-{move.old_epoch}-{(move.old_session or 0) & 0xFFFFFFFFFFFFFFFF:016x}"
    )


def _beats(case: Case) -> dict[int, list[int]]:
    """When each session was heard: its registration, its heartbeats, its claims."""
    found: dict[int, list[int]] = defaultdict(list)
    for move in case.evidence.runner_moves:
        if move.what in ("started", "beat"):
            found[move.session].append(move.at_ns)
    return {session: sorted(times) for session, times in found.items()}


def _reasons(case: Case) -> dict[tuple[int, int, int, int], str]:
    """Why a transaction moved a task. A runner that stopped an attempt itself is heard before it can say so: then a heartbeat just
    before proves nothing. That it could not have been heard for the whole threshold must hold all the same."""
    return {
        (move.tx, move.run_id, move.idx, move.map_index): move.reason
        for move in case.evidence.task_moves
        if move.old_state == "running" and move.reason
    }


def _judge_loss(case: Case, finding: Finding, end: AttemptReport, beats: dict[int, list[int]]) -> None:
    task = (end.run_id, end.idx, end.map_index)
    life = case.owners.get(end.session)
    who = f"{life.service} (pid {life.pid})" if life is not None else f"session {end.session}"
    if case.has_exited(end.session, end.at_ns):
        finding.looked_at("attempts of processes that had ended")
        return
    threshold = case.ns(case.limits.lost_after_seconds)
    if life is not None and any(
        each.kind is Fault.KILL
        and each.parameters.get("part") == _FORK_SERVER
        and each.target == life.service
        # The runner reports it itself, at once.
        and each.start_ns <= end.at_ns <= each.start_ns + threshold
        for each in case.evidence.nemesis.faults
    ):
        finding.looked_at("attempts of killed fork servers")
        return
    finding.looked_at("attempts of processes that were silent")
    slack = case.ns(case.limits.silence_slack_seconds)
    since = end.at_ns - threshold
    is_silent = case.silence(end.session).covered(since, end.at_ns) == threshold
    if not is_silent or case.exact_silence(end.session).covered(since, end.at_ns) < threshold - slack:
        finding.violated(
            "reaped_alive",
            f"{case.told(task, end.epoch)} was taken from {who}, which was there and could report within the last"
            f" {case.limits.lost_after_seconds:g} s",
            at_ns=end.at_ns,
        )
        return
    heard = beats.get(end.session, [])
    place = bisect_right(heard, end.at_ns) - 1
    if place >= 0 and end.at_ns - heard[place] < threshold - case.ns(case.limits.clock_slack_seconds):
        finding.violated(
            "reaped_after_beat",
            f"{case.told(task, end.epoch)} was taken from {who} {(end.at_ns - heard[place]) / 1e9:.1f} s after its heartbeat",
        )


def _judge_bodies(case: Case, finding: Finding, task: tuple[int, int, int], epoch: int, end: AttemptReport) -> None:
    """Nothing of an attempt acts after its end was recorded, unless its owner could not be asked."""
    lines = case.lines_of.get((task, epoch))
    if not lines or case.is_lost_by_silence((task, epoch)):
        return
    finding.looked_at("bodies with an end")
    last = max(lines, key=lambda line: line.at_ns)
    if last.at_ns > end.at_ns + case.ns(case.limits.clock_slack_seconds):
        finding.violated(
            "body_outlived",
            f"{case.told(task, epoch)} ended as {end.kind}, and {(last.at_ns - end.at_ns) / 1e9:.2f} s later"
            f" pid {last.pid} wrote {last.what!r}",
        )


def _judge_orphans(case: Case, finding: Finding) -> None:
    """A run is given up only when none of its tasks could still move."""
    orphaned = {
        (move.tx, move.run_id)
        for move in case.evidence.run_moves
        if move.new_state == "failed" and (move.reason or "").startswith(_ORPHANED)
    }
    if not orphaned:
        return
    finding.looked_at("orphaned runs", len(orphaned))
    for move in case.evidence.task_moves:
        could_move = move.old_state is not None and move.old_state != "waiting" and move.old_state not in TERMINAL
        if (move.tx, move.run_id) in orphaned and could_move:
            finding.violated(
                "orphaned_alive", f"run {move.run_id} was given up while {case.told(move.task)} was {move.old_state}"
            )
