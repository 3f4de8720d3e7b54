"""Refuses to serve the API publicly before an admin has a password. Imports no hashing: a sleeping process runs this check."""

from __future__ import annotations

import ipaddress

from psycopg import AsyncConnection

from evertick.db.queries import accounts
from evertick.domain.errors import InvalidSettings


async def refuse_open_door(conn: AsyncConnection, *, host: str, has_password: bool) -> None:
    """A public API needs an admin with a password first: otherwise the first visitor with the setup link becomes the admin."""
    if has_password or is_loopback(host) or (await accounts.count_accounts(conn)).with_password:
        return
    raise InvalidSettings(
        f"EVERTICK_API_HOST={host} is reachable from other machines, but no user has a password yet. Set one with `evertick"
        " users password admin`, or EVERTICK_ADMIN_PASSWORD for automation."
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
