"""Pages by key and records with a version: opaque cursors, ETags, and the constraints that operations share.

A cursor holds nothing secret. Constraints are metadata of the annotations: the API validates them, a local command does not.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen

from evertick.domain.errors import PreconditionFailed, UserError

MOST_ITEMS, USUAL_ITEMS = 200, 50
LARGEST = 2**63 - 1
# A list that is read whole has at most this many items.
MOST_LISTED = 10_000

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPattern:
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
    TextPattern(r"^[!-~]+$"),
    Doc("Makes the request safe to repeat: a second request with the same key has no further effect."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page may be shorter than requested and still have a successor. The last page has no `next_cursor`."""

    items: list[T]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Generic[T]):
    """A record with its version. Over HTTP the version is the ETag. `is_new`: this request created it."""

    record: T
    etag: str
    is_new: bool = False


class RequestBody:
    """The body of a request. A field that it does not have is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "forbid"}


def record_of(kind: type[T], row: object, /, **given: object) -> T:
    """A record with the given fields. The others are the row's fields of the same names."""
    names = (each.name for each in fields(kind))  # type: ignore[arg-type]
    return kind(**given, **{name: getattr(row, name) for name in names if name not in given})


def aware(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise UserError("Give instants with an offset, such as 2030-01-01T00:00:00Z.")
    return instant


def page_of(found: Sequence[R], limit: int, key: Callable[[R], tuple[object, ...]], kind: Callable[[R], T]) -> Page[T]:
    """The rows as records. A full page has a successor, which begins after the key of its last row."""
    last = encode_cursor(*key(found[-1])) if len(found) == limit else None
    return Page(items=[kind(row) for row in found], next_cursor=last)


def short_page(
    found: Sequence[R], limit: int, cursor: str | None, key: Callable[[R], tuple[Any, ...]], kind: Callable[[R], T]
) -> Page[T]:
    """One page of a list that is short enough to be read whole, in the order of its key."""
    rows = sorted(found, key=key)
    if cursor is not None and rows:
        after = read_cursor(cursor, *key(rows[0]))
        rows = [row for row in rows if key(row) > after]
    page = page_of(rows[:limit], limit, key, kind)
    return page if len(rows) > limit else replace(page, next_cursor=None)


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


def is_unchanged(if_none_match: str | None, etag: str) -> bool:
    """Whether the caller has this version already."""
    tags = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
    return etag in tags or tags == ["*"]


def like(text: str | None) -> str | None:
    """A LIKE pattern for texts that contain this one literally."""
    if text is None:
        return None
    plain = text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
    return f"%{plain}%"
