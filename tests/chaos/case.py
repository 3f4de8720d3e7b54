"""The evidence of one run with what every check asks of it: who owned what, who was cut off when, what was disturbed.

Built once for all checks, in time that grows with the evidence and its logarithm only. Judges nothing.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any, NamedTuple

from tests.chaos.effects import Effect
from tests.chaos.evidence import AttemptReport, ClockMap, Evidence, RunFact, TaskId, TaskMove
from tests.chaos.record import ProcessLife
from tests.chaos.verdict import Limits
from tests.chaos.windows import SECOND, Windows

Attempt = tuple[TaskId, int]  # task, epoch

TERMINAL = frozenset({"success", "failed", "skipped", "canceled", "upstream_failed"})
REOPENED = frozenset({"waiting", "pending", "available"})
LOST = "lost"


class Claim(NamedTuple):
    """An attempt as the database gave it out."""

    session: int | None
    at_ns: int
    entry: int


class Case:
    """One run of the suite, and the limits it is held to."""

    def __init__(self, evidence: Evidence, limits: Limits) -> None:
        self.evidence, self.limits = evidence, limits
        self.memo: dict[str, Any] = {}
        self.clock = ClockMap(evidence.clock)
        self.planning = self._disturbed("planning")
        self.running = self._disturbed("running")

    def _disturbed(self, what: str) -> Windows:
        recovery = round(self.limits.recovery_seconds * SECOND)
        faults = self.evidence.nemesis.faults
        return Windows((each.start_ns, each.stop_ns + recovery) for each in faults if what in each.disturbs)

    @cached_property
    def runs(self) -> dict[int, RunFact]:
        return {run.run_id: run for run in self.evidence.runs}

    @cached_property
    def moves_of(self) -> dict[TaskId, list[TaskMove]]:
        found: dict[TaskId, list[TaskMove]] = defaultdict(list)
        for move in self.evidence.task_moves:
            found[move.task].append(move)
        return found

    @cached_property
    def claims(self) -> dict[Attempt, Claim]:
        """The first claim of each epoch."""
        found: dict[Attempt, Claim] = {}
        for move in self.evidence.task_moves:
            if move.new_state == "running" and move.new_epoch is not None:
                found.setdefault((move.task, move.new_epoch), Claim(move.new_session, move.at_ns, move.entry))
        return found

    @cached_property
    def dispatches(self) -> dict[Attempt, Claim]:
        """The first claim of each epoch that was for an executor elsewhere, with the session of the attempt alone."""
        found: dict[Attempt, Claim] = {}
        for move in self.evidence.task_moves:
            if move.new_state == "queued" and move.new_epoch is not None:
                found.setdefault((move.task, move.new_epoch), Claim(move.new_session, move.at_ns, move.entry))
        return found

    @cached_property
    def ends(self) -> dict[Attempt, AttemptReport]:
        """The accepted report that ended each attempt: the one in the transaction in which its task moved on."""
        by_tx = {
            (report.tx, report.task, report.epoch): report for report in self.evidence.reports if not report.is_refused
        }
        found: dict[Attempt, AttemptReport] = {}
        for move in self.evidence.task_moves:
            if move.old_state == "running" and move.old_epoch is not None and move.new_state != "running":
                report = by_tx.get((move.tx, move.task, move.old_epoch))
                if report is not None:
                    found.setdefault((move.task, move.old_epoch), report)
        return found

    @cached_property
    def _index(self) -> dict[tuple[int, str], int]:
        return {(version, plan.name): idx for (version, idx), plan in self.evidence.plans.items()}

    def task_id(self, run_id: int, name: str, map_index: int) -> TaskId | None:
        """The task that a body called by its name; nothing if the tables know no such run or task."""
        run = self.runs.get(run_id)
        idx = self._index.get((run.version_id, name)) if run is not None else None
        return None if idx is None else (run_id, idx, map_index)

    def task_name(self, task: TaskId) -> str:
        run = self.runs.get(task[0])
        plan = self.evidence.plans.get((run.version_id, task[1])) if run is not None else None
        return f"{run.dag}.{plan.name}" if run is not None and plan is not None else str(task[1])

    def told(self, task: TaskId, epoch: int | None = None) -> str:
        """A task, or an attempt at it, for people."""
        number = "" if task[2] < 0 else f"[{task[2]}]"
        return f"run {task[0]} {self.task_name(task)}{number}" + ("" if epoch is None else f" epoch {epoch}")

    @cached_property
    def lines_of(self) -> dict[Attempt, list[Effect]]:
        """What each attempt's body wrote. Bodies that the tables know nothing of are in `strangers`."""
        return self._lines[0]

    @cached_property
    def strangers(self) -> list[Effect]:
        return self._lines[1]

    @cached_property
    def _lines(self) -> tuple[dict[Attempt, list[Effect]], list[Effect]]:
        known: dict[Attempt, list[Effect]] = defaultdict(list)
        strangers = []
        for effect in self.evidence.effects:
            task = self.task_id(effect.run_id, effect.task, effect.map_index)
            if task is None:
                strangers.append(effect)
            else:
                known[task, effect.epoch].append(effect)
        return known, strangers

    @cached_property
    def epochs_of(self) -> dict[TaskId, list[int]]:
        """The epochs of each task whose bodies wrote something, in order."""
        found: dict[TaskId, list[int]] = defaultdict(list)
        for task, epoch in self.lines_of:
            found[task].append(epoch)
        return {task: sorted(epochs) for task, epochs in found.items()}

    @cached_property
    def _lives(self) -> dict[int, list[ProcessLife]]:
        found: dict[int, list[ProcessLife]] = defaultdict(list)
        for life in self.evidence.nemesis.lives:
            found[life.pid].append(life)
        return found

    @cached_property
    def owners(self) -> dict[int, ProcessLife]:
        """The process behind each session, as the harness knew it: by pid, and by when it registered."""
        began = {move.session: move.at_ns for move in self.evidence.runner_moves if move.what == "started"}
        slack = round(self.limits.exit_slack_seconds * SECOND)
        found = {}
        for runner in self.evidence.runners:
            at = began.get(runner.session)
            for life in self._lives.get(runner.pid, []):
                if at is None or (life.start_ns - slack <= at and (life.exit_ns is None or at <= life.exit_ns + slack)):
                    found[runner.session] = life
        return found

    def _cut_off(self, slack: int) -> dict[str, Windows]:
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for fault in self.evidence.nemesis.faults:
            if fault.silences is not None:
                found[fault.silences].append((fault.start_ns - slack, fault.stop_ns + slack))
        return {service: Windows(intervals) for service, intervals in found.items()}

    @cached_property
    def _exactly_silenced(self) -> dict[str, Windows]:
        return self._cut_off(0)

    @cached_property
    def _silenced(self) -> dict[str, Windows]:
        return self._cut_off(self.ns(self.limits.heartbeat_seconds + 1.0))

    def exact_silence(self, session: int | None) -> Windows:
        """When the owner of that session could not report."""
        life = self.owners.get(session) if session is not None else None
        return self._exactly_silenced.get(life.service, _NEVER) if life is not None else _NEVER

    def silence(self, session: int | None) -> Windows:
        """The same, widened by a heartbeat and a second at both ends: it need not have tried there."""
        life = self.owners.get(session) if session is not None else None
        return self._silenced.get(life.service, _NEVER) if life is not None else _NEVER

    def has_exited(self, session: int, at_ns: int) -> bool:
        """Whether its process had ended by then, as far as the harness knew."""
        life = self.owners.get(session)
        exit_ns = life.exit_ns if life is not None else None
        return exit_ns is not None and exit_ns <= at_ns + self.ns(self.limits.exit_slack_seconds)

    def is_lost_by_silence(self, attempt: Attempt) -> bool:
        """Whether its owner was given up while its process was there: then its body may live on until it wakes."""
        end = self.ends.get(attempt)
        return end is not None and end.kind == LOST and not self.has_exited(end.session, end.at_ns)

    @staticmethod
    def ns(seconds: float) -> int:
        return round(seconds * SECOND)


_NEVER = Windows()
