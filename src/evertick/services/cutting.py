"""Aborts a blocking socket call in another thread: closing the socket alone would leave the call waiting."""

from __future__ import annotations

import socket
from collections.abc import Callable

# Receives a function that aborts the connection, as soon as there is one.
OnOpen = Callable[[Callable[[], None]], None]


def cut(sock: socket.socket | None) -> None:
    """End every wait on the socket. It may be closed already."""
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
