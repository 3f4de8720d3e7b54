"""How a run is judged: the limits it is held to, what each invariant counted, and every violation with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

INVARIANTS = tuple(f"J{number}" for number in range(1, 17))

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is promised, in seconds. The defaults fit the scaled settings on a busy machine of two cores.

    A delay that a fault excuses may last until the fault's end, `recovery_seconds`, and the calm limit once more.
    """

    tick_seconds: float = 1.0
    leader_lease_seconds: float = 4.0
    heartbeat_seconds: float = 1.0
    lost_after_seconds: float = 9.0
    infra_retries: float = 3

    fire_tolerance_seconds: float = 2.0
    start_tolerance_seconds: float = 15.0
    recovery_seconds: float = 8.0
    tick_gap_seconds: float = 3.0
    run_seconds: float = 120.0
    drain_seconds: float = 120.0
    # How long before its commit a change of a schedule may have looked at the clock.
    edit_seconds: float = 5.0
    # How long after contact a replaced body may still act: a heartbeat, the promised two seconds, and the machine.
    stop_seconds: float = 5.0
    # By how much less than the whole threshold its owner was cut off: it reports once per heartbeat only, and when it is
    # reaped at the very end of the cut, the order of the two is a matter of luck.
    silence_slack_seconds: float = 2.5
    # How much later than it happened the harness may have noted an exit; how coarse the audit's clock is.
    exit_slack_seconds: float = 1.0
    clock_slack_seconds: float = 0.1

    leaked_fds: float = 20
    leaked_children: float = 2
    leaked_connections: float = 6
    leaked_rss_kb: float = 40_960
    leaked_rss_ratio: float = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """`kind` is one of the invariant's sub-kinds; `text` tells it to a person; `evidence` is what it rests on."""

    kind: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Finding:
    """What one invariant found. `checked` counts the things that could have violated it."""

    invariant: str
    checked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    @property
    def is_exercised(self) -> bool:
        return self.checked > 0

    def looked_at(self, what: str, number: int = 1) -> None:
        """So many things that could have violated it."""
        self.checked += number
        self.counts[what] += number

    def violated(self, kind: str, text: str, **evidence: Any) -> None:
        self.violations.append(Violation(kind=kind, text=text, evidence=evidence))

    @property
    def status(self) -> str:
        if self.violations:
            return f"{len(self.violations)} VIOLATIONS"
        return "ok" if self.is_exercised else "not exercised"

    def lines(self) -> Iterable[str]:
        counted = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        yield f"{self.invariant:<4} {self.status:<16} {counted}"
        kinds = Counter(violation.kind for violation in self.violations)
        if kinds:
            yield f"     {', '.join(f'{number} {kind}' for kind, number in kinds.most_common())}"
        for violation in self.violations[:_SHOWN]:
            shown = f" {violation.evidence}" if violation.evidence else ""
            yield f"     {violation.kind}: {violation.text}{shown}"
        if len(self.violations) > _SHOWN:
            yield f"     … and {len(self.violations) - _SHOWN} more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict on one run."""

    findings: dict[str, Finding]

    @property
    def violations(self) -> list[tuple[str, Violation]]:
        return [(name, each) for name, finding in self.findings.items() for each in finding.violations]

    def not_exercised(self, required: Iterable[str] | None = None) -> list[str]:
        """Those of the required invariants (all that were asked, unless told) that had nothing to check."""
        wanted = self.findings if required is None else required
        return [name for name in wanted if name not in self.findings or not self.findings[name].is_exercised]

    def is_good(self, required: Iterable[str] | None = None) -> bool:
        """No violation anywhere, and everything that was required had something to check."""
        return not self.violations and not self.not_exercised(required)

    def text(self) -> str:
        return "\n".join(line for finding in self.findings.values() for line in finding.lines())

    def as_json(self) -> dict[str, Any]:
        return {
            name: {
                "status": finding.status,
                "checked": finding.checked,
                "counts": dict(finding.counts),
                "violations": [asdict(violation) for violation in finding.violations],
            }
            for name, finding in self.findings.items()
        }
