"""Which names in a deployment Evertick does not know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from evertick.config import Settings
from tests.test_docs import why_wrong

KNOWN = {f"EVERTICK_{each.name.upper()}" for each in fields(Settings)}


def strange_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("EVERTICK_") and name not in KNOWN]


def why_no_command(words: list[str]) -> str | None:
    """What the program would say to them; nothing is run."""
    return why_wrong(words, "--help --version")
