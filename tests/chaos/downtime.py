"""How long something that goes on all the time did not, by the audit's clock. Reads, and judges nothing."""

from __future__ import annotations

from itertools import pairwise

from tests.chaos.watch import Watcher

CLAIMS = "select at_ns from chaos_audit.lease_move where is_gained and at_ns between %s and %s order by at_ns"
LEADING = (
    "select at_ns from chaos_audit.leader_commit where kind in ('take', 'renew', 'planning') and at_ns between %s and %s"
    " order by at_ns"
)


async def longest_pause(watch: Watcher, what: str, begin_ns: int, end_ns: int) -> float:
    """In seconds, between two of `what`, or from the begin to the first or from the last to the end."""
    times = [at_ns for (at_ns,) in await watch.must(what, begin_ns, end_ns)]
    return max(later - earlier for earlier, later in pairwise([begin_ns, *times, end_ns])) / 1e9
