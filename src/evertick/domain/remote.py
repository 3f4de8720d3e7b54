"""The name of an attempt in a remote executor. Derived from the attempt alone, so that submitting it twice creates one object, and
another runner can find it again.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from evertick.domain.attempt import TaskKey, session_text

# The limit of a DNS label, which most platforms use for names.
LONGEST_NAME = 63
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
