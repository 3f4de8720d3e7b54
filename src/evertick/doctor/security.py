"""The findings of `evertick doctor --security`: what is weak in this installation, though it works."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_network

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db import roles
from evertick.db.queries import accounts
from evertick.db.queries.accounts import AccessFacts
from evertick.doctor.database import Finding, warning
from evertick.engine.public_access import is_loopback

UNUSED_DAYS = 90
# A network of this size or larger is not a list of destinations.
_WIDE_PREFIX = 8


def check_configuration(settings: Settings) -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield warning(
            "root",
            "This user is root.",
            "A task of a runner that runs as root can read and change everything on the machine.",
            "Run each service as a user of its own: docs/howto/harden.md",
        )
    if not is_loopback(settings.api_host) and not (settings.public_url or "").startswith("https:"):
        yield warning(
            "no_tls",
            f"The API listens on {settings.api_host}, and EVERTICK_PUBLIC_URL is no https:// address.",
            "Without TLS, tokens and passwords can be read on the network.",
            "Put a reverse proxy with TLS before it, and set EVERTICK_PUBLIC_URL.",
        )
    if settings.admin_password is not None:
        yield warning(
            "admin_password",
            "EVERTICK_ADMIN_PASSWORD is set.",
            "It is used once; from then on it only tells the password to others who can read it.",
            "Remove it, and change the password in the web UI.",
        )
    if settings.api_rate_limit == 0:
        yield warning(
            "rate_limit",
            "EVERTICK_API_RATE_LIMIT is 0: requests are not limited.",
            "One client can keep the API busy.",
            "Remove the setting: the default is 100 requests per second.",
        )
    for text in settings.webhook_allowed_networks:
        if ip_network(text).prefixlen < _WIDE_PREFIX:
            yield warning(
                "webhook_networks",
                f"EVERTICK_WEBHOOK_ALLOWED_NETWORKS has {text}.",
                "Every author of a DAG can make the scheduler send requests to internal services.",
                "Name only the destinations that notifications need.",
            )


async def check_access(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    facts = await accounts.access_facts(conn, unused_days=UNUSED_DAYS)
    for each in check_facts(facts, has_provider=settings.oidc_file is not None):
        yield each
    if not await roles.are_used(conn):
        yield warning(
            "database_roles",
            "All services can use one database login.",
            "A runner with it can read every secret, the users and the audit log.",
            "Run: evertick db roles --apply, and give each service a login with its role.",
        )


def check_facts(facts: AccessFacts, *, has_provider: bool) -> Iterator[Finding]:
    if has_provider and not facts.local_admins:
        yield warning(
            "no_local_admin",
            "No administrator can sign in with a password.",
            "If the sign-in provider fails, no user can sign in.",
            "Keep one: evertick users add rescue --role admin, and set its password with evertick users link rescue.",
        )
    if facts.endless_tokens:
        yield warning(
            "endless_tokens",
            f"{facts.endless_tokens} tokens never expire.",
            "A token that was copied stays valid until it is revoked.",
            "Replace each by one with an expiry: evertick tokens list",
        )
    if facts.unused_tokens:
        yield warning(
            "unused_tokens",
            f"{facts.unused_tokens} tokens were not used for {UNUSED_DAYS} days.",
            "The theft of one of them would go unnoticed.",
            "Revoke them: evertick tokens list",
        )
    if facts.admin_tokens:
        yield warning(
            "admin_tokens",
            f"{facts.admin_tokens} tokens have all rights of an administrator.",
            "A program rarely needs to manage users.",
            "Replace each by one with a lower role: evertick tokens create NAME TITLE --role operator",
        )
