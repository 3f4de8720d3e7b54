"""One GET request to a health port, with a deadline and a size limit. Plain HTTP only, for Evertick's own ports."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

MOST_ANSWER_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    status: int
    body: bytes

    def document(self) -> dict[str, object]:
        """The JSON object in the response. Raises ValueError if there is none."""
        found = json.loads(self.body)
        if not isinstance(found, dict):
            raise ValueError("the response is not a JSON object")
        return found


async def get(url: str, *, seconds: float) -> Got:
    """Raises OSError or TimeoutError without a response in time, ValueError if the response is not that of a health port."""
    place = urlsplit(url)
    if place.scheme != "http" or not place.hostname:
        raise ValueError(f"{url!r} is not the address of a health port. It must look like http://127.0.0.1:8790")
    target = f"{place.path or '/'}?{place.query}" if place.query else place.path or "/"
    request = f"GET {target} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n"
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        try:
            writer.write(request.encode("ascii"))
            return _parsed(await _read_all(reader))
        finally:
            writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts, total = [], 0
    while part := await reader.read(64 * 1024):
        parts.append(part)
        total += len(part)
        if total > MOST_ANSWER_BYTES:
            raise ValueError(f"the response is larger than {MOST_ANSWER_BYTES} bytes")
    return b"".join(parts)


def _parsed(answer: bytes) -> Got:
    head, found, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if not found or not words[0].startswith(b"HTTP/1.") or len(words) < 2:
        raise ValueError("the response is not HTTP")
    return Got(status=int(words[1]), body=body)
