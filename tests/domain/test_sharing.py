"""Who takes which shard, and who hands one over: decided alike by everybody, until nobody leads two more than another."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from evertick.domain.shards import ShardDecision, ShardStatus, decide


def shares(owners: list[str | None], live: list[str], *, heirs: dict[int, str] | None = None) -> list[ShardStatus]:
    """A shard whose owner is None is free."""
    return [
        ShardStatus(
            shard=shard,
            state="open",
            leader=owner,
            successor=(heirs or {}).get(shard),
            is_free=owner is None,
            free_in=None,
            live=live,
        )
        for shard, owner in enumerate(owners)
    ]


def test_who_is_alone_takes_everything_at_once() -> None:
    assert sorted(decide("a", shares([None] * 4, ["a"])).take) == [0, 1, 2, 3]


def test_of_what_is_free_each_takes_its_share_and_leaves_the_rest_for_a_moment() -> None:
    free = shares([None] * 4, ["a", "b"])
    first, second = decide("a", free), decide("b", free)
    assert sorted(first.take + second.take) == [0, 1, 2, 3], "not the same ones"
    assert sorted(first.leave) == sorted(second.take)


def test_what_was_left_and_nobody_took_is_taken() -> None:
    assert decide("a", shares(["a", "a", None, "b"], ["a", "b", "c"])) == ShardDecision(leave=[2])
    assert decide("a", shares(["a", "a", None, "b"], ["a", "b", "c"]), overdue={2}).take == [2]


def test_whose_session_is_over_does_not_count_as_there() -> None:
    dead = [
        ShardStatus(shard=0, state="open", leader="z", successor=None, is_free=True, free_in=4.0, live=["a", "z"]),
        ShardStatus(shard=1, state="open", leader="z", successor=None, is_free=True, free_in=4.0, live=["a", "z"]),
    ]
    assert sorted(decide("a", dead).take) == [0, 1]


def test_a_transferred_shard_is_reserved_for_its_successor() -> None:
    given = shares(["a", "a", None, "b"], ["a", "b", "c"], heirs={2: "c"})
    assert decide("c", given).take == [2]
    assert decide("a", given) == ShardDecision()
    assert decide("b", given) == ShardDecision()


def test_the_one_that_leads_most_gives_to_the_one_that_leads_least_and_keeps_the_first_shard() -> None:
    uneven = shares(["a", "a", "b", "a"], ["a", "b", "c"])
    assert decide("a", uneven).give == (3, "c")
    assert decide("b", uneven).give is None
    assert decide("c", uneven).give is None


def test_a_difference_of_one_is_even_enough() -> None:
    assert decide("a", shares(["a", "a", "b", "c"], ["a", "b", "c"])) == ShardDecision()


def test_nothing_is_given_to_somebody_who_is_not_there() -> None:
    assert decide("a", shares(["a"] * 4, ["a"])) == ShardDecision()


@pytest.mark.parametrize("seed", range(30))
def test_it_becomes_even_and_stays_so_whoever_comes_and_goes(seed: int) -> None:
    """Each decides from what it sees, in any order, while others come and go; then nobody moves any more."""
    dice = random.Random(seed)
    owners: list[str | None] = [None] * dice.randint(1, 9)
    for _ in range(5):
        live = sorted(dice.sample("abcdef", dice.randint(1, 5)))
        owners = [owner if owner in live else None for owner in owners]
        moves = 0
        for _ in range(60):
            moves += _one_decides(dice.choice(live), owners, live)
        counts = Counter(dict.fromkeys(live, 0))
        counts.update(str(owner) for owner in owners)
        assert None not in owners
        assert max(counts.values()) - min(counts.values()) <= 1, (owners, live)
        assert moves <= 2 * len(owners), "no more than it takes"
        assert not any(_one_decides(name, list(owners), live) for name in live)


def _one_decides(me: str, owners: list[str | None], live: list[str]) -> int:
    seen = shares(owners, live)
    decision = decide(me, seen, overdue=range(len(owners)))
    for shard in decision.take:
        owners[shard] = me
    if decision.give is not None:
        shard, heir = decision.give
        owners[shard] = heir
    return len(decision.take) + (decision.give is not None)
