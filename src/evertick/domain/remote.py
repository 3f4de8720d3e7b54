"""The name of an attempt in a remote executor. Derived from the attempt alone, so that submitting it twice creates one object, and
another runner can find it again.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from evertick.domain.attempt import TaskKey, session_text
from evertick.domain.errors import InvalidSettings

# The limit of a DNS label, which most platforms use for names.
LONGEST_NAME = 63
_PATH = re.compile(r"[A-Za-z0-9/._~%-]*")
_NAME = re.compile(r"et-(\d+)-(\d+)-(\d+|x)-(\d+)-([0-9a-f]{16})")
_HASHED = re.compile(r"et-h[0-9a-f]{40}-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAttempt:
    """The parsed name. A shortened name contains only the session, which is unique to the attempt."""

    session: int
    key: TaskKey | None = None
    epoch: int | None = None


def attempt_name(key: TaskKey, epoch: int, session: int) -> str:
    """`session` is the attempt's own."""
    instance = "x" if key.map_index < 0 else key.map_index
    mark = session_text(session)
    name = f"et-{key.run_id}-{key.idx}-{instance}-{epoch}-{mark}"
    if len(name) <= LONGEST_NAME:
        return name
    return f"et-h{hashlib.sha256(name.encode()).hexdigest()[:40]}-{mark}"


def parse_name(name: str) -> NamedAttempt | None:
    """None for a name that Evertick did not create."""
    if match := _HASHED.fullmatch(name):
        return NamedAttempt(session=int(match[1], 16))
    if not (match := _NAME.fullmatch(name)):
        return None
    key = TaskKey(int(match[1]), int(match[2]), -1 if match[3] == "x" else int(match[3]))
    return NamedAttempt(session=int(match[5], 16), key=key, epoch=int(match[4]))


def read_server_url(url: str) -> SplitResult:
    """The parts of a server's address. Raises InvalidSettings for anything else."""
    parts = urlsplit(url)
    try:
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port = False
    is_plain_path = _PATH.fullmatch(parts.path) and not parts.query and not parts.fragment
    if (
        not (parts.scheme in ("http", "https") and parts.hostname and has_port and not parts.username)
        or not is_plain_path
    ):
        # Never quote a URL that may contain a password.
        shown = "A URL with a user or a password" if "@" in url else repr(url)
        raise InvalidSettings(f"{shown} is not a server address. It must look like https://evertick.example.com")
    return parts
