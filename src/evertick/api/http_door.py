"""HTTP as uvicorn reads it with `httptools`, and a bound on what comes before, between and after the bodies.

The parser keeps a head until it is whole, whatever its size: whoever sends one without an end would fill the memory.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024


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

    def on_body(self, body: bytes) -> None:
        self._bytes_since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_since = 0
        super().on_message_complete()
