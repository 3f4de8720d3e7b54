"""Posts one message to a webhook: only to the verified address, within a time limit, without following redirects.

An address is public, or the settings allow its network; it is resolved once and used as verified.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import DeliveryFailed
from evertick.domain.notifications import read_destination

# Receives a function that aborts the connection, as soon as there is one.
OnOpen = Callable[[Callable[[], None]], None]


def cut(sock: socket.socket | None) -> None:
    """End every wait on the socket. It may be closed already."""
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


Address = IPv4Address | IPv6Address


# A NAT64 gateway translates these to the IPv4 address inside them (RFC 6052, RFC 8215).
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))


def resolve(host: str, port: int, *, allowed: Iterable[str]) -> list[Address]:
    """The addresses of a name, resolved once: only these are connected to, and no later answer counts. May take long.

    Raises DeliveryFailed if there is none, or if one of them is not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeliveryFailed(f"the name {host} cannot be resolved: {reason}") from None
    addresses = list(dict.fromkeys(ip_address(str(place[0]).partition("%")[0]) for *_, place in found))
    networks = [ip_network(each) for each in allowed]
    for address in addresses:
        if not is_public(address) and not any(address in each for each in networks):
            resolved = host if host == str(address) else f"{host} resolves to {address}, which"
            remedy = "EVERTICK_WEBHOOK_ALLOWED_NETWORKS can allow it"
            raise DeliveryFailed(f"{resolved} is not a public address; {remedy}", is_final=True)
    return addresses


def unreachable(spec: DagSpec, *, allowed: Iterable[str]) -> list[str]:
    """The webhooks of a DAG that name an address, or this machine, to which nothing is sent. Other names may change."""
    found: dict[str, str] = {}
    for rule in [*spec.notices, *(rule for task in spec.tasks for rule in task.notices)]:
        target = read_destination(rule.sink).target
        host = urlsplit(target).hostname if target.startswith("http") else None
        with suppress(ValueError):
            if host is not None and (host == "localhost" or ip_address(host)):
                try:
                    resolve(host, 0, allowed=allowed)
                except DeliveryFailed as error:
                    found[rule.sink] = f"sink {rule.sink} of {spec.name} receives nothing: {error}"
    return [*found.values()]


def is_public(address: Address) -> bool:
    """Whether it is public, and so is every IPv4 address embedded in it."""
    if (inner := _inner(address)) is not None:
        return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: Address) -> IPv4Address | None:
    if isinstance(address, IPv4Address):
        return None
    if any(address in network for network in _TRANSLATED):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo


# For the whole delivery: name resolution, connection, response.
SEND_SECONDS = 10.0


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


def send(post: Post, on_open: OnOpen) -> str:
    """The destination's response, abbreviated. Blocking; raises DeliveryFailed or OSError."""
    place = urlsplit(post.url)
    host, is_secure = place.hostname or "", place.scheme == "https"
    port = place.port or (443 if is_secure else 80)
    sock = _connect(resolve(host, port, allowed=post.allowed), port)
    try:
        on_open(lambda: cut(sock))
        if is_secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection = http.client.HTTPConnection(host, port, timeout=SEND_SECONDS)
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


def _connect(addresses: list[Address], port: int) -> socket.socket:
    failed: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((str(address), port), timeout=SEND_SECONDS)
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
