"""One HTTP request on its own connection, with a deadline and a size limit. For agents: small, and cancelable at any time.

Follows no redirects: the token is sent only to the configured address.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import h11

from evertick.domain.errors import EvertickError
from evertick.domain.remote import read_server_url

_PART_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`content` is streamed; `size` is its length in bytes."""

    method: str
    path: str
    token: str = field(repr=False)
    content: AsyncIterator[bytes] | bytes = field(default=b"", repr=False)
    size: int = 0
    kind: str = "application/json"


class Address:
    """A server's address, from its URL. Raises InvalidSettings for an invalid one."""

    def __init__(self, url: str) -> None:
        parts = read_server_url(url)
        self._host, self._netloc, self._path = parts.hostname, parts.netloc, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self.is_plain = self._tls is None and self._host not in ("localhost", "127.0.0.1", "::1")

    async def ask(self, request: Request, *, seconds: float, most_bytes: int) -> Answer:
        """Send the request. Raises OSError or TimeoutError without a complete response; the server may still have processed it."""
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            try:
                return await self._exchange(request, reader, writer, most_bytes)
            except h11.RemoteProtocolError as error:
                raise OSError(f"the response is not HTTP: {error}") from None
            except h11.LocalProtocolError as error:
                # The file changed while it was sent: not a network error, and a retry would not help.
                raise EvertickError(f"the request cannot be sent: {error}") from None
            finally:
                writer.close()

    async def _exchange(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_bytes: int
    ) -> Answer:
        line = h11.Connection(h11.CLIENT)
        content = request.content
        size = len(content) if isinstance(content, bytes) else request.size
        headers = [("Host", self._netloc), ("Connection", "close"), ("Authorization", f"Bearer {request.token}")]
        headers += [("Accept", "application/json"), ("Content-Type", request.kind), ("Content-Length", str(size))]
        head = h11.Request(method=request.method, target=f"{self._path}{request.path}", headers=headers)
        writer.write(line.send(head) or b"")
        async for part in _parts(content):
            writer.write(line.send(h11.Data(data=part)) or b"")
            await writer.drain()
        writer.write(line.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return await _read(line, reader, most_bytes)


async def _parts(content: AsyncIterator[bytes] | bytes) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        if content:
            yield content
        return
    async for part in content:
        yield part


async def _read(line: h11.Connection, reader: asyncio.StreamReader, most_bytes: int) -> Answer:
    status, headers, parts, total = 0, {}, [], 0
    while True:
        match line.next_event():
            case h11.NEED_DATA:
                read = await reader.read(_PART_BYTES)
                if not read and not status:
                    raise OSError("the connection broke before a response arrived")
                line.receive_data(read)
            case h11.Response() as response:
                status = response.status_code
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            case h11.Data() as part:
                total += len(part.data)
                if total > most_bytes:
                    raise OSError(f"the response is larger than {most_bytes} bytes")
                parts.append(bytes(part.data))
            case h11.EndOfMessage():
                return Answer(status=status, headers=headers, body=b"".join(parts))
            case h11.InformationalResponse():
                pass
            case _:
                raise OSError("the connection broke before the response was complete")
