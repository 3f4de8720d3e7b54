"""Stands between Evertick and a real S3 server, and does what networks and busy servers do."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

BUSY = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\n\r\n<Error><Code>SlowDown</Code></Error>"


class Fault(StrEnum):
    """What happens to a request."""

    BUSY = "the server is too busy"
    SILENT = "nobody answers"
    CUT = "the answer breaks off in its middle"
    LOST = "it is done, and the answer never comes"
    WRONG = "one byte of the answer is another"


class FaultyWay:
    """One request per connection, as Evertick asks. `fault` is for those whose method is in `methods`."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.fault: Fault | None = None
        self.methods = ("GET", "PUT", "HEAD", "DELETE")
        self.asked: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            request = _whole(client)
            method = request.split(b" ", 1)[0].decode()
            self.asked.append(method)
            fault = self.fault if method in self.methods else None
            if fault is Fault.SILENT:
                client.recv(1)
            elif fault is Fault.BUSY:
                client.sendall(BUSY)
            else:
                client.sendall(_spoiled(self._answer(request), fault))

    def _answer(self, request: bytes) -> bytes:
        with socket.create_connection(self._upstream) as server:
            server.sendall(request)
            answer = b""
            while piece := server.recv(65536):
                answer += piece
        return answer


def _whole(client: socket.socket) -> bytes:
    """A request with its body."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += client.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    told = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    while told and len(body) < int(told[1]):
        piece = client.recv(65536)
        request, body = request + piece, body + piece
    return request


def _spoiled(answer: bytes, fault: Fault | None) -> bytes:
    head, gap, body = answer.partition(b"\r\n\r\n")
    if fault is Fault.LOST:
        return b""
    if fault is Fault.CUT:
        return head + gap + body[: len(body) // 2] if body else b""
    if fault is Fault.WRONG and body:
        return head + gap + body[:-1] + bytes([body[-1] ^ 1])
    return answer


@contextmanager
def faulty_way(endpoint: str) -> Iterator[FaultyWay]:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    way = FaultyWay((host, int(port)))
    try:
        yield way
    finally:
        way.close()
