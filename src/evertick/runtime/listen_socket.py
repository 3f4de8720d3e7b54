"""Binds the API's port and passes it as standard input to the process that serves it, as inetd did.

`evertick up` holds the port from the start, and starts that process on the first connection.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from evertick.config import Settings
from evertick.domain.errors import InvalidSettings
from evertick.observability.logging import Log

DEFAULT_PORT = 8080
# The folder of a home with the addresses of its APIs.
API_NOTES = "api"
BACKLOG = 128


def listen(settings: Settings, log: Log) -> socket.socket:
    """The configured port. If none is configured and the default is taken, any free port: a second `up` must not fail."""
    if settings.api_port is not None:
        return bound(settings.api_host, settings.api_port)
    try:
        return bound(settings.api_host, DEFAULT_PORT)
    except InvalidSettings:
        found = bound(settings.api_host, 0)
        log.warning("port_unavailable", wanted=DEFAULT_PORT, port=found.getsockname()[1])
        return found


def inherited_socket() -> socket.socket | None:
    """Standard input, if it is a listening socket that the parent process opened."""
    try:
        found = socket.socket(fileno=os.dup(sys.__stdin__.fileno())) if sys.__stdin__ else None
        if found is not None and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.setblocking(False)
            return found
    except (OSError, ValueError):
        return None
    return None


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. A configured port that is taken raises an error that says so."""
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidSettings(f"EVERTICK_API_HOST={host}: {error.strerror}.") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise InvalidSettings(
            f"The API cannot listen on {host} port {port}: {error.strerror}. Choose another with EVERTICK_API_PORT; 0 takes any."
        ) from None
    return made


def address_of(made: socket.socket) -> str:
    name: tuple[Any, ...] = made.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
