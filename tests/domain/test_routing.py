"""Routing rules: first match wins, the default comes last, a task's own queue wins; bad rules are refused with the reason."""

from __future__ import annotations

import pytest

from evertick.domain.errors import InvalidRouting
from evertick.domain.routing import Routing, queues_of, read_address, read_cell, read_routing, route, try_rules
from tests.engine.world import make_dag

pytestmark = pytest.mark.requirement("K6")

RULES = """
default = "small"

[[rule]]
match = "ml::train"
queue = "big_gpu"

[[rule]]
match = "ml::*"
queue = "gpu"

[[rule]]
match = "**::batch::*"
queue = "batch"

[[rule]]
match = "heavy_*"
queue = "high_memory"
"""


def rules(*patterns: str) -> str:
    return "".join(f"[[rule]]\nmatch = '{pattern}'\nqueue = 'q{n}'\n" for n, pattern in enumerate(patterns, 1))


@pytest.mark.parametrize(
    ("task", "queue"),
    [
        ("ml::train", "big_gpu"),
        ("ml::predict", "gpu"),
        ("ml::heavy_one", "gpu"),
        ("etl::batch::load", "batch"),
        ("etl::heavy_load", "high_memory"),
        ("etl::load", "small"),
    ],
)
def test_the_first_rule_that_matches_wins_and_the_default_comes_last(task: str, queue: str) -> None:
    assert route(read_routing(RULES), read_address(task)) == queue


def test_the_order_of_rules_decides() -> None:
    assert route(read_routing(rules("ml::train", "ml::*")), ("ml", "train")) == "q1"
    assert route(read_routing(rules("heavy_*", "ml::*")), ("ml", "heavy_x")) == "q1"
    assert route(read_routing(rules("ml::*", "heavy_*")), ("ml", "heavy_x")) == "q1"


def test_without_rules_everything_goes_to_the_default_queue() -> None:
    assert route(Routing(), ("a", "b")) == "default"
    assert read_routing("") == Routing()


def test_a_tasks_own_queue_wins_over_all_rules() -> None:
    spec = make_dag("ml", {"train": [], "prepare.load": [], "mine": []}, per_task={"mine": {"queue": "default"}})
    assert queues_of(read_routing(rules("**")), spec) == ["q1", "q1", "default"]
    assert queues_of(read_routing(rules("ml::*")), spec) == ["q1", "default", "default"]


def test_every_rule_is_told_with_its_verdict() -> None:
    tried = try_rules(read_routing(RULES), ("ml", "heavy_one"))
    assert [(each.number, each.is_first, each.why_not is None) for each in tried] == [
        (1, False, False),
        (2, True, True),
        (3, False, False),
        (4, False, True),
    ]
    assert tried[0].why_not == "'heavy_one' is not 'train'"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rule = 5", "rules are written as"),
        ("[rule]\nmatch = 'a::b'\nqueue = 'q'", "rules are written as"),
        ("defualt = 'x'", "the file has an unknown key 'defualt'; did you mean 'default'?"),
        ("default = 5", "default: queue '5' is not allowed"),
        ("default = ''", "default: queue '' is not allowed"),
        ("[[rule]]\nmatch = 'a::b'", "rule 1 has no queue."),
        ("[[rule]]\n", "rule 1 has no match and no queue."),
        ("[[rule]]\nmatch = 'a::b'\nqueue = 'q'\nmach = 1", "rule 1 has an unknown key 'mach'; did you mean 'match'?"),
        ("[[rule]]\nmatch = 'a::b'\nqueue = 'q q'", "rule 1: queue 'q q' is not allowed"),
        ("[[rule]]\nmatch = 'a::?'\nqueue = 'q'", "rule 1: pattern 'a::?': only letters"),
        ("default = ", "this is not TOML"),
        (rules("ml::*", "ml::train"), "rule 2 ('ml::train') can never match: rule 1 ('ml::*') takes all"),
        (rules("**", "x"), "rule 2 ('x') can never match: rule 1 ('**')"),
        (rules("a::b", "c::d", "a::b"), "rule 3 ('a::b') can never match: rule 1 ('a::b')"),
        (rules(*(f"d{n}::t" for n in range(201))), "at most 200"),
    ],
)
def test_bad_rules_are_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRouting) as refused:
        read_routing(text)
    assert complaint in str(refused.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(InvalidRouting) as refused:
        read_routing("defualt = 'x'\n" + rules("a::?", "b::*", "b::c"))
    for each in ("defualt", "rule 1", "rule 3"):
        assert each in str(refused.value)


def test_another_installation_has_a_name_and_an_address() -> None:
    assert read_cell("berlin=https://b.example/evertick/") == ("berlin", "https://b.example/evertick")
    for wrong in ("berlin", "https://b.example", "a b=https://b.example", "b=ftp://b", "b=https://u:p@b.example"):
        with pytest.raises(InvalidRouting, match="no other installation"):
            read_cell(wrong)
