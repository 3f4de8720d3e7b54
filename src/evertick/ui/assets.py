"""Stylesheets and scripts, read once and served from memory. Their URL contains one hash of all of them, so browsers can
cache them without expiry: a new release has a new URL."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Assets:
    """`files` maps each name below the folder to its content."""

    hash: str
    files: dict[str, Asset]

    def url(self, name: str) -> str:
        if name not in self.files:
            raise KeyError(f"unknown static file {name}")
        return f"/static/{self.hash}/{name}"


def read_assets(folder: Path = _FOLDER) -> Assets:
    """Read the files whose type is in the table. Other types are never served."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TYPES)
    files = {
        path.relative_to(folder).as_posix(): Asset(path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")
        for path in paths
    }
    digest = hashlib.sha256()
    for name, asset in files.items():
        digest.update(name.encode() + b"\0" + asset.content + b"\0")
    return Assets(hash=digest.hexdigest()[:16], files=files)
