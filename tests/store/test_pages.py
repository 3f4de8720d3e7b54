"""Pages of lists: a statement says only what is asked, and means the same."""

from __future__ import annotations

import re

import pytest

from evertick.store.pages import only_asked
from evertick.store.statements import sql, statements

NONE: frozenset[str] = frozenset()
STATEMENT = """select 1 from t where (%(a)s::int is null or a = %(a)s) and (%(b)s::text[] is null
   or b = any(%(b)s) or (c is null or c = lower('x'))) and (%(d)s::boolean is not true or d) and (e is null or e > 0)"""


WHOLE = "select 1 from t where true and true and true and (e is null or e > 0)"


@pytest.mark.parametrize(
    ("unasked", "untrue", "left"),
    [
        ("abd", "", WHOLE),
        ("ab", "d", WHOLE),
        (
            "b",
            "",
            "select 1 from t where (%(a)s::int is null or a = %(a)s) and true and (%(d)s::boolean is not true or d)",
        ),
        # False is an answer where null is asked for.
        ("", "a", "select 1 from t where (%(a)s::int is null or a = %(a)s) and (%(b)s"),
        ("", "", STATEMENT),
        ("ec", "", STATEMENT),
    ],
)
def test_what_is_not_asked_is_left_out_and_nothing_else(unasked: str, untrue: str, left: str) -> None:
    assert only_asked(STATEMENT, frozenset(unasked), frozenset(untrue)).startswith(left)


def test_within_what_is_left_out_nothing_is_looked_for() -> None:
    nested = "x where (%(a)s::int is null or (%(b)s::int is null or b = %(b)s)) and (%(b)s::int is null or b = %(b)s)"
    assert only_asked(nested, frozenset("ab"), NONE) == "x where true and true"
    assert only_asked(nested, frozenset("b"), NONE) == "x where (%(a)s::int is null or true) and true"


@pytest.mark.parametrize("name", ["runs", "tasks", "dags"])
def test_each_condition_of_a_list_can_be_left_out(name: str) -> None:
    statement = sql("listing", name)
    asked = set(re.findall(r"%\((\w+)\)s::[\w\[\]]+ is (?:null|not true)", statement))
    left = only_asked(statement, frozenset(asked), NONE)
    assert len(asked) > 10 and not set(re.findall(r"%\((\w+)\)s::[\w\[\]]+ is (?:null|not true)", left))
    assert left.count("(") == left.count(")") and name in statements("listing")
