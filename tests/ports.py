"""Ports for servers that a test starts later, or stops and starts again at the same place."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def own_port() -> int:
    """A port of this machine that nobody else is given while this process lives.

    It is held without listening there. Whoever asks for that port by its number and with SO_REUSEADDR, as servers do, can listen
    at it; one that was only looked at and given back could be anybody's by then.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])
