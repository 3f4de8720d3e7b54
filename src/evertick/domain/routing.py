"""Routing: which queue a task waits in. The first rule that matches applies; without a match, the default does.

A queue that the task's author declared (`queue=`) takes precedence over all rules. Pure: files are read elsewhere.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evertick.domain.dag import DagSpec
from evertick.domain.errors import InvalidRouting
from evertick.domain.patterns import Address, Pattern, address_of, covers, matches, mismatch, read_pattern

DEFAULT_QUEUE = "default"
MAX_RULES = 200
_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_FILE_KEYS = ("default", "rule")
_RULE_KEYS = ("match", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    pattern: Pattern
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rules and the default queue, which is used if no rule matches."""

    rules: tuple[Rule, ...] = ()
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


def _read_rules(raw: object, problems: list[str]) -> list[tuple[int, Rule]]:
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
                rules.append((number, Rule(pattern=read_pattern(each["match"]), queue=each["queue"])))
            except InvalidRouting as error:
                wrong.append(f"rule {number}: {error}")
        problems += wrong
    return rules


def _unknown(given: Mapping[str, object], known: Sequence[str], owner: str) -> Iterator[str]:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
            yield f"{owner} has an unknown key {key[:80]!r}; {hint}"


def _wrong_queue(queue: object) -> str | None:
    if isinstance(queue, str) and _QUEUE.fullmatch(queue):
        return None
    return f"queue {str(queue)[:80]!r} is not allowed; use letters, digits, '_', '-', '.' and at most 200 characters."


def _shadowed(rules: Sequence[tuple[int, Rule]]) -> Iterator[str]:
    for place, (number, later) in enumerate(rules):
        for earlier_number, earlier in rules[:place]:
            if covers(earlier.pattern, later.pattern):
                yield (
                    f"rule {number} ({later.pattern.text!r}) can never match: rule {earlier_number}"
                    f" ({earlier.pattern.text!r}) takes all of its tasks first. Put rule {number} before it, or remove it."
                )
                break
