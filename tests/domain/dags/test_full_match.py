"""Patterns of params: what `re.fullmatch` says, in time that no expression can stretch."""

from __future__ import annotations

import random
import re
import time
from contextlib import suppress

import pytest

from evertick.domain.dags.params import MOST_SECONDS, PatternTimeout, compile_pattern, matches_whole

PARTS = ["", "a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\d", r"\b", "^", "$", r"\Z", "A", "é", r"\n"]
PARTS += ["(?i:a)", "(?i:É)", "(?m:^b)", "(?m:a$)", "(?s:.)", r"(?a:\w)", "(?-i:a)"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,3}", "{2,}", "{2,}?"]
LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
LETTERS = "aabbcA1é\n "


def expression(chance: random.Random, depth: int = 0) -> str:
    kind = chance.random()
    if depth > 3 or kind < 0.35:
        return chance.choice(PARTS)
    inner, other = expression(chance, depth + 1), expression(chance, depth + 1)
    if kind < 0.55:
        return inner + other
    if kind < 0.7:
        return f"(?:{inner}|{other})"
    if kind < 0.9:
        return f"({inner})" + chance.choice(REPEATS)
    return chance.choice(LOOKS) + inner + ")"


def test_it_says_what_re_says() -> None:
    chance = random.Random(1)
    matched = 0
    for _ in range(600):
        pattern = chance.choice(("", "", "(?i)", "(?s)")) + expression(chance) + expression(chance)
        try:
            compiled = re.compile(pattern)
        except re.error:
            # A look behind that has no length of its own.
            with pytest.raises(ValueError, match="is not a regular expression"):
                compile_pattern(pattern)
            continue
        for _ in range(4):
            # Short, so that `re` is done with the worst of them.
            text = "".join(chance.choice(LETTERS) for _ in range(chance.randrange(8)))
            expected = compiled.fullmatch(text) is not None
            assert matches_whole(pattern, text) is expected, (pattern, text)
            matched += expected
    assert matched > 100


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+b", "a" * 1000),
        (r"(a|aa)+b", "a" * 1000),
        (r"((a{1,1000}){1,1000}){1,1000}b", "a" * 1000),
        (r"(.*a){12}b", "a" * 1000),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 1000),
        (r"(a+)+\1b", "a" * 1000),
    ],
)
def test_no_expression_takes_for_ever(pattern: str, text: str) -> None:
    """Each of them would take `re` longer than anybody lives."""
    began = time.process_time()
    with suppress(PatternTimeout):
        assert not matches_whole(pattern, text)
    assert time.process_time() - began < 50 * MOST_SECONDS


def test_what_takes_too_long_is_told() -> None:
    with pytest.raises(PatternTimeout, match="too long on a text of 1,000 characters: make it simpler"):
        matches_whole(r"(a|aa)+b", "a" * 1000)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(?:(?!ab).)*(?<=c)", "a" * 999 + "c"),
        (r"(?=.*\d)(?=.*[A-Z])\w{8,}", "a" * 900 + "B1"),
        (r"([\w-]+\.)*[\w-]+@(\w+\.)+\w{2,}", "a.b" * 300 + "@ev.example"),
        (r"(\w)(\w)\2\1", "abba"),
    ],
)
def test_what_people_write_is_matched_however_long_the_text(pattern: str, text: str) -> None:
    assert matches_whole(pattern, text)


@pytest.mark.parametrize("pattern", [r"(?<=a+)b", "(", "a{2,1}", "(?P<n"])
def test_what_is_no_expression_is_refused_when_it_is_declared(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        compile_pattern(pattern)
