"""Whether the whole of a text matches a regular expression: what `re.fullmatch` says, in bounded time (decision 0034).

`re` tries one way after another, and nothing else in the process runs meanwhile. Here all ways are followed at once: a set of
places in the text goes into each part, and the set of places where it can end comes out. A set is a number, bit i the place i.
`re` reads the expression and says which characters fit. What needs to know how an earlier part matched is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

# Some 10 ms. A pattern that people write takes a few steps for each character, most of them far fewer.
MOST_STEPS = 20_000
_SINGLE = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)
_REFUSED = {
    _constants.GROUPREF: r"a reference to an earlier group (as \1)",
    _constants.GROUPREF_EXISTS: "a condition on an earlier group (as (?(1)a|b))",
    _constants.ATOMIC_GROUP: "an atomic group: write (?:...) in place of (?>...)",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat: write a+ in place of a++",
}


class TooManySteps(ValueError):
    """The expression is built so that even following all ways at once takes long."""


@dataclass(frozen=True, eq=False, slots=True)
class _Single:
    """One character, or with a width of 0 something about a place: its beginning, end, or border of a word."""

    one: re.Pattern[str]
    width: int


@dataclass(frozen=True, eq=False, slots=True)
class _Choice:
    parts: Sequence[_Sequence]


@dataclass(frozen=True, eq=False, slots=True)
class _Repeat:
    part: _Sequence
    least: int
    most: int | None


@dataclass(frozen=True, eq=False, slots=True)
class _Look:
    """Ahead, or behind by so many characters; for what must be there, or must not."""

    part: _Sequence
    behind: int | None
    is_wanted: bool


_Sequence = tuple["_Single | _Choice | _Repeat | _Look", ...]
# What `re` read: a kind of part each, and what it is made of.
_Parsed = Sequence[tuple[object, Any]]


def matches_whole(pattern: str, text: str) -> bool:
    """ValueError says what is wrong with the pattern."""
    walk = _Walk(text)
    return bool(walk.through(read_pattern(pattern), 1) >> len(text))


@lru_cache(maxsize=1000)
def read_pattern(pattern: str) -> _Sequence:
    """ValueError says why it is no regular expression, or none that is possible here."""
    try:
        re.compile(pattern)
        parsed = _parser.parse(pattern)
        return _sequence(parsed, parsed.state.flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None


@dataclass(slots=True)
class _Walk:
    """Through one text. `fitting` are the places that a part is known to fit."""

    text: str
    fitting: dict[_Single | tuple[_Look, int], int] = field(default_factory=dict)
    steps: int = 0

    def through(self, sequence: _Sequence, places: int) -> int:
        for part in sequence:
            if not places:
                break
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise TooManySteps(f"takes too long on a text of {len(self.text):,} characters: make it simpler")
            match part:
                case _Single():
                    places = (places & self._fits(part)) << part.width
                case _Choice(parts):
                    places = reduce(int.__or__, (self.through(each, places) for each in parts))
                case _Repeat():
                    places = self._repeat(part, places)
                case _Look():
                    places = sum(1 << place for place in _each(places) if self._sees(part, place))
        return places

    def _fits(self, single: _Single) -> int:
        if single not in self.fitting:
            self.fitting[single] = sum(1 << found.start() for found in single.one.finditer(self.text))
        return self.fitting[single]

    def _repeat(self, repeat: _Repeat, places: int) -> int:
        for _ in range(repeat.least):
            before, places = places, self.through(repeat.part, places)
            if places in (0, before):
                # As it is now, so it would stay.
                break
        match repeat.part:
            case (_Single(width=1) as single,) if repeat.most is None:
                # Each place runs through the characters that fit as a carry runs through ones.
                fits = self._fits(single)
                return (((places & fits) + fits) ^ fits) | places
        reached, new = places, places
        rounds = repeat.least
        while new and (repeat.most is None or rounds < repeat.most):
            # A place that was reached before has more rounds left from there than it would have now.
            new = self.through(repeat.part, new) & ~reached
            reached |= new
            rounds += 1
        return reached

    def _sees(self, look: _Look, place: int) -> bool:
        if (look, place) not in self.fitting:
            if look.behind is None:
                found = self.through(look.part, 1 << place)
            else:
                found = self.through(look.part, 1 << place - look.behind) >> place & 1 if place >= look.behind else 0
            self.fitting[look, place] = found
        return bool(self.fitting[look, place]) is look.is_wanted


def _each(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


def _sequence(parsed: _Parsed, flags: int) -> _Sequence:
    sequence: list[_Single | _Choice | _Repeat | _Look] = []
    for kind, detail in parsed:
        match kind, detail:
            case _constants.SUBPATTERN, (_, more, less, inside):
                sequence += _sequence(inside, _with(flags, more, less))
            case _constants.BRANCH, (_, choices):
                sequence.append(_Choice([_sequence(each, flags) for each in choices]))
            case ((_constants.MAX_REPEAT | _constants.MIN_REPEAT), (least, most, inside)):
                endless = most == _constants.MAXREPEAT
                sequence.append(_Repeat(_sequence(inside, flags), int(least), None if endless else int(most)))
            case ((_constants.ASSERT | _constants.ASSERT_NOT), (direction, inside)):
                behind = int(inside.getwidth()[0]) if direction < 0 else None
                sequence.append(_Look(_sequence(inside, flags), behind, kind is _constants.ASSERT))
            case _constants.AT, _:
                sequence.append(_Single(_compiled(kind, detail, flags), 0))
            case _ if kind in _SINGLE:
                sequence.append(_Single(_compiled(kind, detail, flags), 1))
            case _:
                raise ValueError(f"has {_REFUSED.get(kind, f'a part ({kind})')}, which is not possible here")
    return tuple(sequence)


def _compiled(kind: object, detail: object, flags: int) -> re.Pattern[str]:
    """One part alone, by `re` itself."""
    compiled: re.Pattern[str] = _compiler.compile(_parser.SubPattern(_parser.State(), [(kind, detail)]), flags)
    return compiled


def _with(flags: int, more: int, less: int) -> int:
    """As `(?i-s:...)` says. ASCII and Unicode replace each other."""
    kinds = re.ASCII | re.UNICODE | re.LOCALE
    return ((flags & ~kinds if more & kinds else flags) | more) & ~less
