"""Which old things may go, and how slowly. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from evertick.domain.retention import (
    FIRST_BATCH,
    LARGEST_BATCH,
    LONGEST_BATCH_SECONDS,
    LONGEST_REST_SECONDS,
    ORDER_MARGIN,
    Dated,
    Pace,
    choose,
    rest_seconds,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
BEFORE = NOW - timedelta(days=30)
OLD, YOUNG = BEFORE - timedelta(days=1), BEFORE + timedelta(days=1)


def test_what_ended_before_goes_and_what_is_open_or_ended_late_stays() -> None:
    seen = [Dated(3, OLD, OLD), Dated(4, OLD, None), Dated(5, OLD, YOUNG), Dated(6, OLD, OLD)]
    chosen = choose(seen, after=2, before=BEFORE, now=NOW)
    assert (chosen.ids, chosen.last, chosen.is_end) == ([3, 6], 6, False)


def test_the_walk_ends_at_the_first_young_one() -> None:
    chosen = choose([Dated(3, OLD, OLD), Dated(4, YOUNG, YOUNG), Dated(5, OLD, OLD)], after=2, before=BEFORE, now=NOW)
    assert (chosen.ids, chosen.last, chosen.is_end) == ([3], 3, True)


def test_neighbours_out_of_order_by_a_transaction_do_not_end_it() -> None:
    barely_young = BEFORE + ORDER_MARGIN - timedelta(seconds=1)
    chosen = choose([Dated(3, barely_young, barely_young), Dated(4, OLD, OLD)], after=2, before=BEFORE, now=NOW)
    assert (chosen.ids, chosen.is_end) == ([4], False)


def test_one_from_the_future_is_passed_over_and_does_not_end_it() -> None:
    future = NOW + timedelta(days=400)
    chosen = choose([Dated(3, future, future), Dated(4, OLD, OLD)], after=2, before=BEFORE, now=NOW)
    assert (chosen.ids, chosen.last, chosen.is_end) == ([4], 4, False)


def test_it_is_over_where_nothing_follows() -> None:
    chosen = choose([], after=7, before=BEFORE, now=NOW)
    assert (chosen.ids, chosen.last, chosen.is_end) == ([], 7, True)


def test_the_instant_itself_is_not_before() -> None:
    assert choose([Dated(1, BEFORE, BEFORE)], after=0, before=BEFORE, now=NOW).ids == []


def test_slow_batches_shrink_and_quick_ones_grow_within_bounds() -> None:
    pace = Pace()
    assert pace.after(LONGEST_BATCH_SECONDS * 2).batch == FIRST_BATCH // 2
    assert pace.after(LONGEST_BATCH_SECONDS / 10).batch > FIRST_BATCH
    assert pace.after(LONGEST_BATCH_SECONDS / 2) == pace
    for _ in range(100):
        pace = pace.after(0.0)
    assert pace.batch == LARGEST_BATCH
    for _ in range(100):
        pace = pace.after(10.0)
    assert (pace.batch, pace.rows) == (1, 5)
    assert pace.after(0.0).batch > 1, "it recovers from the smallest"


@pytest.mark.parametrize(("is_behind", "share"), [(False, 0.05), (True, 0.01)])
def test_the_rest_leaves_it_a_small_share_of_the_time(is_behind: bool, share: float) -> None:
    rest = rest_seconds(0.02, is_behind=is_behind)
    assert 0.02 / (0.02 + rest) == pytest.approx(share)
    assert rest_seconds(1000.0, is_behind=is_behind) == LONGEST_REST_SECONDS
