"""Pages by key, and documents with a version: opaque cursors, ETag and If-Match. A cursor holds nothing secret."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Annotated, Generic, TypeVar

from fastapi import Header, Query, Response
from pydantic import BaseModel

from evertick.domain.errors import Stale, UserError

MOST_ITEMS, USUAL_ITEMS = 200, 50
LARGEST = 2**63 - 1

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=MOST_ITEMS, description="How many at most.")]
Cursor = Annotated[
    str | None,
    Query(alias="cursor", max_length=1000, description="`next_cursor` of the page before; left out for the first one."),
]
IfMatch = Annotated[str | None, Header(max_length=100, description="The ETag that was read: refuse if it has changed.")]
IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=200, pattern=r"^[!-~]+$", description="The same key again is the same thing."),
]


class Page(BaseModel, Generic[T]):
    """A page may have fewer items than asked for and still not be the last: that one has no `next_cursor`."""

    items: list[T]
    next_cursor: str | None


def cursor(*key: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def read_cursor(text: str | None, *first: T) -> tuple[T, ...]:
    """The key in a cursor, of the same kinds as `first`, which is where the first page begins."""
    if text is None:
        return first
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError):
        found = None
    is_right = (
        isinstance(found, list)
        and len(found) == len(first)
        and all(type(one) is type(other) for one, other in zip(found, first, strict=True))
        and all(abs(one) <= LARGEST for one in found if isinstance(one, int))
        and all("\x00" not in one and one.encode(errors="replace").decode() == one for one in found if type(one) is str)
    )
    if not is_right:
        raise UserError("This cursor is not one of ours: begin without one.")
    return tuple(found)


def etag_of(document: BaseModel) -> str:
    return f'"{hashlib.sha256(document.model_dump_json().encode()).hexdigest()[:32]}"'


def put_etag(response: Response, etag: str) -> None:
    response.headers["ETag"] = etag


def refuse_stale(if_match: str | None, etag: str) -> None:
    if if_match is not None and if_match not in (etag, "*"):
        raise Stale(f"It has changed since: it is at {etag} now. Read it again and repeat the change.")


def like(text: str | None) -> str | None:
    """A LIKE pattern for text that contains this; nothing in it is a pattern of its own."""
    if text is None:
        return None
    plain = text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
    return f"%{plain}%"
