"""J6 only legal moves, replayed from the audit; J8 nothing is stuck once the faults are over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tests.chaos.case import TERMINAL, Case
from tests.chaos.evidence import RunMove, TaskId, TaskMove
from tests.chaos.record import Phase
from tests.chaos.verdict import Finding

_MARKED = {"success", "failed", "skipped"}
_REOPENED = {"waiting", "pending", "available"}
_ENDED = {"success", "failed", "skipped", "canceled", "upstream_failed"}

# Written out from the design's table, not taken from the program: what the program thinks is legal is what is on trial.
TASK_MOVES: Mapping[str, set[str]] = {
    "waiting": _MARKED | {"pending", "available", "upstream_failed", "canceled"},
    "pending": _MARKED | {"available", "deferred", "upstream_failed", "canceled"},
    "available": _MARKED | {"running", "queued", "pending", "canceled"},
    "queued": _MARKED | {"running", "available", "pending", "canceled"},
    "running": _MARKED | {"pending", "available", "deferred", "canceled"},
    "deferred": _MARKED | {"pending", "canceled"},
    **{state: (_REOPENED | _MARKED) - {state} for state in _ENDED},
}
RUN_MOVES: Mapping[str, set[str]] = {
    "queued": {"running", "failed", "canceled"},
    "running": {"success", "failed", "canceled"},
    **{state: {"queued"} for state in ("success", "failed", "canceled")},
}
_FIRST_RUN_STATES = {"queued", "running"}
_OPEN_RUN_STATES = {"queued", "running"}


def j6(case: Case, finding: Finding) -> None:
    """Every committed change of a state is one that the table allows, and follows on the one before it."""
    for task, moves in case.moves_of.items():
        _replay_task(case, finding, task, moves)
    runs: dict[int, list[RunMove]] = defaultdict(list)
    for move in case.evidence.run_moves:
        runs[move.run_id].append(move)
    for run_id, run_moves in runs.items():
        _replay_run(finding, run_id, run_moves)
    _closings(case, finding, runs)
    for text in case.evidence.changed_facts:
        finding.violated("fact_changed", f"a fact is written once: {text}")


def _replay_task(case: Case, finding: Finding, task: TaskId, moves: list[TaskMove]) -> None:
    state: str | None = None
    for move in moves:
        finding.looked_at("moves of tasks")
        # A task without a row is waiting, and so is one whose row was never worth recording.
        was = move.old_state or "waiting"
        if was != (state or "waiting"):
            finding.violated("broken_chain", f"{case.told(task)} was {state} and then left {was}", entry=move.entry)
        if move.new_state != was and move.new_state not in TASK_MOVES.get(was, set()):
            finding.violated("illegal_move", f"{case.told(task)} went from {was} to {move.new_state}", entry=move.entry)
        state = move.new_state


def _replay_run(finding: Finding, run_id: int, moves: list[RunMove]) -> None:
    state: str | None = None
    for move in moves:
        finding.looked_at("moves of runs")
        if move.old_state != state:
            finding.violated(
                "broken_chain", f"run {run_id} was {state} and then left {move.old_state}", entry=move.entry
            )
        allowed = _FIRST_RUN_STATES if move.old_state is None else RUN_MOVES.get(move.old_state, set())
        if move.new_state not in allowed:
            finding.violated(
                "illegal_move", f"run {run_id} went from {move.old_state} to {move.new_state}", entry=move.entry
            )
        state = move.new_state


def _closings(case: Case, finding: Finding, runs: dict[int, list[RunMove]]) -> None:
    """When the transaction that closes a run is over, none of its tasks is open."""
    tasks: dict[int, list[TaskMove]] = defaultdict(list)
    for move in case.evidence.task_moves:
        tasks[move.run_id].append(move)
    for run_id, run_moves in runs.items():
        events: list[TaskMove | RunMove] = [*run_moves, *tasks.get(run_id, [])]
        events.sort(key=lambda move: move.entry)
        states: dict[TaskId, str | None] = {}
        closing: RunMove | None = None
        for event in events:
            if closing is not None and event.tx != closing.tx:
                _judge_closing(case, finding, closing, states)
                closing = None
            if isinstance(event, TaskMove):
                states[event.task] = event.new_state
            else:
                closing = event if event.new_state in TERMINAL else None
        if closing is not None:
            _judge_closing(case, finding, closing, states)


def _judge_closing(case: Case, finding: Finding, closing: RunMove, states: dict[TaskId, str | None]) -> None:
    finding.looked_at("closed runs")
    still_open = [task for task, state in states.items() if state is not None and state not in TERMINAL]
    if still_open:
        texts = [f"{case.told(task)} is {states[task]}" for task in still_open[:5]]
        finding.violated(
            "closed_with_open_tasks", f"run {closing.run_id} became {closing.new_state}: {'; '.join(texts)}"
        )


def j8(case: Case, finding: Finding) -> None:
    """After the last fault everything comes to rest in time; before, no run outlives its faults for long."""
    healed, read = case.evidence.nemesis.phase_ns(Phase.HEALED), case.evidence.read_ns
    for leftover in case.evidence.leftovers:
        kind = {"run": "stuck_run", "task": "stuck_task"}.get(leftover.kind, "leftover")
        finding.violated(kind, leftover.text)
    finding.counts["left open"] += len(case.evidence.leftovers)
    for placement in case.evidence.nemesis.placements:
        if placement.stop_ns is None:
            finding.violated("leftover", f"{placement.name} is still with its executor")
    if healed is None:
        finding.violated("not_drained", "the nemesis log never says that the last fault was over")
        return
    if read - healed < 0:
        finding.violated("not_drained", "the evidence was read before the last fault was over")
    drained = healed + case.ns(case.limits.drain_seconds)
    allowed = case.ns(case.limits.run_seconds)
    runs: dict[int, list[RunMove]] = defaultdict(list)
    for move in case.evidence.run_moves:
        runs[move.run_id].append(move)
    for run_id, moves in runs.items():
        finding.looked_at("runs")
        run = case.runs.get(run_id)
        for opened, closed in _open_times(moves):
            if closed > drained and opened <= healed:
                finding.violated(
                    "slow_recovery", f"run {run_id} was open until {(closed - healed) / 1e9:.1f} s after the last fault"
                )
            elif run is not None and run.kind == "scheduled" and closed > case.running.deadline(opened, allowed):
                finding.violated("slow_run", f"run {run_id} of {run.dag} was open for {(closed - opened) / 1e9:.1f} s")


def _open_times(moves: list[RunMove]) -> list[tuple[int, int]]:
    """From each opening of a run to the closing after it. What is still open is a leftover."""
    found = []
    opened: int | None = None
    for move in moves:
        if move.new_state in _OPEN_RUN_STATES and opened is None:
            opened = move.at_ns
        elif move.new_state in TERMINAL and opened is not None:
            found.append((opened, move.at_ns))
            opened = None
    return found
