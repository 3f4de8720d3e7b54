"""`make docs`: build the documentation site, add `llms.txt` and `llms-full.txt`, and pack all of it for the API to serve.

The build fails if a link or an anchor is wrong, if a page would load something from another host, or if the archive is too large
to be part of the package.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = ROOT / "zensical.toml"
SITE = ROOT / "build" / "site"
ARCHIVE = ROOT / "src" / "evertick" / "ui" / "docs.zip"
MOST_BYTES = 5 * 10**6

# What a browser loads without a click.
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
LINK = re.compile(r"!?\[((?:[^\]`]|`[^`]*`)*)\]\([^)]*\)")


def nav_pages(nav: list[object]) -> Iterator[tuple[str, str]]:
    """Every page of the navigation in its order, with the name of its part."""
    for entry in nav:
        assert isinstance(entry, dict)
        for part, pages in entry.items():
            yield from ((part, page) for page in _pages(pages))


def _pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _pages(each)


def read_nav() -> list[tuple[str, str]]:
    return list(nav_pages(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]))


def all_pages() -> list[tuple[str, str]]:
    """The pages of the navigation, then the decisions, which have a page of their own instead of a place in it."""
    decisions = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "decisions").glob("0*.md"))
    return [*read_nav(), *(("Decisions", page) for page in decisions)]


def title_and_summary(text: str) -> tuple[str, str]:
    """The title of a page and the first sentence below it."""
    title, _, rest = text.partition("\n")
    plain = re.sub(r"^```.*?^```$", "", rest, flags=re.MULTILINE | re.DOTALL)
    first = next((line for line in plain.splitlines() if re.match(r"[A-Z`*]", line)), "")
    sentence = re.split(r"(?<=[.!?:]) (?=[A-Z`])", LINK.sub(r"\1", first))[0]
    return title.removeprefix("# "), sentence


def url_of(page: str) -> str:
    return re.sub(r"(^|/)index/$", r"\1", page.removesuffix(".md") + "/")


def llms_index() -> str:
    """`llms.txt`: every page with its URL and first sentence, by part."""
    lines, last = ["# Evertick", "", f"> {title_and_summary(_read('index.md'))[1]}"], ""
    for part, page in all_pages():
        if part != last:
            lines += ["", f"## {part}", ""]
            last = part
        title, summary = title_and_summary(_read(page))
        lines.append(f"- [{title}]({url_of(page) or './'}){summary and f': {summary}'}")
    return "\n".join(lines) + "\n"


def llms_full() -> str:
    """`llms-full.txt`: the text of every page."""
    return "\n\n".join(f"<!-- {url_of(page) or './'} -->\n\n{_read(page).strip()}" for _, page in all_pages()) + "\n"


def _read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def loaded_from_elsewhere(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)}: {url}"
        for path in sorted(folder.rglob("*.html"))
        for url in LOADED.findall(path.read_text(encoding="utf-8"))
    ]


def pack(folder: Path, archive: Path) -> int:
    """Pack the folder, with fixed times: the same pages are the same bytes. Returns the size."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.stat().st_size


def main() -> None:
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(CONFIG)], cwd=ROOT, check=True
    )
    (SITE / "llms.txt").write_text(llms_index(), encoding="utf-8")
    (SITE / "llms-full.txt").write_text(llms_full(), encoding="utf-8")
    if wrong := loaded_from_elsewhere(SITE):
        sys.exit("The site would load from other hosts:\n" + "\n".join(wrong))
    size = pack(SITE, ARCHIVE)
    if size > MOST_BYTES:
        ARCHIVE.unlink()
        sys.exit(f"The site has {size:,} bytes; the package may contain {MOST_BYTES:,}.")
    print(f"{len(all_pages())} pages in build/site; {ARCHIVE.relative_to(ROOT)} has {size / 1e6:.1f} MB.")


if __name__ == "__main__":
    main()
