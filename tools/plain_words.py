"""Wording and names that the project does not use: patterns for odd English, and names of the rename that are gone.

Reads files; decides nothing. `tools/figures.py` counts what it finds, `tests/test_tidy.py` forbids it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PATTERNS = {
    "vague actor": r"\b(?:whoever|somebody|someone else's|nobody|no one|whomever|whichever one|those (?:who|that|which)|he who"
    r"|the ones? (?:who|that))\b",
    "beside for while/next to": r"\bbeside\b",
    "'What/Who ...' as subject": r"(?:(?<=[.;:] )|(?<=\A)|(?<=\n)|(?<=\| ))(?:What|Who) (?:is|are|was|were|has|have|had|can"
    r"|cannot|may|must|does|do|did|ends?|runs?|waits?|fails?|it|they|people|somebody|nobody|belongs|comes|goes|stands|lies)\b"
    r"(?![^.\n|]*\?)",
    "'is told' and kin": r"\b(?:is|are|was|were|be|been) (?:told|heard of|asked of|let in|let go|given back|looked at"
    r"|waited for|shared out)\b|\btells? of\b|\btold of\b",
    "archaic or literal": r"\b(?:shall|for ever|in vain|in peace|so much later|by the clock of|unless told|in line\b(?! with)"
    r"|as good as|gives? way|brings? about|stands? by itself|all the same,|the way round|likewise)\b",
    "invented metaphor": r"\b(?:nursery|nurseries|heirs?|deposed|bury|buried|buries|goodbye|seated|sits on|second hand"
    r"|roster|strays?|leftovers|pulse|neighbours?)\b",
}
# The four words that the documentation is measured by.
VAGUE = re.compile(r"\b(?:whoever|somebody|nobody|beside)\b", re.IGNORECASE)
OLD_NAMES = [
    "seat",
    "lead",
    "led_link",
    "tending",
    "second_hand",
    "roster",
    "heir",
    "deposed",
    "move_out",
    "stay",
    "duty",
    "contact",
    "changeover",
    "holding",
    "storing",
    "hearing",
    "joining",
    "leaving",
    "neighbours",
    "pulse",
    "strays",
    "leftovers",
    "aside",
    "whoami",
    "nursery",
    "stock",
    "home",
    "spool_shelf",
    "shell_beside",
    "granted",
    "hear",
    "unhear",
    "heard",
    "awaited",
    "arrival",
    "cause",
    "bury",
    "buried",
    "listen_for_silence",
    "remains",
    "offer",
    "pass_gates",
    "enter_gates",
    "leave_gates",
    "unadmit",
    "desk",
    "http_door",
    "short_way",
    "remembered",
    "discretion",
    "tail",
    "far",
    "journey",
    "travel",
    "clock_words",
    "time_words",
    "rehearse",
    "performing",
    "draft",
    "answering",
]
# The end of `module: name`: why it may keep such a word.
KEPT_NAMES = {
    "postgres_home: Home": "EVERTICK_HOME, the directory of the embedded server",
    "postgres_home: HomeLock": "EVERTICK_HOME, the directory of the embedded server",
    ": OnLostContact": "an option of DAG files",
}
_ODD = {kind: re.compile(pattern) for kind, pattern in PATTERNS.items()}
_OLD = re.compile(r"(?<![a-z])(?:" + "|".join(OLD_NAMES) + r")(?![a-z])")


def prose(path: Path) -> str:
    """The text that people read: Markdown without code; comments, docstrings and sentences of code; SQL comments; templates."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        return re.sub(r"`[^`\n]*`", "`x`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    if path.suffix == ".py":
        return "\n".join(_sentences(text))
    if path.suffix == ".sql":
        return "\n".join(line.split("--", 1)[1].strip() for line in text.splitlines() if "--" in line)
    if path.suffix in (".html", ".jinja"):
        return re.sub(r"<[^>]+>|\{[{%#].*?[}%#]\}", " ", text, flags=re.DOTALL)
    return ""


def _sentences(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
        elif token.type == tokenize.STRING:
            value = token.string if token.string[:2].lower().count("f") else ast.literal_eval(token.string)
            if isinstance(value, str) and value.count(" ") >= 2:
                yield value


def word_count(text: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", text))


def odd_words(text: str) -> Iterator[tuple[str, str]]:
    """Kind and surroundings of each place that a reader stumbles over. A pointer, not a judge: a quoted word is fine."""
    for kind, pattern in _ODD.items():
        for match in pattern.finditer(text):
            yield kind, " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())


def old_name(name: str) -> str | None:
    """The word of the rename table that a name (snake_case or CamelCase) still holds."""
    found = _OLD.search(re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
    return found.group() if found else None


def old_names(module: str, tree: ast.Module | None) -> Iterator[str]:
    """The module (`path/without/ending`), its classes and its functions, as far as they have such a name."""
    found = [module] if module.rpartition("/")[2] in OLD_NAMES else []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and old_name(node.name):
            found.append(f"{module}: {node.name}")
    yield from (name for name in found if not name.endswith(tuple(KEPT_NAMES)))
