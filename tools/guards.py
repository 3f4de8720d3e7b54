"""Finds the guards in the store's SQL: the conditions, unique constraints and locks that protect each change.

Each guard can be removed from the text, one at a time; a test must then fail. Reads text; runs nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

STORE = Path(__file__).parents[1] / "src" / "evertick" / "db"

# Join conditions are not guards: without them a statement would be meaningless.
KEYS = {
    "run_id",
    "idx",
    "map_index",
    "version_id",
    "dag_id",
    "schedule_id",
    "shard",
    "src",
    "dst",
    "queue",
    "rank",
    "seq",
}
KEYS |= {"name", "file", "hash", "bundle_hash", "key", "ctid", "gate_id", "queue_id"}
# Words that name a guard, most specific first.
TELLING = [
    "state",
    "epoch",
    "session",
    "request",
    "is_paused",
    "ended_at",
    "lease_until",
    "next_due",
    "version",
    "error",
]
TELLING += ["not_before", "due_at", "deleted_at", "cancel_requested", "open_tasks", "finished_at", "heartbeat_seq"]
# Pure decisions, covered by table-driven tests.
NO_GUARDS = frozenset({"evaluate_trigger_rule", "state_for_decision", "clock"})
# Statements that only read, but whose result causes changes.
DECIDING = frozenset(
    {"schedules.due", "schedules.next_due", "schedules.of_dag", "runs.orphans", "function_sets.superseded"}
)

_TOKEN = re.compile(r"--[^\n]*|'(?:[^']|'')*'|\$\$|%\(\w+\)s|[A-Za-z_]\w*|\d+|\s+|.", re.S)
_FUNCTION = re.compile(r"create function (\w+)\(.*?\$\$(.*?)\$\$", re.S)
_TABLE = re.compile(r"create table (\w+) \((.*?)\n\)", re.S)
_INDEX = re.compile(r"create (unique )?index \w+ on (\w+)[^;]*;", re.S)
_STATEMENT = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", re.S | re.M)
_CLAUSE_ENDS = {"group", "order", "limit", "returning", "union", "having", "loop", "then", "on", "offset", ";"}
_LOCKS = (["for", "update"], ["for", "no"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One guard, and the text of its file without it. `name` is stable when the surrounding statement changes."""

    name: str
    kind: str
    file: str
    owner: str
    line: int
    start: int
    end: int
    instead: str

    def removed_from(self, text: str) -> str:
        return text[: self.start] + self.instead + text[self.end :]


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    start: int
    end: int
    depth: int


def find_guards(store: Path = STORE) -> list[Guard]:
    """Every guard of every table, function and statement, in the order of the files."""
    found: list[Guard] = []
    for path in _definitions(store):
        found += _of_definitions(path.read_text(encoding="utf-8"), f"{path.parent.name}/{path.name}")
    for path in sorted((store / "queries").glob("*.sql")):
        found += _of_statements(path.read_text(encoding="utf-8"), path.stem)
    return _numbered(found)


def mentions(name: str, store: Path = STORE) -> set[str]:
    """The functions and statements that name the function or table `name`."""
    found: set[str] = set()
    call = re.compile(rf"\b{name}\b")
    for path in _definitions(store):
        found |= {match[1] for match in _FUNCTION.finditer(path.read_text(encoding="utf-8")) if call.search(match[2])}
    for path in (store / "queries").glob("*.sql"):
        statements = _STATEMENT.finditer(path.read_text(encoding="utf-8"))
        found |= {f"{path.stem}.{match[1]}" for match in statements if call.search(match[2])}
    return found


def definitions(store: Path = STORE) -> dict[str, str]:
    """The text of every function, statement and table, without comments: a guard's owner and what it names."""
    found: dict[str, str] = {}
    for path in _definitions(store):
        text = path.read_text(encoding="utf-8")
        indexes = [(match[2], match[0]) for match in _INDEX.finditer(text)]
        for name, part in [*((m[1], m[0]) for kind in (_TABLE, _FUNCTION) for m in kind.finditer(text)), *indexes]:
            found[name] = f"{found.get(name, '')} {_plain(part)}"
    for path in sorted((store / "queries").glob("*.sql")):
        for match in _STATEMENT.finditer(path.read_text(encoding="utf-8")):
            found[f"{path.stem}.{match[1]}"] = _plain(match[2])
    return found


def _plain(text: str) -> str:
    return " ".join(token.text for token in tokenize(text, 0, len(text)))


def _definitions(store: Path) -> list[Path]:
    """The files of tables and of functions."""
    return [*sorted((store / "migrations").glob("*.sql")), *sorted((store / "functions").glob("*.sql"))]


def _of_definitions(text: str, file: str) -> Iterator[Guard]:
    for match in _TABLE.finditer(text):
        yield from _of_table(Code(text, file, match[1], match.start(2), match.end(2)))
    for match in re.finditer(r"create (unique )index \w+ on (\w+)", text):
        yield Code(text, file, match[2]).guard("unique", match.start(1), match.end(), f"index on {match[2]}")
    for match in _FUNCTION.finditer(text):
        if match[1] not in NO_GUARDS:
            yield from _of_code(Code(text, file, match[1], match.start(2), match.end(2)))


def _of_statements(text: str, noun: str) -> Iterator[Guard]:
    for match in _STATEMENT.finditer(text):
        owner = f"{noun}.{match[1]}"
        if owner in DECIDING or re.search(r"\b(insert into|update|delete from)\b|advisory", match[2]):
            yield from _of_code(Code(text, f"queries/{noun}.sql", owner, match.start(2), match.end(2)))


class Code:
    """The tokens of one SQL function, statement or table."""

    def __init__(self, text: str, file: str, owner: str, start: int = 0, end: int = 0) -> None:
        self.text, self.file, self.owner, self.start, self.end = text, file, owner, start, end
        self.tokens = tokenize(text, start, end)

    def guard(self, kind: str, start: int, end: int, instead: str) -> Guard:
        gone = " ".join(self.text[start:end].split())
        return Guard(
            name=f"{self.owner}: {gone[:110]}",
            kind=kind,
            file=self.file,
            owner=self.owner,
            line=self.text.count("\n", 0, start) + 1,
            start=start,
            end=end,
            instead=instead,
        )

    def words(self, position: int, count: int) -> list[str]:
        return [token.text for token in self.tokens[max(0, position) : position + count]]


def _of_table(code: Code) -> Iterator[Guard]:
    """Replace a table constraint by one that allows everything; remove a column constraint that repeats another one."""
    keys = re.compile(r"(?<=\s)(unique( nulls not distinct)?|primary key) \([^)]*\)( include \([^)]*\))?")
    for found in keys.finditer(code.text, code.start, code.end):
        yield code.guard("unique", found.start(), found.end(), "check (true)")
    for found in re.compile(
        r"(?<=\s)(unique|(?<!identity )primary key)(?=(?: references \w+ on delete \w+)?,?(?: *--[^\n]*)?\n)"
    ).finditer(code.text, code.start, code.end):
        yield code.guard("unique", found.start(), found.end(), "not null")
    for found in re.compile(r"\bcheck (?=\()").finditer(code.text, code.start, code.end):
        yield code.guard("check", found.start(), _closing(code.text, found.end()), "check (true)")


def _of_code(code: Code) -> Iterator[Guard]:
    for position, token in enumerate(code.tokens):
        match token.text:
            case "where" if not _is_no_condition(code, position):
                yield from _of_where(code, position)
            case "for":
                yield from _of_lock(code, position)
            case "conflict":
                yield _of_conflict(code, position)
            case "if" if "found" in code.words(position, 3):
                start, end = code.tokens[position + 1].start, _then(code, position).start
                yield code.guard("found", start, end, "false ")
            case "when" if code.words(position - 1, 1) != ["exit"]:
                yield from _of_case(code, position)
            case "pg_advisory_xact_lock" | "pg_advisory_xact_lock_shared":
                end = _closing(code.text, token.end)
                yield code.guard("lock", token.start, end, "num_nulls" + code.text[token.end : end])
            case _:
                continue


def _is_no_condition(code: Code, position: int) -> bool:
    """Whether a WHERE is not a condition: `filter (where …)` only counts, `on conflict (…) where …` names an index."""
    if code.words(position - 2, 2) == ["filter", "("]:
        return True
    depth = code.tokens[position].depth
    level = [token.text for token in code.tokens[:position] if token.depth == depth]
    return level[-3:] == ["conflict", "(", ")"]


def _of_where(code: Code, position: int) -> Iterator[Guard]:
    for part in conjuncts(code, position):
        if not _joins_keys(part):
            yield code.guard(_kind(part), part[0].start, part[-1].end, "true")


def _of_lock(code: Code, position: int) -> Iterator[Guard]:
    """Remove the lock; or remove SKIP LOCKED, so that it waits."""
    lock = re.compile(r"for (no key )?update( of \w+)?(?P<skip> skip locked)?")
    found = lock.match(code.text, code.tokens[position].start)
    if found is not None:
        yield code.guard("lock", found.start(), found.end(), "")
    if found is not None and found["skip"]:
        yield code.guard("lock", found.start("skip"), found.end(), "")


def _of_conflict(code: Code, position: int) -> Guard:
    """The guard from ON CONFLICT to the end of the statement, or to RETURNING."""
    on = code.tokens[position - 1]
    end = code.tokens[-1].end
    for token in code.tokens[position + 1 :]:
        if token.depth < on.depth or (token.depth == on.depth and token.text in (";", "returning")):
            end = token.start
            break
    return code.guard("unique", on.start, end, "")


def _of_case(code: Code, position: int) -> Iterator[Guard]:
    """A WHEN branch on a state, a request or a pause: without it, the next branch applies."""
    end = _then(code, position).start
    part = [token for token in code.tokens[position + 1 :] if token.end <= end]
    if _kind(part) in ("state", "request", "is_paused", "cancel_requested"):
        yield code.guard(_kind(part), part[0].start, part[-1].end, "false")


def conjuncts(code: Code, position: int) -> list[list[Token]]:
    """The conjuncts of the WHERE at `position`; a single one if an OR joins them."""
    depth, cases, has_or, is_between = code.tokens[position].depth, 0, False, False
    parts: list[list[Token]] = [[]]
    for place, token in enumerate(code.tokens[position + 1 :], position + 1):
        is_level = token.depth == depth
        ends = is_level and not cases and (token.text in _CLAUSE_ENDS or code.words(place, 2) in _LOCKS)
        if token.depth < depth or ends:
            break
        cases += {"case": 1, "end": -1}.get(token.text, 0)
        is_between = is_between or (is_level and token.text == "between")
        if is_level and not cases and token.text == "and" and not is_between:
            parts.append([])
            continue
        is_between = is_between and token.text != "and"
        has_or = has_or or (is_level and not cases and token.text == "or")
        parts[-1].append(token)
    return [[token for part in parts for token in part]] if has_or else [part for part in parts if part]


def tokenize(text: str, start: int, end: int) -> list[Token]:
    """The tokens between two offsets, without comments and spaces. A bracket has the depth of its surroundings."""
    tokens, depth = [], 0
    for match in _TOKEN.finditer(text, start, end):
        word = match[0]
        depth -= word == ")"
        if not word.isspace() and not word.startswith("--"):
            tokens.append(Token(word.lower(), match.start(), match.end(), depth))
        depth += word == "("
    return tokens


def _joins_keys(part: list[Token]) -> bool:
    """Whether the condition only selects rows by key: `k.run_id = p.run_id`, `idx = any(…)`, `run_id in (…)`."""
    words = [token.text for token in part]
    place = 2 if words[1:2] == ["."] else 0
    return words[place] in KEYS and words[place + 1 : place + 2] in (["="], ["in"])


def _kind(part: list[Token]) -> str:
    words = {token.text for token in part}
    return next((word for word in TELLING if word in words), "condition")


def _then(code: Code, position: int) -> Token:
    depth = code.tokens[position].depth
    return next(token for token in code.tokens[position:] if token.text == "then" and token.depth == depth)


def _closing(text: str, opening: int) -> int:
    """The offset after the bracket that closes the first bracket from `opening` on."""
    depth = 0
    for match in _TOKEN.finditer(text, opening):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0 and match[0] == ")":
            return match.end()
    raise ValueError(f"unclosed bracket: {text[opening : opening + 40]!r}")


def _numbered(guards: list[Guard]) -> list[Guard]:
    """Number guards with the same text in one statement: the second one is #2."""
    seen: Counter[str] = Counter()
    named = []
    for guard in guards:
        seen[guard.name] += 1
        count = seen[guard.name]
        named.append(guard if count == 1 else replace(guard, name=f"{guard.name} #{count}"))
    return named
