"""The reference pages have everything that the code has: names, options, operations, tables, metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.reference import PAGES, ROW, TABLE, option_tables, pages, refreshed

import evertick
import evertick.testing
from evertick.sdk import notify

SDK = (PAGES / "sdk.md").read_text(encoding="utf-8")
NOTIFY = ("call", "email", "plugin", "slack", "webhook")
NAMES = [*evertick.__all__, "simulate", "entered", *(f"notify.{name}" for name in NOTIFY)]


@pytest.mark.parametrize(
    ("path", "text"), list(pages()), ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_the_generated_parts_are_those_of_the_code(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `python tools/reference.py`, and read what it changed"


def test_the_destinations_are_all_there_are() -> None:
    made = [
        name
        for name, each in vars(notify).items()
        if getattr(each, "__annotations__", {}).get("return") == "NotificationRule"
    ]
    assert sorted(name for name in made if not name.startswith("_")) == list(NOTIFY)


def test_every_option_has_a_type_and_a_description() -> None:
    tables = {match[2]: match[0] for match in TABLE.finditer(SDK)}
    assert tables.keys() == option_tables().keys()
    for name, rows in option_tables().items():
        described = dict(ROW.findall(tables[name]))
        assert [option for option, _, _ in rows if not described.get(option)] == [], f"describe it in {name}"


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_section_and_an_example(name: str) -> None:
    word = re.escape(name.rpartition(".")[2])
    assert re.search(rf"^### .*\b{re.escape(name.partition('.')[0])}\b|^(def|class) {word}\b", SDK, re.MULTILINE)
    examples = "\n".join(re.findall(r"^```python\n(.*?)^```$", SDK, re.MULTILINE | re.DOTALL))
    assert re.search(rf"\b{word}\b", examples) or name == "entered"


def test_a_new_option_gets_a_row_and_a_removed_one_loses_its_row() -> None:
    page = "<!-- options: TeardownOptions -->\n\n| `gone` | x | an option of yesterday |\n"
    assert refreshed(page).splitlines()[-1] == "| `on_failure_fail_dagrun` | `bool` | `False` |  |"


def test_a_signature_is_written_anew() -> None:
    assert "env: Mapping[str, object] | None = None" in refreshed("```pyi\ndef program(x)\n```\n")
