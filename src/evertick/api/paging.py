"""Keyset pagination with opaque cursors, and versioned documents with ETag and If-Match. Cursors contain no secrets."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Annotated, Generic, TypeVar

from fastapi import Header, Query, Response
from pydantic import BaseModel

from evertick.domain.errors import PreconditionFailed, UserError

MOST_ITEMS, USUAL_ITEMS = 200, 50
LARGEST = 2**63 - 1

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=MOST_ITEMS, description="Maximum number of items.")]
Cursor = Annotated[
    str | None,
    Query(
        alias="cursor", max_length=1000, description="`next_cursor` of the previous page; omit it for the first page."
    ),
]
IfMatch = Annotated[
    str | None,
    Header(max_length=100, description="The ETag that was read: the request fails if the document has changed since."),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1, max_length=200, pattern=r"^[!-~]+$", description="Requests with the same key create one object."
    ),
]


class Page(BaseModel, Generic[T]):
    """A page of items. A short page need not be the last one: the last page has no `next_cursor`."""

    items: list[T]
    next_cursor: str | None


def cursor(*key: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def read_cursor(text: str | None, *first: T) -> tuple[T, ...]:
    """Decode the key in a cursor. Its values have the types of `first`, the key that starts the first page."""
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
        raise UserError("Invalid cursor. Omit it to start from the first page.")
    return tuple(found)


def etag_of(document: BaseModel) -> str:
    return f'"{hashlib.sha256(document.model_dump_json().encode()).hexdigest()[:32]}"'


def put_etag(response: Response, etag: str) -> None:
    response.headers["ETag"] = etag


def refuse_stale(if_match: str | None, etag: str) -> None:
    if if_match is not None and if_match not in (etag, "*"):
        raise PreconditionFailed(
            f"Conflict: the document has changed, its ETag is now {etag}. Read it again and repeat the change."
        )


def like(text: str | None) -> str | None:
    """A LIKE pattern for text that contains `text`, with wildcards escaped."""
    if text is None:
        return None
    plain = text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
    return f"%{plain}%"
