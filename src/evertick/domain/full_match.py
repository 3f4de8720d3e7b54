"""Whether a regular expression matches a whole text: the result of `re.fullmatch`, in bounded time (decision 0033).

A bad pattern makes `re` backtrack for minutes; it blocks the process and cannot be stopped. `regex` accepts a time limit.
"""

from __future__ import annotations

import re

# CPU time, not elapsed time: a busy machine does not change the result. A normal pattern takes far less than one
# thousandth of it.
MOST_SECONDS = 0.1


class TakesTooLong(ValueError):
    """The expression needs too much backtracking on this text."""


def read_pattern(pattern: str) -> None:
    """Raises ValueError if the pattern is not a valid regular expression."""
    import regex  # type: ignore[import-untyped]

    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None


def matches_whole(pattern: str, text: str) -> bool:
    """Raises ValueError if the pattern is invalid."""
    import regex

    try:
        return regex.fullmatch(pattern, text, timeout=MOST_SECONDS) is not None
    except TimeoutError:
        raise TakesTooLong(f"takes too long on a text of {len(text):,} characters: make it simpler") from None
