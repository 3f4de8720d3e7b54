"""Whether the API may answer strangers: not before somebody has a password. Imports no hashing: a process that sleeps asks this."""

from __future__ import annotations

import ipaddress

from psycopg import AsyncConnection

from evertick.domain.errors import InvalidSettings
from evertick.store import access


async def refuse_open_door(conn: AsyncConnection, *, host: str, has_password: bool) -> None:
    """Whoever answers strangers must have an admin with a password first: else the first to find the link owns it all."""
    if has_password or is_loopback(host) or (await access.count_accounts(conn)).with_password:
        return
    raise InvalidSettings(
        f"EVERTICK_API_HOST={host} is open to others, and no user has a password yet. Set one with `evertick users password"
        " admin`, or EVERTICK_ADMIN_PASSWORD for automation."
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
