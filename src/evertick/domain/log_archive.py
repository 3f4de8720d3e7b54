"""The format of an archived log object: each chunk is compressed separately, one after the other, so that any can be read alone.

The whole object is a multi-member gzip file: `zcat` shows all lines without Evertick. Pure.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

# A checksum against corruption and mixed-up objects, not against an attacker who constructs collisions.
_DIGEST_BYTES = 8
# One second's text compresses at this level in a tenth of a second; higher levels gain little.
_LEVEL = 6


class Piece(NamedTuple):
    """The position of a chunk in an object, and the digest of its bytes."""

    at: int
    size: int
    digest: bytes


def object_name(run_id: int, object_id: UUID) -> str:
    return f"logs/{run_id}/{object_id}.gz"


def pack(contents: Iterable[str]) -> tuple[bytes, list[Piece]]:
    """The object, and the position of each chunk."""
    body, pieces = bytearray(), []
    for content in contents:
        packed = gzip.compress(content.encode(), _LEVEL, mtime=0)
        pieces.append(Piece(len(body), len(packed), _digest(packed)))
        body += packed
    return bytes(body), pieces


def unpack(packed: bytes, piece: Piece) -> str | None:
    """The lines; None if the bytes differ from the packed ones."""
    if len(packed) != piece.size or _digest(packed) != piece.digest:
        return None
    try:
        return gzip.decompress(packed).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None


def _digest(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()[:_DIGEST_BYTES]
