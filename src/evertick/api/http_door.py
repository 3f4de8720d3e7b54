"""HTTP as uvicorn reads it with `httptools`, and a bound on what comes before, between and after the bodies.

The parser keeps a head until it is whole, whatever its size: whoever sends one without an end would fill the memory.
And an answer leaves in one piece: its head alone would cost another call of the system, another packet and another reading.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024


class WholeAnswer:
    """The transport of one answer: keeps a head that says how long its body is until that begins. A stream has no such head."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._has_begun = False

    def write(self, data: bytes) -> None:
        is_first, self._has_begun = not self._has_begun, True
        if self._head is not None:
            data, self._head = self._head + data, None
        elif is_first and b"\r\ncontent-length: " in data:
            self._head = data
            return
        self._transport.write(data)

    def close(self) -> None:
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection that sends much without getting on: a head, a trailer or a chunk's extension without an end."""

    _bytes_since = 0

    def data_received(self, data: bytes) -> None:
        self._bytes_since += len(data)
        super().data_received(data)
        if self._bytes_since > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {MOST_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._bytes_since = 0
        super().on_headers_complete()
        if self.scope["method"] == "GET":
            self.cycle.transport = WholeAnswer(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._bytes_since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_since = 0
        super().on_message_complete()
