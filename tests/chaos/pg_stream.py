"""Enough of PostgreSQL's protocol to know which statement a reply belongs to, and whether it ended its transaction.

Pure: bytes in, whole messages out. Must never hold back a byte that makes a message whole.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102
_QUERY, _PARSE, _BIND, _SYNC = b"Q", b"P", b"B", b"S"
_ERROR, _READY = b"E", b"Z"
_IDLE = b"I"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What a client sent up to a point where it waits for the server to be ready: the texts of its statements."""

    texts: list[str] = field(default_factory=list)
    is_startup: bool = False


class Requests:
    """The client's side of a connection. `pending` has the exchanges that the server has not answered yet."""

    def __init__(self) -> None:
        self._rest = b""
        self._has_started = False
        self._prepared: dict[bytes, str] = {}
        self._open = Exchange()
        self.pending: deque[Exchange] = deque()

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """What goes on to the server, and what the client is answered at once: "no" to every wish for encryption."""
        self._rest += chunk
        onward, answer = b"", b""
        while (message := self._next()) is not None:
            if not self._has_started and self._is_wish(message):
                answer += b"N"
                continue
            onward += message
            self._note(message)
        return onward, answer

    def _next(self) -> bytes | None:
        head = 1 if self._has_started else 0
        if len(self._rest) < head + 4:
            return None
        (length,) = struct.unpack_from("!i", self._rest, head)
        if len(self._rest) < head + length:
            return None
        message, self._rest = self._rest[: head + length], self._rest[head + length :]
        return message

    def _is_wish(self, message: bytes) -> bool:
        return struct.unpack_from("!i", message, 4)[0] in (_SSL_REQUEST, _GSS_REQUEST)

    def _note(self, message: bytes) -> None:
        if not self._has_started:
            self._has_started = True
            if struct.unpack_from("!i", message, 4)[0] != _CANCEL_REQUEST:
                self.pending.append(Exchange(is_startup=True))
            return
        kind, body = message[:1], message[5:]
        match kind:
            case b"Q":
                self._open.texts.append(_text(body.split(b"\0", 1)[0]))
                self._close()
            case b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = _text(text)
            case b"B":
                _, name, _ = body.split(b"\0", 2)
                self._open.texts.append(self._prepared.get(name, ""))
            case b"S":
                self._close()

    def _close(self) -> None:
        self.pending.append(self._open)
        self._open = Exchange()


class Replies:
    """The server's side of a connection, cut into whole messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        self._rest += chunk
        messages, at = [], 0
        while len(self._rest) >= at + 5:
            end = at + 1 + struct.unpack_from("!i", self._rest, at + 1)[0]
            if len(self._rest) < end:
                break
            messages.append(self._rest[at:end])
            at = end
        self._rest = self._rest[at:]
        return messages


def is_error(message: bytes) -> bool:
    return message[:1] == _ERROR


def is_ready(message: bytes) -> bool:
    """The server has answered a whole exchange."""
    return message[:1] == _READY


def is_outside_transaction(ready: bytes) -> bool:
    return ready[5:6] == _IDLE


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
