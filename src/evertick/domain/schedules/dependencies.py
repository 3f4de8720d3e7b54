"""Dependencies between DAGs: runs of other DAGs and updates of assets, all of them or any, that start a run.

A condition is written with `after`, `all_of`, `any_of`, `Asset` and `finished`, stored as canonical JSON text, and evaluated by
the database when an event arrives. This module never resolves a name: the DAG or asset does not need to exist yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from evertick.domain.errors import InvalidSchedule

_MOST_SOURCES = 100
_DEEPEST = 10
_LONGEST_NAME = 250
_WORDS = {"dag": "{}", "end": "any end of {}", "asset": "asset {}", "alias": "asset alias {}"}


@dataclass(frozen=True, slots=True)
class Source:
    """`kind` dag: a run that succeeded; end: a run that ended in any state; asset: a task that updates it succeeded; alias: the
    same of any asset that was updated through this alias before."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Condition:
    """`word` is "all" or "any": how many of the parts must be met."""

    word: str
    parts: tuple[Condition | Source, ...]


def Asset(name: str) -> Source:
    """A named piece of data. Tasks update it (`outlets=[Asset("orders")]`), DAGs run after it (`after(Asset("orders"))`)."""
    return Source("asset", name)


def finished(dag: str) -> Source:
    """Any end of a run of that DAG, failures included. A bare name means success."""
    return Source("end", dag)


def all_of(*parts: object) -> Condition:
    return Condition("all", tuple(_part(part) for part in parts))


def any_of(*parts: object) -> Condition:
    return Condition("any", tuple(_part(part) for part in parts))


def after(*parts: object) -> Condition:
    """Run when all of these have happened since the last run: `schedule=after("orders", Asset("rates"))`."""
    return all_of(*parts)


def sources_of(condition: Condition | Source) -> Iterator[Source]:
    if isinstance(condition, Source):
        yield condition
    else:
        for part in condition.parts:
            yield from sources_of(part)


def is_met(condition: Condition | Source, happened: Collection[Source]) -> bool:
    """Evaluate the condition as the database does."""
    if isinstance(condition, Source):
        return condition in happened
    judge = all if condition.word == "all" else any
    return judge(is_met(part, happened) for part in condition.parts)


def find_loop(
    dag: str, waits: Mapping[str, Sequence[Condition | Source]], outlets: Mapping[str, Collection[str]]
) -> list[str] | None:
    """How a run of `dag` would cause the next run of `dag`, endlessly and without any outside event: the DAGs on the path,
    from `dag` back to `dag`. `waits`: what starts each DAG; `outlets`: which assets each one updates."""
    listening: dict[Source, list[tuple[str, Condition | Source]]] = {}
    for name, conditions in waits.items():
        for condition in conditions:
            for source in set(sources_of(condition)):
                listening.setdefault(source, []).append((name, condition))
    caused_by: dict[str, str] = {}
    happened: set[Source] = set()
    began = [dag]
    for each in began:
        sources = {Source("dag", each), Source("end", each), *(Asset(name) for name in outlets.get(each, ()))}
        happened |= sources
        for source in sorted(sources, key=str):
            for name, condition in listening.get(source, ()):
                if name not in caused_by and is_met(condition, happened):
                    caused_by[name] = each
                    began += [name] if name != dag else []
    if dag not in caused_by:
        return None
    way = [dag, caused_by[dag]]
    while way[-1] != dag:
        way.append(caused_by[way[-1]])
    return way[::-1]


def to_text(condition: Condition | Source) -> str:
    """The canonical text of a checked condition."""
    plain = _plain(condition, 0)
    found = list(sources_of(condition))
    if len(found) > _MOST_SOURCES:
        raise InvalidSchedule(f"after(...) names {len(found)} DAGs and assets: at most {_MOST_SOURCES} are allowed")
    for source in found:
        name = source.name
        if not isinstance(name, str) or not 0 < len(name.strip()) <= _LONGEST_NAME or chr(0) in name:
            raise InvalidSchedule(f"after(...): {str(name)[:40]!r} is not a valid name for a DAG or an asset")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def read_text(text: str) -> Condition | Source:
    """The condition that `to_text` wrote."""
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidSchedule(f"{text[:40]!r} is not a condition: write after(...)") from None


def in_words(condition: Condition | Source) -> str:
    if isinstance(condition, Source):
        return _WORDS[condition.kind].format(condition.name)
    words = [
        f"({in_words(part)})" if isinstance(part, Condition) and len(part.parts) > 1 else in_words(part)
        for part in condition.parts
    ]
    return (" and " if condition.word == "all" else " or ").join(words)


def _part(raw: object) -> Condition | Source:
    if isinstance(raw, Condition | Source):
        return raw
    if isinstance(raw, str):
        return Source("dag", raw)
    raise InvalidSchedule(
        f"after(...) takes DAG names, Asset(...), finished(...), all_of(...) and any_of(...), not {raw!r:.40}"
    )


def _plain(condition: Condition | Source, depth: int) -> object:
    if depth > _DEEPEST:
        raise InvalidSchedule(f"after(...) is nested more than {_DEEPEST} levels deep: write it flatter")
    if isinstance(condition, Source):
        return {condition.kind: condition.name}
    if not condition.parts:
        raise InvalidSchedule("after(...) is empty: name DAGs or assets in it and in each all_of and any_of")
    return {condition.word: [_plain(part, depth + 1) for part in condition.parts]}


def _read(raw: dict[str, object]) -> Condition | Source:
    ((word, value),) = raw.items()
    if word in ("all", "any") and isinstance(value, list):
        return Condition(word, tuple(_read(each) for each in value))
    if word in _WORDS and isinstance(value, str):
        return Source(word, value)
    raise ValueError(word)
