"""Which addresses a webhook may use: public ones, and networks that the settings allow. Protects against server-side
request forgery, so that the author of a webhook URL cannot reach this machine, its network or a cloud's metadata
service."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from evertick.domain.errors import DeliveryFailed

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
        raise DeliveryFailed(
            f"the name {host} cannot be resolved: {getattr(error, 'strerror', None) or error}"
        ) from None
    addresses = list(dict.fromkeys(ip_address(str(place[0]).partition("%")[0]) for *_, place in found))
    networks = [ip_network(each) for each in allowed]
    for address in addresses:
        if not is_public(address) and not any(address in each for each in networks):
            raise DeliveryFailed(
                f"{host} resolves to {address}, which is not a public address; EVERTICK_WEBHOOK_NETWORKS can allow it",
                is_final=True,
            )
    return addresses


def is_public(address: Address) -> bool:
    """Whether it is public, and so is every IPv4 address embedded in it."""
    inner = _inner(address)
    if inner is not None:
        return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: Address) -> IPv4Address | None:
    if isinstance(address, IPv4Address):
        return None
    if any(address in network for network in _TRANSLATED):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo
