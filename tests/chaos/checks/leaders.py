"""J9 no commit by an old leader once a new one has committed; J13 somebody leads and ticks, all the time."""

from __future__ import annotations

from itertools import pairwise

from tests.chaos.case import Case
from tests.chaos.record import Phase
from tests.chaos.verdict import Finding
from tests.chaos.windows import Windows

FOR_EVER = 1 << 62


def j9(case: Case, finding: Finding) -> None:
    """In the order of the commits the epoch of who commits never falls, whatever it commits."""
    highest: dict[int, int] = {}
    taken: dict[tuple[int, int], str] = {}
    led: dict[str, tuple[int, int]] = {}  # the shard and epoch under which a connection was last seen planning
    for commit in case.evidence.leader_commits:
        if commit.shard is None or commit.epoch is None:
            _unfenced(finding, commit.backend, commit.kind, led.get(commit.backend), highest)
            continue
        finding.looked_at(f"commits: {commit.kind}")
        shard, epoch, top = commit.shard, commit.epoch, highest.get(commit.shard, -1)
        if commit.kind == "take":
            if epoch <= top:
                finding.violated("epoch_went_back", f"shard {shard} was taken with epoch {epoch} after {top}")
            if (shard, epoch) in taken:
                finding.violated("two_leaders", f"epoch {epoch} of shard {shard} was given out twice")
            taken[shard, epoch] = commit.backend
        elif epoch < top:
            finding.violated(
                "old_leader", f"{commit.kind} of epoch {epoch} committed after epoch {top} had", place=commit.place
            )
        highest[shard] = max(epoch, top)
        led[commit.backend] = (shard, epoch)
    owners: dict[tuple[int, int], str] = {}
    for move in case.evidence.shard_moves:
        if move.owner is None or move.new_epoch is None:
            continue
        known = owners.setdefault((move.shard, move.new_epoch), move.owner)
        if known != move.owner:
            finding.violated(
                "two_leaders", f"epoch {move.new_epoch} of shard {move.shard} belongs to {known} and to {move.owner}"
            )


def _unfenced(finding: Finding, backend: str, kind: str, led: tuple[int, int] | None, highest: dict[int, int]) -> None:
    """Counting silence and burying are a leader's writes, too: who does them is known by its connection."""
    if led is None:
        return
    shard, epoch = led
    finding.looked_at(f"commits: {kind}")
    if epoch < highest.get(shard, -1):
        finding.violated(
            "old_leader",
            f"{kind} by the connection of epoch {epoch} committed after epoch {highest[shard]} had",
            backend=backend,
        )


def j13(case: Case, finding: Finding) -> None:
    """From the first leader of each shard until the evidence is read no tick is missing, but for what faults excuse and while
    the shard is closed: then nobody leads it."""
    ticked: dict[int, list[int]] = {}
    for commit in case.evidence.leader_commits:
        if commit.shard is not None and commit.epoch is not None:
            ticked.setdefault(commit.shard, []).append(commit.at_ns)
    worst = max([_gaps(case, finding, shard, sorted(ticks)) for shard, ticks in ticked.items()], default=0)
    finding.counts["ms at most between ticks in time"] += worst // 1_000_000


def _gaps(case: Case, finding: Finding, shard: int, ticks: list[int]) -> int:
    """The longest that was in time."""
    read = case.evidence.nemesis.phase_ns(Phase.READ)
    if read is not None:
        ticks = [at for at in ticks if at <= read] + [read]
    allowed, closed = case.ns(case.limits.tick_gap_seconds), _closed(case, shard)
    worst = 0
    for earlier, later in pairwise(ticks):
        finding.looked_at("ticks")
        since = _needed_since(closed, earlier, later)
        if later - since <= allowed:
            worst = max(worst, later - since)
        elif later <= case.planning.deadline(since, allowed):
            finding.counts["gaps excused by faults"] += 1
        else:
            finding.violated("gap", f"nobody ticked in shard {shard} for {(later - since) / 1e9:.2f} s", from_ns=since)
    return worst


def _needed_since(closed: Windows, earlier: int, later: int) -> int:
    """Since when somebody had to lead between two ticks. The closing of a shard is its last tick."""
    for start, stop in closed:
        if start < later and stop > earlier:
            earlier = min(stop, later)
    return earlier


def _closed(case: Case, shard: int) -> Windows:
    """When that shard was closed."""
    intervals: list[tuple[int, int]] = []
    since: int | None = None
    for move in case.evidence.shard_moves:
        if move.shard != shard:
            continue
        if move.state == "closed":
            since = move.at_ns if since is None else since
        elif since is not None:
            intervals.append((since, move.at_ns))
            since = None
    return Windows([*intervals, (since, FOR_EVER)] if since is not None else intervals)
