"""Shard assignment: which scheduler leads which shard, as evenly as possible, with free shards taken by any live scheduler.

Pure: from one survey of the rows it decides what this scheduler does now. All schedulers decide by the same rows, so that two never
transfer shards to each other. One transfer at a time brings the counts closer until they differ by at most one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil

# Each shard costs one poll per tick and a connection or two. More shards than the database has cores bring no gain.
MOST_SHARDS = 64


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard. `successor`: the only scheduler that may take it now. `free_in`: seconds until a lease or that
    reservation ends. `live`: all schedulers seen recently."""

    shard: int
    state: str
    leader: str | None
    successor: str | None
    is_free: bool
    free_in: float | None
    live: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDecision:
    """`take`: shards to try for. `leave`: free shards beyond our share, left to other schedulers. `give`: a shard to transfer,
    and to which scheduler."""

    take: list[int] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    give: tuple[int, str] | None = None


def decide(me: str, shares: Sequence[ShardStatus], *, overdue: Collection[int] = ()) -> ShardDecision:
    """`overdue`: shards that were left to other schedulers and not taken."""
    live = _live(me, shares)
    counts = Counter(dict.fromkeys(live, 0))
    counts.update(name for each in shares if (name := _holder(each)) is not None and name in counts)
    free = [each.shard for each in shares if each.is_free and each.successor in (None, me)]
    if not free:
        return ShardDecision(give=_give(me, shares, counts))
    ours = [each.shard for each in shares if each.shard in free and each.successor == me]
    others = [shard for shard in free if shard not in ours]
    # Two schedulers that decide at the same time start at different ends.
    start = live.index(me) * len(others) // len(live) if others else 0
    others = others[start:] + others[:start]
    room = max(ceil(len(shares) / len(live)) - counts[me], 0)
    take = ours + others[:room] + [shard for shard in others[room:] if shard in overdue]
    return ShardDecision(take=take, leave=[shard for shard in others if shard not in take])


def _live(me: str, shares: Sequence[ShardStatus]) -> list[str]:
    """A scheduler whose lease has expired or whose session has ended is gone, whatever it reported a moment ago."""
    gone = {each.leader for each in shares if each.is_free}
    there = {name for each in shares[:1] for name in each.live}
    return sorted((there - gone) | {me})


def _holder(share: ShardStatus) -> str | None:
    return share.successor if share.is_free else share.leader


def _give(me: str, shares: Sequence[ShardStatus], counts: Counter[str]) -> tuple[int, str] | None:
    """One excess shard moves from the scheduler with the most to the one with the fewest; ties are broken by name."""
    if any(each.is_free for each in shares):
        return None
    richest = min(counts, key=lambda name: (-counts[name], name))
    poorest = min(counts, key=lambda name: (counts[name], name))
    if richest != me or counts[me] - counts[poorest] < 2:
        return None
    return max(each.shard for each in shares if each.leader == me), poorest
