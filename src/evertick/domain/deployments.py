"""Deployments: the names under which DAGs are published together, and what changes in one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from evertick.domain.errors import UserError

# The deployment of a publisher that was given no name.
DEFAULT = "default"
LONGESTNAME = 100
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LONGEST_TEXT = 500


class DeploymentKind(StrEnum):
    """Where the DAGs of a deployment come from."""

    FOLDER = "folder"
    UPLOAD = "upload"
    GIT = "git"

    @property
    def about(self) -> str:
        return _ORIGINS[self]


_ORIGINS = {
    DeploymentKind.FOLDER: "a folder that a publisher watches",
    DeploymentKind.UPLOAD: "`evertick deploy`",
    DeploymentKind.GIT: "a git repository that a publisher follows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentChange:
    """A deployment and what is published in it. `expected`: the version that it must have; None for any. `is_whole`: the
    published DAGs are all that it has from now on, and its next version. `restores`: the version that is published again."""

    name: str
    kind: DeploymentKind | None = None
    source: dict[str, object] | None = None
    expected: int | None = None
    is_whole: bool = False
    content_hash: str | None = None
    commit_hash: str | None = None
    author: str | None = None
    message: str | None = None
    restores: int | None = None


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name[:200]!r} is not a valid name for a deployment: use 1 to {LONGESTNAME} letters, digits, '_', '-' and"
            " '.', and begin with a letter or a digit."
        )
    return name


def one_line(text: str | None) -> str | None:
    """The author or the message of a commit, as it is stored and shown."""
    plain = "".join(each if each.isprintable() else " " for each in text or "")
    return " ".join(plain.split())[:_LONGEST_TEXT] or None
