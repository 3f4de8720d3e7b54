"""The release of this program: its version, and the commit that it was built from. Imports nothing that a command pays for."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

_PACKAGE = Path(__file__).parent


@cache
def commit() -> str | None:
    """Packed with the package when it is built; in a clone, what is checked out. None where neither is known."""
    packed = _PACKAGE / "commit.txt"
    if packed.exists():
        return packed.read_text(encoding="utf-8").strip() or None
    clone = _PACKAGE.parents[1]
    if not (clone / ".git").exists() or not (clone / "pyproject.toml").exists():
        return None
    describe = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def release() -> str:
    """The version, and the commit if it is known: `0.1.0 (a0a7200b68b2)`."""
    found = commit()
    return f"{version('evertick')} ({found})" if found else version("evertick")
