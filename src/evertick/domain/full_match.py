"""Whether the whole of a text matches a regular expression: what `re.fullmatch` says, in bounded time (decision 0033).

`re` tries one way after another, nothing else in the process runs meanwhile, and it cannot be stopped. `regex` can.
"""

from __future__ import annotations

import re

# Of the processor, not of the clock: a busy machine changes no answer. A pattern that people write takes far less than one
# thousandth of it.
MOST_SECONDS = 0.1


class TakesTooLong(ValueError):
    """The expression is built so that there are too many ways to try on this text."""


def read_pattern(pattern: str) -> None:
    """ValueError says why it is no regular expression."""
    import regex  # type: ignore[import-untyped]

    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None


def matches_whole(pattern: str, text: str) -> bool:
    """ValueError says what is wrong with the pattern."""
    import regex

    try:
        return regex.fullmatch(pattern, text, timeout=MOST_SECONDS) is not None
    except TimeoutError:
        raise TakesTooLong(f"takes too long on a text of {len(text):,} characters: make it simpler") from None
