"""Reads the evidence of a run and proves the invariants J1 to J16, or shows where they were broken.

Shares no code with the program that is on trial. An invariant that found nothing to check says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.chaos.case import Case
from tests.chaos.checks.attempts import j4, j5, j12
from tests.chaos.checks.clients import j10
from tests.chaos.checks.fires import j1, j2, j3
from tests.chaos.checks.leaders import j9, j13
from tests.chaos.checks.leaks import j14
from tests.chaos.checks.limits import j15, j16
from tests.chaos.checks.moves import j6, j8
from tests.chaos.checks.reaps import j7
from tests.chaos.checks.retries import j11
from tests.chaos.evidence import Evidence
from tests.chaos.verdict import INVARIANTS, Finding, Limits, Report, Violation

__all__ = ["INVARIANTS", "Finding", "Limits", "Report", "Violation", "check"]

_CHECKS: dict[str, Callable[[Case, Finding], None]] = dict(
    zip(INVARIANTS, (j1, j2, j3, j4, j5, j6, j7, j8, j9, j10, j11, j12, j13, j14, j15, j16), strict=True)
)


def check(evidence: Evidence, limits: Limits | None = None, *, only: Iterable[str] = INVARIANTS) -> Report:
    """Judge the evidence by all invariants, or by some."""
    case = Case(evidence, limits or Limits())
    findings = {}
    for name in only:
        findings[name] = Finding(invariant=name)
        _CHECKS[name](case, findings[name])
    return Report(findings=findings)
