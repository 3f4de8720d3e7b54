"""Pages by key and records with a version: opaque cursors, ETags, and the constraints that operations share.

A cursor holds nothing secret. Constraints are metadata of the annotations: the API validates them, a local command does not.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Generic, TypeVar

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen

from evertick.domain.errors import PreconditionFailed, UserError

MOST_ITEMS, USUAL_ITEMS = 200, 50
LARGEST = 2**63 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that a text must match."""

    regex: str


Limit = Annotated[int, Ge(1), Le(MOST_ITEMS), Doc("Maximum number of items.")]
Cursor = Annotated[
    str | None, MaxLen(1000), Doc("`next_cursor` of the previous page. Leave it out for the first page.")
]
IfMatch = Annotated[
    str | None, MaxLen(100), Doc("The ETag that you read. The request fails if the resource has changed since.")
]
IdempotencyKey = Annotated[
    str | None,
    MinLen(1),
    MaxLen(200),
    Pattern(r"^[!-~]+$"),
    Doc("Makes the request safe to repeat: a second request with the same key has no further effect."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page may be shorter than requested and still have a successor. The last page has no `next_cursor`."""

    items: list[T]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Generic[T]):
    """A record with its version. Over HTTP the version is the ETag."""

    record: T
    etag: str


def encode_cursor(*key: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def read_cursor(text: str | None, *first: T) -> tuple[T, ...]:
    """The key in a cursor, with the types of `first`, which is the start of the first page."""
    if text is None:
        return first
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError):
        found = None
    is_valid = (
        isinstance(found, list)
        and len(found) == len(first)
        and all(type(one) is type(other) for one, other in zip(found, first, strict=True))
        and all(abs(one) <= LARGEST for one in found if isinstance(one, int))
        and all("\x00" not in one and one.encode(errors="replace").decode() == one for one in found if type(one) is str)
    )
    if not is_valid:
        raise UserError("This cursor is invalid. Repeat the request without a cursor.")
    return tuple(found)


def etag_of(record: object) -> str:
    """The ETag of a record without a version of its own: a hash of its content."""
    content = json.dumps(asdict(record), default=str, sort_keys=True)  # type: ignore[call-overload]
    return f'"{hashlib.sha256(content.encode()).hexdigest()[:32]}"'


def refuse_stale(if_match: str | None, etag: str) -> None:
    if if_match is not None and if_match not in (etag, "*"):
        raise PreconditionFailed(
            f"The resource has changed: its ETag is {etag} now. Read it again and repeat the change."
        )


def like(text: str | None) -> str | None:
    """A LIKE pattern for texts that contain this one literally."""
    if text is None:
        return None
    plain = text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
    return f"%{plain}%"
