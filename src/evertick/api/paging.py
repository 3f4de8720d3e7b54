"""Headers and ETags of routes that are not bound to an operation yet."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import Header, Response
from pydantic import BaseModel

IfMatch = Annotated[
    str | None, Header(max_length=100, description="The ETag that you read: the request fails if it has changed.")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1, max_length=200, pattern=r"^[!-~]+$", description="A second request with this key has no effect."
    ),
]


def etag_of(document: BaseModel) -> str:
    return f'"{hashlib.sha256(document.model_dump_json().encode()).hexdigest()[:32]}"'


def put_etag(response: Response, etag: str) -> None:
    response.headers["ETag"] = etag
