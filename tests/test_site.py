"""The documentation site: its navigation and its texts for programs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tools.site import CONFIG, DOCS, all_pages, llms_full, llms_index, loaded_from_elsewhere, read_nav, url_of

from tests.source_tree import ROOT


def test_every_page_has_a_place_in_the_navigation() -> None:
    places = [page for _, page in read_nav()]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/0")}
    assert len(places) == len(set(places))
    assert set(places) == pages - decisions, "add the page to `nav` in zensical.toml"


def test_the_banner_shows_the_version_of_the_package() -> None:
    config = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert config["extra"]["release"] == package["version"]


def test_the_texts_for_programs_have_every_page() -> None:
    index, full = llms_index(), llms_full()
    assert len(all_pages()) > 60
    for _, page in all_pages():
        assert f"]({url_of(page) or './'})" in index
        assert (DOCS / page).read_text(encoding="utf-8").strip() in full


@pytest.mark.parametrize(
    ("page", "url"), [("index.md", ""), ("tutorial/index.md", "tutorial/"), ("howto/backfill.md", "howto/backfill/")]
)
def test_a_page_has_the_url_of_its_directory(page: str, url: str) -> None:
    assert url_of(page) == url


def test_a_page_that_loads_something_from_another_host_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://example.com">x</a><script src="../a.js"></script>')
    assert loaded_from_elsewhere(tmp_path) == []
    (tmp_path / "bad.html").write_text('<link rel=stylesheet href="https://fonts.example/a.css">')
    assert loaded_from_elsewhere(tmp_path) == ["bad.html: https://fonts.example/a.css"]
