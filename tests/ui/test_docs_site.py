"""The documentation under `/docs`: served to everybody from one archive, or a hint how to build it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.site import pack

from evertick.domain.errors import NotFound
from evertick.ui import docs_site
from tests.ui.site import HttpVisitor, Site


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site of two pages, where the API looks for it."""
    folder = tmp_path / "site"
    (folder / "howto" / "backfill").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>Evertick</h1>")
    (folder / "howto/backfill/index.html").write_text("<h1>Backfill a range</h1>")
    (folder / "llms.txt").write_text("# Evertick")
    packed = tmp_path / "docs.zip"
    assert pack(folder, packed) == packed.stat().st_size
    monkeypatch.setattr(docs_site, "ARCHIVE", packed)
    docs_site.read_file.cache_clear()
    return packed


def test_the_api_serves_the_site_to_everybody(site: Site, archive: Path) -> None:
    with HttpVisitor(site, None) as visitor:
        home = visitor.get("/docs", follow_redirects=True)
        assert home.status_code == 200 and "Evertick" in home.text
        assert "connect-src 'self'" in home.headers["content-security-policy"]
        moved = visitor.get("/docs/howto/backfill")
        assert (moved.status_code, moved.headers["location"]) == (308, "/docs/howto/backfill/")
        assert "Backfill a range" in visitor.get("/docs/howto/backfill/").text
        assert visitor.get("/docs/llms.txt").headers["content-type"] == "text/plain; charset=utf-8"
        for path in ("/docs/nothing", "/docs/..%2Fapp.py", "/docs//etc/passwd", "/docs/howto/"):
            assert visitor.get(path).status_code == 404, path
    with HttpVisitor(site, "viewer") as visitor:
        assert 'href="/docs/"' in visitor.get("/dags").text


def test_an_installation_without_the_site_says_how_to_build_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs_site, "ARCHIVE", tmp_path / "docs.zip")
    docs_site.read_file.cache_clear()
    with pytest.raises(NotFound, match="make docs"):
        docs_site.read_file("index.html")
    with HttpVisitor(site, None) as visitor:
        answer = visitor.get("/docs/")
        assert answer.status_code == 404 and "make docs" in answer.text
