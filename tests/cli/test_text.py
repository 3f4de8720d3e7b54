"""Text from elsewhere must not steer the terminal."""

from __future__ import annotations

import pytest

from evertick.cli.output import coloured, one_line, plain


@pytest.mark.parametrize(
    "hostile",
    [
        "a\x1b[2Jb",  # clears the screen
        "a\x1b]0;title\x07b",  # sets the title
        "a\x1b]52;c;ZXZpbA==\x1b\\b",  # writes the clipboard
        "a\x1bP1$r\x1b\\b",  # device control
        "a\x9b2Jb",  # the same with one-byte introducers
        "a\x9d0;title\x9cb",
        "a\x1bcb",  # resets the terminal
        "a\x1b(0b",  # switches the character set
        "a\x07\x08\x00b",
        "a\u202eb",  # reads backwards from here
        "ab\x1b",
        "ab\x1b[",
    ],
)
def test_no_control_sequence_gets_through(hostile: str) -> None:
    assert plain(hostile) == "ab"
    assert coloured(hostile).removesuffix("\x1b[0m") == "ab"


def test_an_unfinished_title_swallows_the_rest_and_nothing_else() -> None:
    assert plain("a\x1b]0;never ends") == "a"


def test_colours_stay_where_they_may_and_end_with_the_text() -> None:
    assert coloured("a \x1b[1;31mred\x1b[2J text") == "a \x1b[1;31mred text\x1b[0m"
    assert plain("a \x1b[1;31mred\x1b[0m text") == "a red text"


def test_ordinary_text_is_untouched() -> None:
    text = "größe\t日本 ✓ [brackets] 100%"
    assert plain(text) == coloured(text) == text


def test_a_message_is_one_line() -> None:
    assert one_line("first\n  second\x1b[2J\tthird\n") == "first second third"
