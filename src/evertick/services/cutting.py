"""Breaks off what waits on a socket in another thread: closing alone would leave it waiting."""

from __future__ import annotations

import socket
from collections.abc import Callable

# Is told how what may hang can be broken off, as soon as there is something.
OnOpen = Callable[[Callable[[], None]], None]


def cut(sock: socket.socket | None) -> None:
    """Whoever waits on it stops waiting. It may be closed already."""
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
