"""Dependencies between DAGs: runs of other DAGs and updates of assets, all of them or any, that start a run.

A condition is written with `after`, `all_of`, `any_of`, `Asset` and `finished`, stored as canonical JSON text, and evaluated by
the database when an event arrives. This module never resolves a name: the DAG or asset does not need to exist yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.partition_keys import Partitions, fan_out_to, rollup_to
from evertick.domain.schedules.partitions import SameKey, mapper_text, read_mapper

_MOST_SOURCES = 100
_DEEPEST = 10
_LONGEST_NAME = 250
_WORDS = {"dag": "{}", "end": "any end of {}", "asset": "asset {}", "alias": "asset alias {}"}


@dataclass(frozen=True, slots=True)
class Source:
    """`kind` dag: a run that succeeded; end: a run that ended in any state; asset: a task that updates it succeeded; alias: the
    same of any asset that was updated through this alias before.

    `mapper`: a run for each partition that updates with a key lead to. `is_unkeyed`: only updates without a key count.
    """

    kind: str
    name: str
    mapper: str | None = None
    is_unkeyed: bool = False
    partitions: Partitions | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Condition:
    """`word` is "all" or "any": how many of the parts must be met."""

    word: str
    parts: tuple[Condition | Source, ...]


def Asset(name: str, *, partitions: Partitions | None = None) -> Source:
    """A named piece of data. Tasks update it (`outlets=[Asset("orders")]`), DAGs run after it (`after(Asset("orders"))`).

    With `partitions=daily()`, `hourly()`, `static([...])` an update is one of a partition, and a DAG that runs after it runs once
    for each key.
    """
    if partitions is None:
        return Source("asset", name)
    if not isinstance(partitions, Partitions):
        raise InvalidSchedule(
            f"partitions is {partitions!r:.60}: write daily(), hourly(), weekly(), monthly() or static([...])"
        )
    return Source("asset", name, mapper_text(SameKey()), partitions=partitions)


def rollup(asset: Source, to: Partitions | str, *, at_least: int | None = None) -> Source:
    """Run once for many partitions: `after(rollup(orders, monthly()))` waits for all days of a month, with `at_least=20` for that
    many, with `at_least=-2` until at most two are missing. A fixed set rolls up to one key: `rollup(regions, "all")`."""
    return replace(asset, mapper=mapper_text(rollup_to(_partitions_of(asset), to, at_least)))


def fan_out(asset: Source, to: Partitions) -> Source:
    """Run for each part of a partition: `after(fan_out(weekly_model, daily()))`."""
    return replace(asset, mapper=mapper_text(fan_out_to(_partitions_of(asset), to)))


def each_update(asset: Source) -> Source:
    """Run after any update of a partitioned asset, for no partition: `after(each_update(orders))`."""
    return replace(asset, mapper=None)


def _partitions_of(asset: Source) -> Partitions:
    if not isinstance(asset, Source) or asset.partitions is None:
        raise InvalidSchedule(f"{asset!r:.60} has no partitions: write Asset('orders', partitions=daily())")
    return asset.partitions


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
    return holds(condition, lambda source: Source(source.kind, source.name) in happened)


def holds(condition: Condition | Source, is_true: Callable[[Source], bool]) -> bool:
    if isinstance(condition, Source):
        return is_true(condition)
    judge = all if condition.word == "all" else any
    return judge(holds(part, is_true) for part in condition.parts)


def find_loop(
    dag: str, waits: Mapping[str, Sequence[Condition | Source]], outlets: Mapping[str, Collection[str]]
) -> list[str] | None:
    """How a run of `dag` would cause the next run of `dag`, endlessly and without any outside event: the DAGs on the path,
    from `dag` back to `dag`. `waits`: what starts each DAG; `outlets`: which assets each one updates."""
    listening: dict[Source, list[tuple[str, Condition | Source]]] = {}
    for name, conditions in waits.items():
        for condition in conditions:
            for source in {Source(each.kind, each.name) for each in sources_of(condition)}:
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
    _check_mappers(found)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def read_text(text: str) -> Condition | Source:
    """The condition that `to_text` wrote."""
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidSchedule(f"{text[:40]!r} is not a condition: write after(...)") from None


def in_words(condition: Condition | Source) -> str:
    if isinstance(condition, Source):
        name = _WORDS[condition.kind].format(condition.name)
        if condition.mapper is None:
            return name
        how = {"rollup": "rolled up", "fan_out": "fanned out"}.get(json.loads(condition.mapper)["map"], "by partition")
        return f"{name} ({how})"
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
        made: dict[str, object] = {condition.kind: condition.name}
        if condition.mapper is not None:
            made["mapper"] = json.loads(condition.mapper)
        return {**made, "is_unkeyed": True} if condition.is_unkeyed else made
    if not condition.parts:
        raise InvalidSchedule("after(...) is empty: name DAGs or assets in it and in each all_of and any_of")
    return {condition.word: [_plain(part, depth + 1) for part in condition.parts]}


def _read(raw: dict[str, object]) -> Condition | Source:
    if "mapper" in raw or "is_unkeyed" in raw:
        return _read_source(raw)
    ((word, value),) = raw.items()
    if word in ("all", "any") and isinstance(value, list):
        return Condition(word, tuple(_read(each) for each in value))
    if word in _WORDS and isinstance(value, str):
        return Source(word, value)
    raise ValueError(word)


def _read_source(raw: dict[str, object]) -> Source:
    if not isinstance(name := raw["asset"], str) or raw.keys() - {"asset", "mapper", "is_unkeyed"}:
        raise ValueError(raw)
    mapper = None if "mapper" not in raw else mapper_text(read_mapper(json.dumps(raw["mapper"])))
    return Source("asset", name, mapper, raw.get("is_unkeyed") is True)


def _check_mappers(found: Sequence[Source]) -> None:
    """A run is for one partition, so each part must lead to one."""
    mapped = {each.name: each.mapper for each in found if each.mapper is not None}
    if not mapped:
        return
    if other := [each for each in found if each.mapper is None]:
        raise InvalidSchedule(
            f"after(...) has assets with partitions, and {in_words(other[0])} without: a run is for one partition, so all of"
            " them need partitions, or none (each_update)"
        )
    if twice := [each.name for each in found if mapped[each.name] != each.mapper]:
        raise InvalidSchedule(f"after(...) names asset {twice[0]!r} twice, with different mappers of its partitions")
