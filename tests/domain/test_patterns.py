"""Patterns on `dag::group::task`: what they match, why not, what they refuse, and which of two takes all of the other's."""

from __future__ import annotations

import random
import re
import time

import pytest

from evertick.domain.errors import InvalidRouting
from evertick.domain.routing import (
    Pattern,
    address_of,
    address_text,
    covers,
    matches,
    mismatch,
    read_address,
    read_pattern,
)

pytestmark = pytest.mark.requirement("K6")


@pytest.mark.parametrize(
    ("pattern", "task", "expected"),
    [
        ("ml::train", "ml::train", True),
        ("ml::train", "ml::train_all", False),
        ("ml::*", "ml::train", True),
        ("ml::*", "etl::extract", False),
        ("ml::*", "ml::prepare::load", False),
        ("ml::**", "ml::train", True),
        ("ml::**", "ml::prepare::load", True),
        ("**::heavy_*", "ml::heavy_train", True),
        ("**::heavy_*", "etl::data::heavy_load", True),
        ("**::heavy_*", "etl::heavy_data::load", False),
        ("**::batch::*", "etl::batch::load", True),
        ("**::batch::*", "etl::a::batch::load", True),
        ("**::batch::*", "etl::batch", False),
        ("etl::**::load", "etl::load", True),
        ("etl::**::load", "etl::a::b::load", True),
        ("etl::**::load", "etl::a::b::loaded", False),
        ("heavy_*", "ml::heavy_compute", True),
        ("heavy_*", "ml::a::heavy_compute", True),
        ("heavy_*", "heavy_dag::compute", False),
        ("*_gpu", "ml::train_gpu", True),
        ("*_gpu", "ml::train_gpu_2", False),
        ("a*b*c::x", "axxbxxc::x", True),
        ("a*b*c::x", "axxcxxb::x", False),
        ("**", "ml::train", True),
        ("*", "ml::a::train", True),
        ("a.b::*", "a.b::x", True),
        ("a.b::*", "aXb::x", False),
    ],
)
def test_a_pattern_matches_what_it_says(pattern: str, task: str, expected: bool) -> None:
    assert matches(read_pattern(pattern), read_address(task)) is expected
    assert (mismatch(read_pattern(pattern), read_address(task)) is None) is expected


def test_the_groups_of_a_task_are_segments_of_its_full_name() -> None:
    assert address_text(address_of("etl.daily", "extract.orders")) == "etl.daily::extract::orders"
    assert address_of("etl", "load") == read_address("etl::load")


@pytest.mark.parametrize(
    ("pattern", "task", "reason"),
    [
        ("ml::*", "etl::load", "'etl' is not 'ml'"),
        ("ml::*", "ml::prepare::load", "it has 2 segments, and the task's name has 3"),
        ("heavy_*", "ml::light", "the task's name is 'light', not 'heavy_*'"),
        ("ml::**::x", "ml::a::b", "its segments do not match the task's name"),
    ],
)
def test_a_mismatch_has_a_reason(pattern: str, task: str, reason: str) -> None:
    assert mismatch(read_pattern(pattern), read_address(task)) == reason


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it must be text"),
        (7, "it must be text"),
        ("ml::", "a segment is empty"),
        ("::x", "a segment is empty"),
        ("ml:x", "two colons"),
        ("ml:::x", "two colons"),
        ("ml::x?", "only letters"),
        ("ml::[ab]", "only letters"),
        ("ml::a b", "only letters"),
        ("ml::x**", "'**' matches whole segments"),
        ("ml::***", "'**' matches whole segments"),
        ("**::**::x", "means the same as"),
        ("a::**::b::**::c::**::d::**", "at most 3 times"),
        ("::".join("a" * 13), "at most 12 segments"),
        ("x" * 501, "at most 500 characters"),
    ],
)
def test_a_bad_pattern_is_refused_with_the_reason(text: object, complaint: str) -> None:
    with pytest.raises(InvalidRouting, match=re.escape(complaint)):
        read_pattern(text)


@pytest.mark.parametrize("text", ["load", "etl::", "etl::*", "etl:load", "etl::a b"])
def test_what_is_no_full_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRouting, match="DAG::TASK"):
        read_address(text)


def oracle(pattern: Pattern) -> re.Pattern[str]:
    """The same by a plain regular expression over the whole name."""
    parts = []
    for segment in pattern.segments:
        if segment == "**":
            parts.append("(?:[^:]+;)*")
        else:
            parts.append("[^:;]*".join(re.escape(piece) for piece in segment.split("*")) + ";")
    return re.compile("".join(parts))


def random_pattern(rng: random.Random) -> Pattern:
    while True:
        segments = [rng.choice(["**", "*", "a", "b", "a*", "*b", "ab"]) for _ in range(rng.randint(1, 4))]
        try:
            return read_pattern("::".join(segments))
        except InvalidRouting:
            continue


NAMES = [
    tuple(segments)
    for segments in (
        ["a", "a"],
        ["a", "b"],
        ["b", "a"],
        ["ab", "b"],
        ["a", "ab"],
        ["ba", "a"],
        ["c", "a"],
        ["ccc", "c"],
        ["a", "a", "a"],
        ["a", "b", "a"],
        ["b", "b", "ab"],
        ["a", "b", "b", "a"],
        ["ab", "ab", "ab", "ab"],
        ["b", "a", "b", "a", "b"],
        ["a"] * 6,
    )
]


def test_random_patterns_match_as_a_regular_expression_does() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        pattern, name = random_pattern(rng), rng.choice(NAMES)
        expected = oracle(pattern).fullmatch("".join(f"{segment};" for segment in name)) is not None
        assert matches(pattern, name) is expected, (pattern.text, name)


def test_a_pattern_that_covers_another_matches_whatever_that_matches() -> None:
    rng = random.Random(6)
    covered = 0
    for _ in range(3000):
        earlier, later = random_pattern(rng), random_pattern(rng)
        if covers(earlier, later):
            covered += 1
            assert all(matches(earlier, name) for name in NAMES if matches(later, name)), (earlier.text, later.text)
    assert covered > 100


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ("ml::*", "ml::train", True),
        ("ml::*", "ml::*", True),
        ("ml::**", "ml::*", True),
        ("ml::*", "ml::**", False),
        ("**", "anything_*", True),
        ("*::**", "**", True),
        ("*::*", "**", False),
        ("heavy_*", "**::heavy_load", True),
        ("heavy_*", "ml::heavy_*", True),
        ("ml::heavy_*", "heavy_*", False),
        ("a*::x", "ab*::x", True),
        ("ab*::x", "a*::x", False),
        ("**::b::*", "a::b::c", True),
        ("*::*::**", "**", True),
        ("*::*::*::**", "**", False),
    ],
)
def test_covering_is_decided_exactly(earlier: str, later: str, expected: bool) -> None:
    assert covers(read_pattern(earlier), read_pattern(later)) is expected


def test_no_pattern_and_name_take_long() -> None:
    started = time.process_time()
    pattern = read_pattern("::".join(["*a" * 15 + "b", "**"] * 3))
    name = ["a" * 200] * 60
    assert not matches(pattern, name)
    assert not covers(pattern, read_pattern("**::a*::**::*b::**"))
    assert time.process_time() - started < 10
