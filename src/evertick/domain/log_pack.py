"""How chunks of logs stand in one object of a storage: each packed for itself, one after the other, so that any can be read alone.

The whole is a gzip file of many members: `zcat` shows all the lines, also where Evertick is not at hand. Pure.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

# Collisions are nobody's aim here: it tells what was changed, or is another object's.
_DIGEST_BYTES = 8
# Text of one second is packed at this level in a tenth of it; higher ones win little.
_LEVEL = 6


class Piece(NamedTuple):
    """Where in an object a chunk is, and the digest of what must be there."""

    at: int
    size: int
    digest: bytes


def object_name(run_id: int, object_id: UUID) -> str:
    return f"logs/{run_id}/{object_id}.gz"


def pack(contents: Iterable[str]) -> tuple[bytes, list[Piece]]:
    """The object, and the place of each of them."""
    body, pieces = bytearray(), []
    for content in contents:
        packed = gzip.compress(content.encode(), _LEVEL, mtime=0)
        pieces.append(Piece(len(body), len(packed), _digest(packed)))
        body += packed
    return bytes(body), pieces


def unpack(packed: bytes, piece: Piece) -> str | None:
    """The lines; None if this is not what was packed."""
    if len(packed) != piece.size or _digest(packed) != piece.digest:
        return None
    try:
        return gzip.decompress(packed).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None


def _digest(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()[:_DIGEST_BYTES]
