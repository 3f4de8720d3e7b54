"""Routing: the queue in which a task waits, and the patterns that name tasks in rules and for runners.

The first rule that matches applies; a queue that the task's author declared (`queue=`) takes precedence over all rules.
Pure: files are read elsewhere.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import InvalidRouting, did_you_mean

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


DEFAULT_QUEUE = "default"


MAX_RULES = 200


_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,200}")


_FILE_KEYS = ("default", "rule")


_RULE_KEYS = ("match", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    pattern: Pattern
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rules and the default queue, which is used if no rule matches."""

    rules: tuple[RoutingRule, ...] = ()
    default: str = DEFAULT_QUEUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of one rule, numbered from 1: `why_not` is None for a rule that matches."""

    number: int
    match: str
    queue: str
    why_not: str | None
    is_first: bool


def route(routing: Routing, address: Address) -> str:
    """The queue that the rules select."""
    for rule in routing.rules:
        if matches(rule.pattern, address):
            return rule.queue
    return routing.default


def queues_of(routing: Routing, spec: DagSpec) -> list[str]:
    """The queue of each task of a DAG."""
    return [
        route(routing, address_of(spec.name, task.name)) if task.queue is None else task.queue for task in spec.tasks
    ]


def try_rules(routing: Routing, address: Address) -> list[Tried]:
    """Every rule in order with its result, to explain a routing decision."""
    found: list[Tried] = []
    is_routed = False
    for number, rule in enumerate(routing.rules, start=1):
        why_not = mismatch(rule.pattern, address)
        is_first = why_not is None and not is_routed
        is_routed = is_routed or is_first
        tried = Tried(number=number, match=rule.pattern.text, queue=rule.queue, why_not=why_not, is_first=is_first)
        found.append(tried)
    return found


def read_routing(text: str) -> Routing:
    """Parse a routing file. Raises InvalidRouting with every problem found."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRouting(f"this is not TOML: {error}.") from None
    problems: list[str] = list(_unknown(raw, _FILE_KEYS, "the file"))
    default = raw.get("default", DEFAULT_QUEUE)
    if problem := _wrong_queue(default):
        problems.append(f"default: {problem}")
    rules = _read_rules(raw.get("rule", []), problems)
    problems += _shadowed(rules)
    if problems:
        raise InvalidRouting(" ".join(problems))
    return Routing(rules=tuple(rule for _, rule in rules), default=default)


def _read_rules(raw: object, problems: list[str]) -> list[tuple[int, RoutingRule]]:
    """The rules that could be parsed, each with its number."""
    if not isinstance(raw, list) or not all(isinstance(each, dict) for each in raw):
        problems.append("rules are written as [[rule]] with a match and a queue below.")
        return []
    if len(raw) > MAX_RULES:
        problems.append(f"it has {len(raw):,} rules; at most {MAX_RULES} are allowed.")
        return []
    rules = []
    for number, each in enumerate(raw, start=1):
        wrong = list(_unknown(each, _RULE_KEYS, f"rule {number}"))
        if missing := [key for key in _RULE_KEYS if key not in each]:
            wrong.append(f"rule {number} has no {' and no '.join(missing)}.")
        elif problem := _wrong_queue(each["queue"]):
            wrong.append(f"rule {number}: {problem}")
        else:
            try:
                rules.append((number, RoutingRule(pattern=read_pattern(each["match"]), queue=each["queue"])))
            except InvalidRouting as error:
                wrong.append(f"rule {number}: {error}")
        problems += wrong
    return rules


def _unknown(given: Mapping[str, object], known: Sequence[str], owner: str) -> Iterator[str]:
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known, f"known keys: {', '.join(known)}.")
            yield f"{owner} has an unknown key {key[:80]!r}; {hint}"


def check_queue(queue: str) -> str:
    """The name. Raises InvalidRouting."""
    if (problem := _wrong_queue(queue)) is not None:
        raise InvalidRouting(problem)
    return queue


def _wrong_queue(queue: object) -> str | None:
    if isinstance(queue, str) and _QUEUE.fullmatch(queue):
        return None
    return f"queue {str(queue)[:80]!r} is not allowed; use letters, digits, '_', '-', '.' and at most 200 characters."


def _shadowed(rules: Sequence[tuple[int, RoutingRule]]) -> Iterator[str]:
    for place, (number, later) in enumerate(rules):
        for earlier_number, earlier in rules[:place]:
            if covers(earlier.pattern, later.pattern):
                yield (
                    f"rule {number} ({later.pattern.text!r}) can never match: rule {earlier_number}"
                    f" ({earlier.pattern.text!r}) takes all of its tasks first. Put rule {number} before it, or remove it."
                )
                break


_CELL = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,30})=(https?://[^\s/?#@=,]+(?:/[^\s?#,]*)?)")


def read_cell(text: str) -> tuple[str, str]:
    """Another installation, as `berlin=https://berlin.example.com`: its name, and the address of its web UI."""
    if (match := _CELL.fullmatch(text)) is None:
        raise InvalidRouting(
            f"{text!r:.200} is no other installation: write one such as berlin=https://berlin.example.com."
        )
    return match[1], match[2].rstrip("/")
