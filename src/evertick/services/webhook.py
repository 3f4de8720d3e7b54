"""Posts one message to a webhook: only to the verified address, within a time limit, without following redirects."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from evertick.domain.errors import DeliveryFailed
from evertick.services.cutting import OnOpen, cut
from evertick.services.public_address import Address, resolve

MOST_ANSWER_BYTES = 4096
SHOWN_CHARACTERS = 200
# Statuses to retry: the destination is busy or temporarily broken.
_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A request. `key` signs it; `allowed` are permitted networks that are not public."""

    url: str
    body: bytes
    delivery: str
    key: str | None = None
    allowed: Iterable[str] = ()
    seconds: float = 10.0


def send(post: Post, on_open: OnOpen) -> str:
    """The destination's response, abbreviated. Blocking; raises DeliveryFailed or OSError."""
    place = urlsplit(post.url)
    host, is_secure = place.hostname or "", place.scheme == "https"
    port = place.port or (443 if is_secure else 80)
    sock = _connect(resolve(host, port, allowed=post.allowed), port, post.seconds)
    try:
        on_open(lambda: cut(sock))
        if is_secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection = http.client.HTTPConnection(host, port, timeout=post.seconds)
        connection.sock = sock
        target = f"{place.path or '/'}?{place.query}" if place.query else place.path or "/"
        connection.request("POST", target, post.body, _headers(post))
        return _answer(connection.getresponse())
    except http.client.HTTPException as error:
        raise DeliveryFailed(f"the response is not HTTP: {type(error).__name__}") from None
    finally:
        sock.close()


def signature(key: str, delivery: str, timestamp: str, body: bytes) -> str:
    """Sign id, time and body together, so that parts of different messages cannot be combined."""
    signed = f"{delivery}.{timestamp}.".encode() + body
    return "v1=" + hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()


def _headers(post: Post) -> dict[str, str]:
    timestamp = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "evertick",
        "Connection": "close",
        "Evertick-Delivery": post.delivery,
        "Evertick-Timestamp": timestamp,
    }
    if post.key is not None:
        headers["Evertick-Signature"] = signature(post.key, post.delivery, timestamp, post.body)
    return headers


def _connect(addresses: list[Address], port: int, seconds: float) -> socket.socket:
    failed: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((str(address), port), timeout=seconds)
        except OSError as error:
            failed = error
    raise failed or OSError("the host name has no address")


def _answer(response: http.client.HTTPResponse) -> str:
    status = response.status
    text = response.read(MOST_ANSWER_BYTES).decode("utf-8", "replace")
    said = f"HTTP {status} {' '.join(text.split())[:SHOWN_CHARACTERS]}".rstrip()
    if 200 <= status < 300:
        return f"HTTP {status}"
    if 300 <= status < 400:
        raise DeliveryFailed(f"HTTP {status}: redirects are not followed; configure the new URL", is_final=True)
    if status not in _TRANSIENT:
        raise DeliveryFailed(said, is_final=True)
    asked = response.headers.get("Retry-After", "")
    raise DeliveryFailed(said, retry_after_seconds=float(asked) if asked.isdecimal() else None)
