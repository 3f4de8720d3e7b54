"""J14 nothing leaks: after the load the installation uses what it used before, and no process grows while it lives."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tests.chaos.case import Case
from tests.chaos.record import Phase, Sample
from tests.chaos.verdict import Finding

# A process is judged by its own growth once it was looked at this often; fewer looks say nothing.
_ENOUGH = 12


def j14(case: Case, finding: Finding) -> None:
    idle = [sample for sample in case.evidence.nemesis.samples if sample.phase == Phase.IDLE]
    _rest(case, finding, idle)
    _growth(case, finding)
    _totals(case, finding)


def _rest(case: Case, finding: Finding, idle: list[Sample]) -> None:
    """Each service at rest, after the load against before it. Its process may be another one by now."""
    loaded = case.evidence.nemesis.phase_ns(Phase.LOAD)
    if loaded is None:
        return
    before: dict[str, list[Sample]] = defaultdict(list)
    after: dict[str, list[Sample]] = defaultdict(list)
    for sample in idle:
        (before if sample.at_ns < loaded else after)[sample.service].append(sample)
    for service in before.keys() & after.keys():
        finding.looked_at("services at rest")
        _compare(case, finding, f"{service} at rest", before[service], after[service])


def _growth(case: Case, finding: Finding) -> None:
    """Each process by itself under load: the last third of its life against the second."""
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in case.evidence.nemesis.samples:
        if sample.phase == Phase.LOAD:
            lives[sample.service, sample.pid].append(sample)
    for (service, pid), samples in lives.items():
        third = len(samples) // 3
        if len(samples) < _ENOUGH:
            continue
        finding.looked_at("processes under load")
        samples.sort(key=lambda sample: sample.at_ns)
        _compare(case, finding, f"{service} (pid {pid}) under load", samples[third : 2 * third], samples[2 * third :])


def _compare(case: Case, finding: Finding, who: str, before: list[Sample], after: list[Sample]) -> None:
    """By the median of the earlier and the least of the later looks: what comes down again is no leak."""
    limits = case.limits

    def judge(kind: str, was: float, now: float, most: float) -> None:
        if now > most:
            finding.violated(kind, f"{who}: {kind} went from {was:g} to {now:g}, at most {most:g} were expected")

    fds, children = median(s.fds for s in before), median(s.children for s in before)
    rss = median(s.rss_kb for s in before)
    judge("fds", fds, min(s.fds for s in after), fds + limits.leaked_fds)
    judge(
        "threads",
        median(s.threads for s in before),
        min(s.threads for s in after),
        median(s.threads for s in before) + 4,
    )
    judge("children", children, min(s.children for s in after), children + limits.leaked_children)
    judge("rss", rss, min(s.rss_kb for s in after), max(rss * limits.leaked_rss_ratio, rss + limits.leaked_rss_kb))
    sessions = [s.connections for s in before if s.connections is not None]
    sessions_after = [s.connections for s in after if s.connections is not None]
    if sessions and sessions_after:
        usual = median(sessions)
        judge("connections", usual, min(sessions_after), usual + limits.leaked_connections)


def _totals(case: Case, finding: Finding) -> None:
    """The whole installation: its sessions in the database, and processes that nobody owns any more."""
    totals = sorted(case.evidence.nemesis.totals, key=lambda total: total.at_ns)
    idle = [total for total in totals if total.phase == Phase.IDLE]
    if len(idle) < 2:
        return
    finding.looked_at("looks at the whole", len(totals))
    first, last = idle[0], idle[-1]
    if last.connections > first.connections + case.limits.leaked_connections:
        finding.violated(
            "connections", f"{first.connections} sessions at rest before the load, {last.connections} after it"
        )
    if last.strays > 0:
        finding.violated("strays", f"{last.strays} processes are left that no service owns")
