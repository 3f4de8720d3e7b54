"""The documents tell the truth: snippets load, commands parse, links lead somewhere, reference pages equal the program."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shlex
import sys
import tomllib
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from evertick.attempts import body
from evertick.attempts.child_setup import ReuseLimits
from evertick.bundles import bundle
from evertick.cli.main import COMMANDS, load_app, main
from evertick.config import Settings, read_settings
from evertick.domain import retry
from evertick.domain.errors import InvalidSettings
from evertick.domain.schedules import misfire, spec
from evertick.publisher import publisher
from evertick.runner import session as runner_session
from evertick.sdk.dag import load_dags
from tests.source_tree import ROOT, SOURCE, modules

DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(DOCS.rglob("*.md"))
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[(?:[^\]`]|`[^`]*`)*\]\(([^)\s]+)\)")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
# The places where a document was written, and how: none of a reader's business.
WORKSHOP = re.compile(
    r"/(work|tmp|home|root|Users)/|\bcli:root\b|\bvm-\d|\b(AI|assistants?|chatbots?|language models?|prompt engineer\w*)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced part of a document."""

    place: str
    language: str
    text: str


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(language: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            is_recipe = text[: fence.start()].rstrip().endswith(".py -->")  # tests/test_cookbook.py runs it
            if fence[1] == language and not is_recipe:
                line = text.count("\n", 0, fence.start()) + 2
                found.append(Block(place=f"{named(document)}:{line}", language=language, text=fence[2]))
    return found


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def spans() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        for span in SPAN.findall(prose(document)):
            yield named(document), span


# Snippets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_a_python_snippet_is_a_dag_file_that_loads(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = re.sub(r"\W", "_", block.place) + ".py"
    (tmp_path / file).write_text(block.text, encoding="utf-8")
    assert bool(load_dags(tmp_path, file)) is ("@dag" in block.text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_row_of_a_table_belongs_to_one_with_a_head(document: Path) -> None:
    """A blank line in a table ends it: what follows is shown as text."""
    text = FENCE.sub("", document.read_text())
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, line, *_ = [*block.splitlines(), ""]
        assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line), f"{document.name}: {head}"


def test_there_are_snippets_to_check() -> None:
    assert len(blocks("python")) > 5
    assert len(list(typed_commands())) > 20


# Commands ---------------------------------------------------------------------------------------------------


def typed_commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line that a document shows: after a prompt, or in the text."""
    for block in blocks("console"):
        for line in block.text.splitlines():
            if line.startswith(("$ ", "evertick ")):
                yield block.place, without_variables(shlex.split(line.removeprefix("$ ")))
    for place, span in spans():
        if span.startswith(("evertick ", "make ")):
            yield place, without_variables(shlex.split(span))


def without_variables(words: list[str]) -> list[str]:
    while words and ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    return words


def program(noun: str) -> Any:
    return get_command(load_app(COMMANDS[noun]))


# In the text these stand for a number.
PLACEHOLDERS = ("RUN", "BACKFILL")


def why_wrong(words: list[str], root_options: str) -> str | None:
    """What the parser says about the words after `evertick`; nothing is run."""
    noun, rest = words[0], words[1:]
    if noun.startswith("-"):
        return None if noun in root_options else f"no option {noun}"
    if noun not in COMMANDS:
        return f"no command {noun}"
    command = program(noun)
    known = getattr(command, "commands", None)
    if known is not None:
        if not rest:
            return None
        if rest[0] not in known:
            return f"no command {noun} {rest[0]}"
        command, rest = known[rest[0]], rest[1:]
    if not rest:
        return None  # it is named, not typed
    try:
        command.make_context("evertick", ["1" if word in PLACEHOLDERS else word for word in rest])
    except typer.TyperException as error:
        return str(error.format_message())
    return None


def test_every_command_in_the_documents_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    root_options = capsys.readouterr().out
    wrong = []
    for place, words in typed_commands():
        is_form = len(words) > 1 and words[1].isupper()
        if words[0] == "evertick" and len(words) > 1 and not is_form and (why := why_wrong(words[1:], root_options)):
            wrong.append(f"{place}: {' '.join(words)}: {why}")
    assert not wrong


def test_every_make_command_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = {(place, words[1]) for place, words in typed_commands() if words[0] == "make" and len(words) > 1}
    assert [f"{place}: make {target}" for place, target in used if target not in targets] == []


def test_a_command_that_cannot_be_typed_would_be_found() -> None:
    assert why_wrong(["dags", "lst"], "") == "no command dags lst"
    assert "--bogus" in (why_wrong(["dags", "list", "--bogus"], "") or "")
    assert why_wrong(["tasks", "mark", "12", "extract", "success"], "") is None


def leaves() -> dict[str, Any]:
    """Every command by the words that one types."""

    def below(name: str, command: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for verb, each in (getattr(command, "commands", None) or {}).items():
            found |= below(f"{name} {verb}", each)
        return found or {name: command}

    found: dict[str, Any] = {}
    for noun in COMMANDS:
        found |= below(noun, program(noun))
    return found


def test_the_page_of_commands_has_every_command_and_every_option() -> None:
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### evertick ([a-z -]+)\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == leaves().keys()
    for name, command in leaves().items():
        options = {text for each in command.params for text in each.opts if text.startswith("-")} - {"--help"}
        shown = set(
            re.findall(r"`(-{1,2}[a-z][a-z-]*)`", "".join(re.findall(r"^\| .* \|", sections[name], re.MULTILINE)))
        )
        assert options <= shown, f"evertick {name}: add {options - shown} to its table"
        assert {text for text in shown if text not in options and f"| `{text}`" in sections[name]} == set(), name


# Settings ---------------------------------------------------------------------------------------------------

SETTING_ROW = re.compile(r"^\| `EVERTICK_(\w+)` \|([^|]*)\|([^|]*)\|", re.MULTILINE)
COMPUTED = {"runner_slots": "4 × CPUs, at least 32"}


def default_text(name: str, value: object) -> str:
    if name in COMPUTED:
        return COMPUTED[name]
    if value is None or value == ():
        return "none"
    plain = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return f"`{','.join(value) if isinstance(value, tuple) else plain}`"


def setting_rows() -> dict[str, tuple[str, str]]:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    return {name.lower(): (default.strip(), lowest.strip()) for name, default, lowest in SETTING_ROW.findall(page)}


def test_the_page_of_settings_has_every_setting_with_its_default() -> None:
    defaults = Settings()
    expected = {each.name: default_text(each.name, getattr(defaults, each.name)) for each in fields(Settings)}
    assert {name: default for name, (default, _) in setting_rows().items()} == expected
    assert defaults.runner_slots == max(32, 4 * (os.cpu_count() or 1))


@pytest.mark.parametrize("name", [each.name for each in fields(Settings) if each.type in ("int", "float")])
def test_the_page_of_settings_has_the_lowest_value_of_each_number(name: str) -> None:
    lowest = setting_rows()[name][1]
    with pytest.raises(InvalidSettings) as refused:
        read_settings({f"EVERTICK_{name.upper()}": "-1"})
    told = re.search(r"the lowest is (\S+)\.$", str(refused.value))
    assert lowest == (f"`{told[1]}`" if told else "")


# Log events -------------------------------------------------------------------------------------------------

LEVELS = ("debug", "info", "warning", "error", "critical")
EVENT_ROW = re.compile(r"^\| `(\w+)` \| (\w+(?:, \w+)*) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
# The last word of an event that is a state, not an action.
STATES = ["invalid", "listening", "missing", "ready", "stopping", "unavailable", "unreachable"]


def texts(node: ast.expr) -> list[str]:
    """The strings that an argument may be: both of `"a" if x else "b"`."""
    parts = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def logged_by(call: ast.Call) -> Iterator[tuple[str, str]]:
    """The event and level of a call that logs."""
    function = ast.unparse(call.func)
    owner, _, method = function.rpartition(".")
    if method in LEVELS and re.search(r"\b_?log$", owner):
        yield from ((event, method) for event in texts(call.args[0]))
    elif function == "self._event":  # of the supervisor
        level = {each.arg: texts(each.value) for each in call.keywords}.get("level", ["info"])
        yield from ((event, level[0]) for event in texts(call.args[1]))
    elif function == "self._say_once":
        yield from ((event, "warning") for event in texts(call.args[0]))
    elif function == "tell_result":
        yield from ((event, level) for event in texts(call.args[0]) for level in ("info", "warning"))


@cache
def events_in_source() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module in modules(SOURCE):
        for node in ast.walk(module.tree):
            for event, level in logged_by(node) if isinstance(node, ast.Call) else ():
                found.setdefault(event, set()).add(level)
    return found


def test_the_page_of_log_events_has_every_event_with_its_levels() -> None:
    page = (DOCS / "reference" / "log-events.md").read_text(encoding="utf-8")
    rows = EVENT_ROW.findall(page)
    assert len(rows) == len({event for event, _ in rows}) == page.count("\n| `"), (
        "a row is malformed, or is there twice"
    )
    assert {event: set(levels.split(", ")) for event, levels in rows} == events_in_source()


def test_an_event_names_a_thing_and_what_happened_to_it() -> None:
    assert [event for event in events_in_source() if not is_well_named(event)] == []


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ("task_finished", True),
        ("connection_lost", True),
        ("port_unavailable", True),
        ("finished", False),
        ("task_running", False),
    ],
)
def test_a_badly_named_event_is_found(event: str, expected: bool) -> None:
    assert is_well_named(event) is expected


def is_well_named(event: str) -> bool:
    _, *words = event.split("_")
    happened = any(word.endswith("ed") or word in ("left", "lost") for word in words)
    return bool(words) and (happened or words[-1] in STATES or event == "snapshot_too_old")


# Places -----------------------------------------------------------------------------------------------------


def slugs(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_leads_somewhere(document: Path) -> None:
    wrong = []
    for target in LINK.findall(prose(document)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        place = (document.parent / path).resolve() if path else document
        if not place.exists() or not place.is_relative_to(ROOT) or (anchor and anchor not in slugs(place)):
            wrong.append(target)
    assert not wrong


def found_in(text: str, name: str) -> bool:
    """Whether a source text defines a name: a function, class or constant of Python; a function, table or statement of SQL."""
    return bool(
        re.search(
            rf"^\s*(async def|def|class|create (function|table|type|view)) {re.escape(name)}\b"
            rf"|^-- name: {re.escape(name)}$|^{re.escape(name)}\b[^=\n]*=",
            text,
            re.MULTILINE,
        )
    )


def test_every_place_in_the_code_that_a_document_names_is_there() -> None:
    wrong = []
    for document, span in spans():
        match = re.fullmatch(r"([\w./-]+\.(?:py|sql|md|toml|lock))(?:::([\w.]+))?", span)
        if match is None or "NNNN" in span:
            continue
        path = next((root / match[1] for root in (ROOT, SOURCE, SOURCE / "db") if (root / match[1]).exists()), None)
        is_file_of_a_reader = path is None and "/" not in match[1]
        if path is None and not is_file_of_a_reader and not match[1].startswith("dags/"):
            wrong.append(f"{document}: {match[1]}")
        elif path is not None and match[2]:
            text = path.read_text(encoding="utf-8")
            wrong += [f"{document}: {span}" for part in match[2].split(".") if not found_in(text, part)]
    assert not wrong


def test_every_promise_names_a_test_that_shows_it() -> None:
    promises = 0
    for table in re.findall(
        r"^\| promise \|.*\n\|[-|]+\n((?:\|.*\n)+)", prose(DOCS / "explanation/guarantees.md"), re.MULTILINE
    ):
        for row in table.splitlines():
            promise, _, shown_by = (cell.strip() for cell in row.strip("|").split("|"))
            promises += 1
            assert re.search(r"`tests/(\w+/)*test_\w+\.py(::test_\w+)?`", shown_by), f"nothing shows: {promise}"
    assert promises > 20


# Figures, pictures, words -----------------------------------------------------------------------------------


def test_the_figures_in_the_text_are_those_of_the_code() -> None:
    howto = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "howto").glob("*.md")}
    first, retries = howto["first-dag"], howto["retries-and-timeouts"]
    policy, reuse = retry.RetryPolicy(), ReuseLimits()
    claims = [
        ("above 1 MiB in a file", first, Settings().result_spill_bytes == body.DEFAULT_RESULT_BYTES == 2**20),
        ("up to 256 MiB", howto["data"], Settings().result_max_bytes == 256 * 2**20),
        ("within five seconds", first, publisher.RESCAN_SECONDS == 5),
        ("at most ten seconds late", first, misfire.ON_TIME_SECONDS == 10),
        ("50 ms at the least", first, spec.parse_schedule("@every 50ms").every_seconds == 0.05),
        ("stopped after 30 seconds", first, Settings().load_timeout_seconds == 30),
        (
            "1 MB for a file, 20 MB in all",
            first,
            (bundle.MAX_FILE_BYTES, bundle.MAX_TOTAL_BYTES) == (10**6, 20 * 10**6),
        ),
        ("after 1,000 attempts", first, reuse.attempts == 1000),
        ("grown by 256 MB", first, reuse.growth_bytes == 256 * 2**20),
        ("After half a second", retries, runner_session.CANCEL_GRACE_SECONDS == 0.5),
        ("| `retries` | 0 |", retries, policy.retries == 0),
        ("| `retry_delay` | 30 s |", retries, policy.delay_seconds == 30),
        ('| `retry_backoff` | `"fixed"` |', retries, policy.backoff is retry.Backoff.FIXED),
        ("| `retry_max_delay` | 1 h |", retries, policy.max_delay_seconds == 3600),
    ]
    assert [text for text, page, holds in claims if text not in page or not holds] == []


def test_the_changelog_has_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_licence_is_the_apache_license_word_for_word() -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


@pytest.mark.parametrize("picture", PICTURES, ids=named)
def test_a_picture_is_used_and_needs_nothing_from_the_network(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    xml.fromstring(text)
    # `evertick up` prints the address of its own web UI.
    assert re.findall(r"https?://(?!127\.0\.0\.1)[^\"\s)]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|@font-face|<script|\bhref=", text)
    assert any(picture.name in document.read_text(encoding="utf-8") for document in DOCUMENTS)


@pytest.mark.parametrize("document", [*DOCUMENTS, *PICTURES], ids=named)
def test_a_document_speaks_of_evertick_alone(document: Path) -> None:
    assert [found[0] for found in WORKSHOP.finditer(document.read_text(encoding="utf-8"))] == []


def test_every_example_is_shown_with_a_page_that_is_there() -> None:
    text = (ROOT / "docs/howto/examples.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`(\w+)\.py`", text))
    assert shown == {path.stem for path in (ROOT / "src/evertick/examples").glob("*.py")}
    rows = [line for line in text.splitlines() if line.startswith("| ") and ".py" in line]
    assert all(re.search(r"\]\([\w-]+\.md", row) for row in rows)


# Names of tables, columns and functions ---------------------------------------------------------------------

CREATED = re.compile(
    r"^\s*\"?create (?:unique |unlogged )?(\w+) (?:concurrently |if not exists )*(?:evertick\.)?(\w+)", re.MULTILINE
)
COLUMN = re.compile(r"(?:^\s+(?=\w+ +[a-z])|, (?=\w+ (?:int|bigint|text|boolean|timestamptz)\b))(\w+)", re.MULTILINE)
NAME = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)*(?:\(\))?")
# Names in the tour that belong to Python.
PYTHON_NAMES = {"dag.test()", "logging", "now", "print", "router", "tick", "tick()"}
# Names in the decisions that belong to PostgreSQL, or to a design that was rejected.
FOREIGN_NAMES = {"auto_explain", "claim_tasks_7", "max_prepared_transactions", "pg_control_checkpoint"}


def sql_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (SOURCE / "db").rglob("*.sql")]


def created(kind: str) -> set[str]:
    texts = [*sql_texts(), (SOURCE / "db" / "migrate.py").read_text(encoding="utf-8")]
    return {name for text in texts for what, name in CREATED.findall(text) if what == kind}


def names_in(document: Path) -> set[str]:
    return {span for span in SPAN.findall(prose(document)) if NAME.fullmatch(span)}


def test_the_tour_lists_every_table() -> None:
    section = prose(DOCS / "explanation/architecture.md").partition("## 3. Tables")[2].partition("\n## ")[0]
    listed = [
        name for row in re.findall(r"^\| [a-z ]+ \| (`.*?) \|", section, re.MULTILINE) for name in SPAN.findall(row)
    ]
    assert sorted(listed) == sorted(created("table"))


def test_every_name_in_the_tour_is_one_of_the_database_or_a_package() -> None:
    known = {name for text in sql_texts() for _, name in CREATED.findall(text)} | created("table") | PYTHON_NAMES
    known |= {path.name for path in SOURCE.iterdir()} | {name for text in sql_texts() for name in COLUMN.findall(text)}
    names = names_in(DOCS / "explanation/architecture.md") - known
    assert [name for name in sorted(names) if not known.issuperset(name.split("."))] == []


def test_every_name_of_code_in_the_documents_exists() -> None:
    """Of several words: a name of one word may be anything."""
    folders = ("src", "tests", "tools", "bench", "deploy")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sql", ".yaml")
    ]
    texts = [path.read_text(encoding="utf-8") for path in [*files, DOCS / "reference" / "metrics.md"]]
    words = {word for text in texts for word in re.findall(r"[a-z]\w*_\w+", text)} | FOREIGN_NAMES
    documents = [
        DOCS / "explanation/architecture.md",
        DOCS / "explanation/guarantees.md",
        DOCS / "reference/glossary.md",
        *(DOCS / "decisions").glob("*.md"),
    ]
    used = {
        (document.name, word)
        for document in documents
        for name in names_in(document)
        for word in re.findall(r"\w+", name)
    }
    assert [f"{document}: {word}" for document, word in sorted(used) if "_" in word and word not in words] == []
