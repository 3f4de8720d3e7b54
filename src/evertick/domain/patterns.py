"""Patterns on the full names of tasks: `dag::task`, or `dag::group::task` with one segment for each group.

`*` matches any characters within a segment, `**` any number of whole segments. A pattern without `::` matches the task's own
name, wherever the task is. Matching takes time in proportion to the length of the name, whatever the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from evertick.domain.errors import InvalidRouting

SEPARATOR = "::"
ANY_SEGMENTS = "**"
MAX_PATTERN = 500
MAX_SEGMENTS = 12
MAX_ANY_SEGMENTS = 3
# The shortest full name: a DAG and a task.
_LEAST_SEGMENTS = 2
_SEGMENT = re.compile(r"[A-Za-z0-9_.*-]+")
# Represents "any text" when one pattern is compared with another; no name contains it.
_ANY_TEXT = "\0"

Address = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """`text` is the pattern as written, `segments` its compiled form; a compiled segment of None is `**`."""

    text: str
    segments: tuple[str, ...]
    compiled: tuple[re.Pattern[str] | None, ...]


def address_of(dag: str, task: str) -> Address:
    """A task's full name in segments. The name of a task includes its groups: `extract.orders` is `dag::extract::orders`."""
    return (dag, *task.split("."))


def read_address(text: str) -> Address:
    """Parse a full name."""
    segments = tuple(text.split(SEPARATOR))
    if len(segments) < _LEAST_SEGMENTS or not all(
        _SEGMENT.fullmatch(each) and "*" not in each and ":" not in each for each in segments
    ):
        raise InvalidRouting(f"{text[:200]!r} is not the full name of a task: write DAG::TASK, or DAG::GROUP::TASK.")
    return segments


def address_text(address: Sequence[str]) -> str:
    return SEPARATOR.join(address)


def read_pattern(text: object) -> Pattern:
    """Parse a pattern. Rejects patterns that cannot match anything, and likely mistakes."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidRouting(f"pattern {text!r}: it must be text such as 'ml::*', '**::batch::*' or 'heavy_*'.")
    if len(text) > MAX_PATTERN:
        raise InvalidRouting(f"pattern {text[:40]!r}...: it must have at most {MAX_PATTERN} characters.")
    segments = tuple(text.split(SEPARATOR))
    if len(segments) == 1 and text != ANY_SEGMENTS:
        segments = (ANY_SEGMENTS, *segments)
    for segment in segments:
        _check_segment(text, segment)
    if len(segments) > MAX_SEGMENTS:
        raise InvalidRouting(f"pattern {text!r}: it must have at most {MAX_SEGMENTS} segments.")
    if any(pair == (ANY_SEGMENTS, ANY_SEGMENTS) for pair in pairwise(segments)):
        raise InvalidRouting(f"pattern {text!r}: '**::**' means the same as '**'; write one of them.")
    if segments.count(ANY_SEGMENTS) > MAX_ANY_SEGMENTS:
        raise InvalidRouting(f"pattern {text!r}: it must contain '**' at most {MAX_ANY_SEGMENTS} times.")
    return Pattern(text=text, segments=segments, compiled=tuple(_compiled(each) for each in segments))


def _check_segment(text: str, segment: str) -> None:
    if not segment:
        raise InvalidRouting(f"pattern {text!r}: a segment is empty. Separate segments with '::', as in 'dag::task'.")
    if ":" in segment:
        raise InvalidRouting(f"pattern {text!r}: separate segments with two colons, '::'.")
    if not _SEGMENT.fullmatch(segment):
        raise InvalidRouting(
            f"pattern {text!r}: only letters, digits, '_', '-', '.', and the wildcards '*' and '**' are allowed."
        )
    if ANY_SEGMENTS in segment and segment != ANY_SEGMENTS:
        raise InvalidRouting(
            f"pattern {text!r}: '**' matches whole segments: write 'ml::**' or '**::heavy_*', and '*' within a segment."
        )


def _compiled(segment: str) -> re.Pattern[str] | None:
    if segment == ANY_SEGMENTS:
        return None
    # Each piece matches at its first occurrence and is never retried (no backtracking), so that no name makes this slow.
    first, *rest = (re.escape(part) for part in segment.split("*"))
    if not rest:
        return re.compile(first, re.DOTALL)
    middle = "".join(f"(?>.*?{part})" for part in rest[:-1])
    return re.compile(f"{first}{middle}.*{rest[-1]}", re.DOTALL)


def matches(pattern: Pattern, address: Sequence[str]) -> bool:
    """Whether the pattern matches this task. `**` first matches nothing, then one more segment at a time."""
    wanted = pattern.compiled
    at = place = 0
    resume: tuple[int, int] | None = None
    while place < len(address):
        if at < len(wanted) and (segment := wanted[at]) is None:
            at += 1
            resume = (at, place)
        elif at < len(wanted) and segment is not None and segment.fullmatch(address[place]):
            at, place = at + 1, place + 1
        elif resume is not None:
            # Only the last `**` has to grow: everything before it already matched at the earliest possible position.
            at, place = resume[0], resume[1] + 1
            resume = (at, place)
        else:
            return False
    return all(segment is None for segment in wanted[at:])


def mismatch(pattern: Pattern, address: Sequence[str]) -> str | None:
    """Why the pattern does not match this task, for people; None if it does."""
    if matches(pattern, address):
        return None
    if pattern.compiled[0] is None and len(pattern.segments) == _LEAST_SEGMENTS:
        return f"the task's name is {address[-1]!r}, not {pattern.segments[-1]!r}"
    if None not in pattern.compiled and len(pattern.segments) != len(address):
        return f"it has {len(pattern.segments)} segments, and the task's name has {len(address)}"
    for wanted, compiled, segment in zip(pattern.segments, pattern.compiled, address, strict=False):
        if compiled is None:
            break
        if not compiled.fullmatch(segment):
            return f"{segment!r} is not {wanted!r}"
    return "its segments do not match the task's name"


def covers(earlier: Pattern, later: Pattern) -> bool:
    """Whether `earlier` matches every task that `later` matches, so that `later` is never reached.

    Exact: the later pattern is matched as if it were a name, with a text that no name contains for `*`, and for `**` every
    number of such segments up to one more than the earlier pattern has. A pattern that matches those matches everything.
    """
    lengths = range(len(earlier.segments) + 1, -1, -1)
    wild = later.segments.count(ANY_SEGMENTS)
    for counts in product(lengths, repeat=wild):
        given = iter(counts)
        name: list[str] = []
        for segment in later.segments:
            if segment == ANY_SEGMENTS:
                name += [_ANY_TEXT] * next(given)
            else:
                name.append(segment.replace("*", _ANY_TEXT))
        if len(name) >= _LEAST_SEGMENTS and not matches(earlier, name):
            return False
    return True
