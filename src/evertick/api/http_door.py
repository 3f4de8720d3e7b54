"""Uvicorn's `httptools` protocol with a size limit on headers, trailers and chunk extensions, and single-write responses.

The parser buffers headers of any size until they are complete: headers without an end would fill the memory.
Header and body of a response leave in one write: separate writes cost another system call, packet and read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024


class WholeAnswer:
    """The transport of one response: holds back a header with a content length until the body begins. Streams have none."""

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
    """Closes a connection that sends headers, trailers or chunk extensions above the size limit."""

    _bytes_since = 0

    def data_received(self, data: bytes) -> None:
        self._bytes_since += len(data)
        super().data_received(data)
        if self._bytes_since > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request headers too large: the limit is {MOST_HEAD_BYTES} bytes.")

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
