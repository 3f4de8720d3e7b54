"""Stylesheets and scripts, read once and served from memory. One hash of all of them is in their address, so that a
browser keeps them for ever and a new release is a new address."""

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
    """`files` by their names below the folder."""

    hash: str
    files: dict[str, Asset]

    def url(self, name: str) -> str:
        if name not in self.files:
            raise KeyError(f"there is no static file {name}")
        return f"/static/{self.hash}/{name}"


def read_assets(folder: Path = _FOLDER) -> Assets:
    """Only what a browser may have: kinds that are not in the table are not served."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TYPES)
    files = {
        path.relative_to(folder).as_posix(): Asset(path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")
        for path in paths
    }
    digest = hashlib.sha256()
    for name, asset in files.items():
        digest.update(name.encode() + b"\0" + asset.content + b"\0")
    return Assets(hash=digest.hexdigest()[:16], files=files)
