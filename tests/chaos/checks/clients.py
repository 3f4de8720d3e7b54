"""J10 every acknowledged write is there; an unknown one may be or not; none is there twice."""

from __future__ import annotations

from collections import Counter

from tests.chaos.case import Case
from tests.chaos.record import Answer, ClientRequest, Fault
from tests.chaos.verdict import Finding
from tests.chaos.windows import Windows

_STALE = "stale_"


def j10(case: Case, finding: Finding) -> None:
    there = Counter((change.op, change.request) for change in case.evidence.changes)
    may_be_lost = _losing(case)
    for request in case.evidence.client:
        if request.op.startswith(_STALE):
            continue
        answer = _excused(request, may_be_lost)
        finding.looked_at(f"requests: {answer}")
        number = there[request.op, request.request]
        text = f"{request.op} {request.request}"
        if number > 1:
            finding.violated("doubled", f"{text} was answered {answer} and is there {number} times")
        elif answer is Answer.OK and number == 0:
            finding.violated("lost", f"{text} was acknowledged and is not there", **request.detail)
        elif answer is Answer.ERROR and number > 0:
            finding.violated("refused_but_there", f"{text} was refused and is there", **request.detail)


def _losing(case: Case) -> Windows:
    """A failover to a standby that lagged loses what was acknowledged shortly before it, and says so."""
    return Windows(
        (fault.start_ns - case.ns(float(fault.parameters["may_lose_seconds"])), fault.stop_ns)
        for fault in case.evidence.nemesis.faults
        if fault.kind is Fault.FAILOVER and "may_lose_seconds" in fault.parameters
    )


def _excused(request: ClientRequest, may_be_lost: Windows) -> Answer:
    at = request.answered_ns or request.asked_ns
    is_excused = request.answer is Answer.OK and may_be_lost.meets(at, at)
    return Answer.UNKNOWN if is_excused else request.answer
