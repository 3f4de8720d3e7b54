"""What every page rests on: assets with their hashes, headers, the login, and that nobody comes in by another door."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from evertick.domain.access import MATRIX, Permission, Role
from evertick.ui.layout import HEADERS, read_static_files
from evertick.ui.pages.login import local
from tests.source_tree import SOURCE

STATIC = SOURCE / "ui" / "static"
TEMPLATES = SOURCE / "ui" / "templates"


def test_what_was_written_elsewhere_is_what_it_says() -> None:
    vendored = tomllib.loads((STATIC / "vendor" / "VENDORED.toml").read_text())
    found = {path.name for path in (STATIC / "vendor").glob("*.js")}
    assert {each["file"] for each in vendored.values()} == found
    for each in vendored.values():
        content = (STATIC / "vendor" / each["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == each["sha256"], each["file"]
        assert each["version"] in content.decode() and each["license"]


def test_no_template_has_a_script_or_a_style_of_its_own() -> None:
    """The policy forbids them; a page that has one works on nobody's machine but the author's."""
    forbidden = re.compile(
        r"<script(?![^>]*\bsrc=)|<style|\sstyle\s*=|\son[a-z]+\s*=|javascript:|\|\s*safe\b|autoescape", re.I
    )
    wrong = [
        f"{path.name}: {found[0]}"
        for path in TEMPLATES.rglob("*.html")
        if (found := forbidden.search(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []


def test_no_script_makes_markup_of_text() -> None:
    """`innerHTML` may be read, never set: names and logs are text."""
    forbidden = re.compile(r"(inner|outer)HTML\s*\+?=[^=]|insertAdjacentHTML|document\.write|eval\(|new Function")
    scripts = list(STATIC.glob("*.js"))
    assert scripts
    assert [path.name for path in scripts if forbidden.search(path.read_text(encoding="utf-8"))] == []


def test_a_changed_file_is_a_new_address(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("a")
    (tmp_path / "secret.txt").write_text("not for browsers")
    before = read_static_files(tmp_path)
    (tmp_path / "a.css").write_text("b")
    after = read_static_files(tmp_path)
    assert before.url("a.css") != after.url("a.css")
    assert set(after.files) == {"a.css"}
    with pytest.raises(KeyError, match=r"b\.css"):
        after.url("b.css")


@pytest.mark.parametrize(
    ("address", "leads_to"),
    [
        ("/dags?q=a", "/dags?q=a"),
        ("//evil.example/x", "/"),
        ("https://evil.example", "/"),
        ("/\\evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/a\nb", "/"),
        ("", "/"),
    ],
)
def test_the_login_leads_nowhere_else(address: str, leads_to: str) -> None:
    assert local(address) == leads_to


def test_every_page_has_the_strict_policy() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert MATRIX[Permission.READ_DAGS].lowest is Role.VIEWER
